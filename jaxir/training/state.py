"""What a step changes: parameters and optimizer state, sharded by logical axes from the start on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxir.interop import array_checksums
from jaxir.models.layers import param_shardings
from jaxir.partitioning import Partitioner
from jaxir.training.optimizers import BuiltOptimizer

Batch = Mapping[str, Any]
Metrics = dict[str, jax.Array]
Objective = Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, Metrics]]


class TrainState(NamedTuple):
    """The state of training.

    Attributes:
      step: int32 [], the number of finished steps.
      params: the model's parameters, as the nested dict `nnx.to_pure_dict` gives.
      opt_state: what optax keeps for them.
    """

    step: jax.Array
    params: Any
    opt_state: Any


class Plan(NamedTuple):
    """A model taken apart for jit, and where its state lies.

    Attributes:
      graphdef: the model without its parameters; static.
      shardings: a TrainState of NamedShardings.
      abstract: a TrainState of sharded shapes and types, to restore a checkpoint into.
    """

    graphdef: Any
    shardings: TrainState
    abstract: TrainState


def plan_state(model: nnx.Module, transform: optax.GradientTransformation, partitioner: Partitioner) -> Plan:
    """Decides where the parameters of `model` and their optimizer state lie on the mesh; allocates nothing.

    A parameter lies as its logical axes say (on every device where it names none); a moment of a
    parameter's shape lies like the parameter, and Adafactor's row and column means like the dimensions of it
    that they keep; the rest (step counts) is on every device.

    Raises:
      ValueError: the model holds state that is not a parameter, which no checkpoint would keep.
    """
    graphdef, variables, rest = nnx.split(model, nnx.Param, ...)
    if jax.tree.leaves(rest):
        raise ValueError(f"the trainer keeps only nnx.Param, but the model also holds {rest}")
    params = jax.tree.map(_abstract, nnx.to_pure_dict(variables))
    layout = nnx.to_pure_dict(param_shardings(variables, partitioner))
    whole = NamedSharding(partitioner.mesh, PartitionSpec())
    opt_shapes = jax.eval_shape(transform.init, params)
    beside = dict(
        zip(
            (path for path, _ in jax.tree_util.tree_leaves_with_path(params)),
            zip(jax.tree.leaves(params), jax.tree.leaves(layout), strict=True),
            strict=True,
        )
    )

    def lies(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Finds the parameter that the end of `path` names; before it stands what is kept of it."""
        for at in range(len(path)):
            if path[at:] in beside:
                field = getattr(path[at - 1], "name", "") if at else ""
                return _like_parameter(field, leaf.shape, *beside[path[at:]]) or whole
        return whole

    shardings = TrainState(
        step=whole, params=layout, opt_state=jax.tree_util.tree_map_with_path(lies, opt_shapes)
    )
    shapes = TrainState(step=jax.ShapeDtypeStruct((), jnp.int32), params=params, opt_state=opt_shapes)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return Plan(graphdef, shardings, abstract)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _like_parameter(
    field: str, shape: tuple[int, ...], param: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> NamedSharding | None:
    """Returns where an array that the optimizer keeps beside `param` lies, or None for anywhere.

    optax's Adafactor leaves out the largest dimension in `v_row` and the second largest in `v_col`, and
    keeps an array of one number where it does not factor.
    """
    if shape == param.shape:
        return sharding
    if field not in ("v_row", "v_col") or len(param.shape) < 2:
        return None
    left_out = np.argsort(param.shape)[-1 if field == "v_row" else -2]
    if shape != tuple(np.delete(param.shape, left_out)):
        return None
    spec = np.array([*sharding.spec, *[None] * (len(param.shape) - len(sharding.spec))], object)
    return NamedSharding(sharding.mesh, PartitionSpec(*np.delete(spec, left_out)))


def initial_state(model: nnx.Module, transform: optax.GradientTransformation, plan: Plan) -> TrainState:
    """Returns the state before the first step; its arrays may be the model's own, laid out anew if needed."""
    params = jax.device_put(nnx.to_pure_dict(nnx.state(model, nnx.Param)), plan.shardings.params)
    return TrainState(
        step=jax.make_array_from_callback((), plan.shardings.step, lambda _: np.int32(0)),
        params=params,
        opt_state=jax.jit(transform.init, out_shardings=plan.shardings.opt_state)(params),
    )


def put_into(model: nnx.Module, params: Any) -> None:
    """Gives `model` the parameters of a state."""
    variables = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(variables, params)
    nnx.update(model, variables)


def make_step(
    graphdef: Any, objective: Objective, optimizer: BuiltOptimizer, seed: int
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the pure training step (state, batch) -> (next state, metrics), to be jitted.

    Dropout's key is fold_in(key(seed), step): a function of the step alone, so that a resumed run draws
    what an uninterrupted one would have drawn. Metrics hold the objective's own, `loss`, `grad_norm` (the
    global norm before clipping) and `learning_rate`; float32 [].
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def loss_of(params: Any) -> tuple[jax.Array, Metrics]:
            return objective(nnx.merge(graphdef, params), batch, key)

        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes int32 counts with floats
            updates, opt_state = optimizer.transform.update(gradients, state.opt_state, state.params)
        following = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
        return following, metrics | {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": optimizer.schedule(state.step),
        }

    return step


def inspect(state: TrainState) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """Returns whether every number of the state is finite (bool []) and its checksums (uint32 [] each).

    There is one for each array, by its name in "params" and in "opt_state"; see `interop.array_checksums`.
    """
    finite = jnp.bool_(True)
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            finite &= jnp.all(jnp.isfinite(leaf))
    items = {"params": state.params, "opt_state": state.opt_state}
    return finite, {name: array_checksums.of_tree(tree) for name, tree in items.items()}

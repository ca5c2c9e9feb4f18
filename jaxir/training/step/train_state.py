"""The state that a step changes (parameters and optimizer state), and the step itself."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.interop.weights import array_checksums
from jaxir.models.adapters import is_base
from jaxir.models.layers import Remat, param_shardings, unexpected_array
from jaxir.objectives.objective import Objective, loss_and_metrics
from jaxir.runtime.partitioning import Partitioner
from jaxir.training.step.optimizers import BuiltOptimizer
from jaxir.training.step.parameter_partition import apart, frozen_names, joined, name_of, select, united

Batch = Mapping[str, Any]
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """The state of training.

    Attributes:
      step: int32 [], the number of finished steps.
      params: the model's parameters, as the nested dict of `nnx.to_pure_dict`.
      opt_state: optax's state for the trained parameters (`parameter_partition.joined`).
      auxiliary: the objective's auxiliary parameters, which are not part of the model; may be empty.
      statistics: the objective's variables that are not parameters (BatchNorm's averages); may be empty.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    auxiliary: Any = {}  # noqa: RUF012 (an empty tree; never changed)
    statistics: Any = {}  # noqa: RUF012


class Plan(NamedTuple):
    """A model split for jit, and the layout of its state on the mesh.

    Attributes:
      graphdef: the model without its parameters; static.
      shardings: a TrainState of NamedShardings.
      abstract: a TrainState of sharded shapes and types, with which a checkpoint is restored.
      auxiliary: the graphdef of the objective's auxiliary module, or None.
      frozen: names of parameters that are not trained.
      unsaved: names of frozen parameters that checkpoints leave out, because the run's base model has them.
      halved: names of the model's parameters that are kept in bfloat16 (`halve_frozen`).
    """

    graphdef: Any
    shardings: TrainState
    abstract: TrainState
    auxiliary: Any = None
    frozen: frozenset[str] = frozenset()
    unsaved: frozenset[str] = frozenset()
    halved: frozenset[str] = frozenset()

    def saved(self, state: TrainState) -> TrainState:
        """Returns the part of a state, or of the layout of a state, that a checkpoint holds."""
        if self.unsaved:
            state = state._replace(params=select(state.params, lambda name: name not in self.unsaved))
        return state._replace(params=self.whole(state.params))

    def whole(self, params: Any) -> Any:
        """Returns the model's parameters in float32, also those of `halved`."""
        return _cast(params, self.halved, jnp.float32)

    def restored(self, state: TrainState, model: nnx.Module) -> TrainState:
        """Returns the whole state, given the part in a checkpoint and the model before training."""
        if not self.unsaved:
            return state
        params = jax.device_put(nnx.to_pure_dict(nnx.state(model, nnx.Param)), self.shardings.params)
        return state._replace(params=united(select(params, self.unsaved.__contains__), state.params))

    def trained(self, params: Any, auxiliary: Any) -> Any:
        """Returns the tree of trained parameters."""
        tree = joined(params, auxiliary)
        return select(tree, lambda name: name not in self.frozen) if self.frozen else tree

    def untrained(self, params: Any, auxiliary: Any) -> Any:
        """Returns the tree of frozen parameters."""
        return select(joined(params, auxiliary), self.frozen.__contains__) if self.frozen else {}

    def modules(self, params: Any, auxiliary: Any, statistics: Any) -> tuple[nnx.Module, nnx.Module | None]:
        """Returns the model and the auxiliary module (None if there is none), with the given arrays."""
        model = nnx.merge(self.graphdef, params)
        return model, None if self.auxiliary is None else nnx.merge(self.auxiliary, auxiliary, statistics)

    def with_remat(self, remat: Remat) -> "Plan":
        """Returns the plan with `remat` in place of "auto" in every stack of blocks."""
        state = self.abstract
        modules = self.modules(state.params, state.auxiliary, state.statistics)
        for _, part in nnx.iter_graph(modules):
            config = getattr(part, "config", None)
            if getattr(config, "remat", None) == "auto":
                part.config = dataclasses.replace(config, remat=remat)
        graphdef, auxiliary = (None if m is None else nnx.graphdef(m) for m in modules)
        return self._replace(graphdef=graphdef, auxiliary=auxiliary)


def plan_state(
    model: nnx.Module,
    transform: optax.GradientTransformation,
    partitioner: Partitioner,
    *,
    auxiliary: nnx.Module | None = None,
    frozen: Sequence[str] = (),
    elsewhere: Callable[[str], bool] | None = None,
) -> Plan:
    """Chooses the shardings of the parameters of `model` and of the optimizer state; allocates nothing.

    A parameter is sharded by its logical axes, and replicated if it has none. A moment with its parameter's
    shape is sharded like the parameter. Adafactor's row and column means are sharded like the dimensions that
    they keep. All other arrays, such as step counts, are replicated.

    Args:
      model: the model, with arrays or only their shapes.
      transform: the optimizer.
      partitioner: the mesh.
      auxiliary: the objective's auxiliary module.
      frozen: patterns of names of parameters that are not trained, so they have no gradients and moments. If
        the model has adapters, all of its base is frozen, too.
      elsewhere: maps the name of a parameter of the base to whether it is also stored elsewhere, so that
        checkpoints leave it out; None: checkpoints leave nothing out.
    """
    graphdef, variables, _ = nnx.split(model, nnx.Param, ...)
    if found := unexpected_array(model, nnx.Param):
        raise UserError(f"the model holds {found}, but only an nnx.Param is trained and saved: make it one")
    whole = NamedSharding(partitioner.mesh, PartitionSpec())
    params, layout = _laid_out(variables, partitioner)
    aux_graphdef, aux_params, aux_layout, statistics = None, {}, {}, {}
    if auxiliary is not None:
        aux_graphdef, variables, rest = nnx.split(auxiliary, nnx.Param, ...)
        aux_params, aux_layout = _laid_out(variables, partitioner)
        statistics = jax.tree.map(_abstract, nnx.to_pure_dict(rest))
    names, unsaved = frozen_names(joined(params, aux_params), frozen), frozenset()
    if getattr(getattr(model, "config", None), "adapters", None):
        base = {name for name in map(name_of, traverse_util.flatten_dict(params)) if is_base(name)}
        names, unsaved = names | base, frozenset(filter(elsewhere, base) if elsewhere else ())
    plan = Plan(graphdef, None, None, aux_graphdef, names, unsaved)
    trained, trained_layout = plan.trained(params, aux_params), plan.trained(layout, aux_layout)
    for path, x in jax.tree_util.tree_leaves_with_path(trained):
        if x.dtype != jnp.float32:
            # The name that patterns of `frozen` match.
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise UserError(
                f"the parameter {name} is {x.dtype} {list(x.shape)}, but only float32 is trained: convert it"
                " or freeze it (frozen)"
            )
    opt_shapes = jax.eval_shape(transform.init, trained)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    beside = {path: (x, s) for (path, x), s in zip(leaves, jax.tree.leaves(trained_layout), strict=True)}

    def lies(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Returns the sharding of an array of the optimizer; the end of `path` is its parameter's path."""
        for at in range(len(path)):
            if path[at:] in beside:
                field = getattr(path[at - 1], "name", "") if at else ""
                return _like_parameter(field, leaf.shape, *beside[path[at:]]) or whole
        return whole

    shardings = TrainState(
        step=whole,
        params=layout,
        opt_state=jax.tree_util.tree_map_with_path(lies, opt_shapes),
        auxiliary=aux_layout,
        statistics=jax.tree.map(lambda _: whole, statistics),
    )
    shapes = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_shapes, aux_params, statistics)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return plan._replace(shardings=shardings, abstract=abstract)


def _laid_out(variables: nnx.State, partitioner: Partitioner) -> tuple[Any, Any]:
    """Returns the shapes of parameters and their shardings, as nested dicts."""
    shapes = jax.tree.map(_abstract, nnx.to_pure_dict(variables))
    return shapes, nnx.to_pure_dict(param_shardings(variables, partitioner))


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _like_parameter(
    field: str, shape: tuple[int, ...], param: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> NamedSharding | None:
    """Returns the sharding of an array that the optimizer keeps for `param`; None if it may be replicated.

    optax's Adafactor omits the largest dimension in `v_row` and the second largest in `v_col`, and keeps an
    array of one number if it does not factor.
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


def initial_state(
    model: nnx.Module,
    transform: optax.GradientTransformation,
    plan: Plan,
    auxiliary: nnx.Module | None = None,
) -> TrainState:
    """Returns the state before the first step; the state may share arrays with the model."""
    params = jax.device_put(nnx.to_pure_dict(nnx.state(model, nnx.Param)), plan.shardings.params)
    aux_params, statistics = {}, {}
    if auxiliary is not None:
        _, *parts = nnx.split(auxiliary, nnx.Param, ...)
        aux_params, statistics = (
            jax.device_put(nnx.to_pure_dict(part), where)
            for part, where in zip(parts, (plan.shardings.auxiliary, plan.shardings.statistics), strict=True)
        )
    init = jax.jit(transform.init, out_shardings=plan.shardings.opt_state)
    return TrainState(
        step=jax.make_array_from_callback((), plan.shardings.step, lambda _: np.int32(0)),
        params=params,
        opt_state=init(plan.trained(params, aux_params)),
        auxiliary=aux_params,
        statistics=statistics,
    )


def halve_frozen(model: nnx.Module, plan: Plan, state: TrainState) -> tuple[Plan, TrainState]:
    """Keeps frozen kernels and tables in bfloat16 if their products are in bfloat16 and their values fit it.

    The values fit in models that were stored in bfloat16. The step computes the same numbers, in half of the
    memory for these parameters. Checkpoints still hold float32 (`Plan.saved`). `model` gets the same arrays.
    """
    leaves = traverse_util.flatten_dict(state.params)
    low = {name_of(path) for path in stored.only_in_bfloat16(model)} & plan.frozen
    found = {
        name_of(path): x for path, x in leaves.items() if name_of(path) in low and x.dtype == jnp.float32
    }
    if not found:
        return plan, state
    exact = jax.device_get(jax.jit(lambda arrays: jax.tree.map(_is_bfloat16, arrays))(found))
    plan = plan._replace(halved=frozenset(name for name, fits in exact.items() if fits))
    abstract = plan.abstract._replace(params=_cast(plan.abstract.params, plan.halved, jnp.bfloat16))
    state = state._replace(params=_cast(state.params, plan.halved, jnp.bfloat16))
    put_into(model, state.params)
    return plan._replace(abstract=abstract), state


def _is_bfloat16(x: jax.Array) -> jax.Array:
    """Returns whether all numbers of a float32 array are bfloat16 numbers: their low 16 bits are 0."""
    return jnp.all(jax.lax.bitcast_convert_type(x, jnp.uint32) & 0xFFFF == 0)


def _cast(params: Any, names: frozenset[str], dtype: Any) -> Any:
    """Returns a tree of arrays or of their shapes, with those of `names` in another type."""
    if not names:
        return params

    def cast(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
        return jax.jit(lambda y: y.astype(dtype), out_shardings=x.sharding)(x)

    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict(
        {path: cast(x) if name_of(path) in names else x for path, x in flat.items()}
    )


def put_into(model: nnx.Module, params: Any) -> None:
    """Sets the parameters of `model` to those of a state."""
    variables = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(variables, params)
    nnx.update(model, variables)


def key_data_of(seed: int, plan: Plan) -> jax.Array:
    """Returns the key data of a seed, replicated: uint32 [K], where K depends on JAX's kind of keys."""
    data = np.asarray(jax.random.key_data(jax.random.key(seed)))
    return jax.make_array_from_callback(data.shape, plan.shardings.step, lambda _: data)


def make_step(
    plan: Plan, objective: Objective, optimizer: BuiltOptimizer
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """Returns the training step: a pure function from (state, batch, key data) to (next state, metrics).

    Its key is fold_in(key(seed), step), so a resumed run draws the same random numbers as an uninterrupted
    one. The key data (`key_data_of`) are an argument, so that one compiled program serves every seed.
    Metrics are the objective's own, `loss`, `grad_norm` (the global norm before clipping) and
    `learning_rate`; float32 [].
    """
    loss_of = make_loss(plan, objective)

    def step(state: TrainState, batch: Batch, key_data: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), state.step)
        trained = plan.trained(state.params, state.auxiliary)
        (loss, (metrics, statistics)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trained, state, batch, key
        )
        with jax.numpy_dtype_promotion("standard"):  # optax combines int32 counts with floats
            updates, opt_state = optimizer.transform.update(gradients, state.opt_state, trained)
        done = state.step + 1
        changed = united(optax.apply_updates(trained, updates), plan.untrained(state.params, state.auxiliary))
        params, auxiliary = apart(changed)
        following = TrainState(done, params, opt_state, auxiliary, statistics)
        return following, metrics | {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": optimizer.schedule(state.step),
        }

    return step


def make_loss(plan: Plan, objective: Objective) -> Callable[..., tuple[jax.Array, tuple[Metrics, Any]]]:
    """Returns a function from (trained parameters, state, batch, key) to (loss, (metrics, statistics))."""

    def loss_of(
        trained: Any, state: TrainState, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, Any]]:
        params, auxiliary = apart(united(trained, plan.untrained(state.params, state.auxiliary)))
        model, beside = plan.modules(params, auxiliary, state.statistics)
        loss, metrics = loss_and_metrics(objective, model, batch, key, beside, state.step)
        if beside is None:
            return loss, (metrics, state.statistics)
        return loss, (metrics, nnx.to_pure_dict(nnx.state(beside, nnx.Not(nnx.Param))))

    return loss_of


def inspect(state: TrainState) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """Returns whether every number of the state is finite (bool []), and its checksums (uint32 [] each).

    There is one checksum for each array of "params", "opt_state" and, if not empty, "auxiliary" and
    "statistics", by the array's name; see `interop.weights.array_checksums`.
    """
    finite = jnp.bool_(True)
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            finite &= jnp.all(jnp.isfinite(leaf))
    items = {name: tree for name, tree in state._asdict().items() if name != "step" and jax.tree.leaves(tree)}
    return finite, {name: array_checksums.of_tree(tree) for name, tree in items.items()}

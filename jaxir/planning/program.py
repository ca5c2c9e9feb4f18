"""The training step of a recipe, built from shapes and compiled."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TextFormat
from jaxir.costs.hlo import Program, parse
from jaxir.costs.targets import Target
from jaxir.costs.work import differentiated, largest, size_of
from jaxir.interop.model import quantizing
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import abstract_model, halved_outline
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.layers import Remat, param_shardings
from jaxir.models.quantized import Scheme
from jaxir.objectives.objective import auxiliary_of
from jaxir.runtime import compile_cache
from jaxir.runtime.partitioning import Partitioner
from jaxir.training.run.recipe import Recipe
from jaxir.training.step import train_state as state_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe, and everything that determines its training step."""

    recipe: Recipe  # the recipe with defaults filled in, so that its number of steps is known
    config: DualEncoderConfig  # the model
    settings: EncoderSettings  # maximum lengths of texts
    partitioner: Partitioner

    @property
    def form(self) -> TextFormat:
        """How texts become tokens. A plan has no tokenizer, so the id of the mask token is arbitrary."""
        return self.settings.text_format(self.recipe.num_negatives, mask_id=1)

    @property
    def features(self) -> Features:
        """The features of a batch."""
        return self.recipe.objective.features(self.form)

    @property
    def chunks(self) -> Any:
        """Number of chunks of a batch, or "auto"."""
        return getattr(self.recipe.objective, "chunks", 1)

    @property
    def remat(self) -> Remat:
        """The part of a block that the backward pass recomputes, or "auto"."""
        return self.config.backbone.remat

    def with_chunks(self, objective: Any, batch_size: int | None = None) -> Planned:
        """Returns a copy with another objective and, if given, another batch size."""
        size = self.recipe.batch_size if batch_size is None else batch_size
        recipe = dataclasses.replace(self.recipe, objective=objective, batch_size=size)
        return dataclasses.replace(self, recipe=recipe)

    def with_remat(self, remat: Remat, **changes: Any) -> Planned:
        """Returns a copy with another remat policy, and other `changes` of the backbone."""
        backbone = dataclasses.replace(self.config.backbone, remat=remat, **changes)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, backbone=backbone))


class Step(NamedTuple):
    """A training step before compilation."""

    function: Any  # (state, batch) -> (state, metrics), as training compiles it
    state: state_lib.TrainState  # a TrainState of sharded shapes
    trained: Any  # the part of the state that the optimizer changes
    batch: Mapping[str, jax.ShapeDtypeStruct]  # sharded shapes by feature name
    forward: Any  # (trained, state, batch) -> (loss, ...)
    partitioner: Partitioner

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def activation_bytes(self) -> int:
        """Returns the bytes on each device that JAX keeps for the backward pass; a compiler may keep less.

        Arrays with a batch dimension are taken as split like the batch. Parameters are not included.
        """
        batch_size = next(iter(self.batch.values())).shape[0]
        split = self.partitioner.batch_divisor()
        parameters = {leaf.shape for leaf in jax.tree.leaves((self.state.params, self.state.auxiliary))}

        def backward(trained: Any, state: Any, batch: Any) -> Any:
            return jax.vjp(lambda t: self.forward(t, state, batch)[0], trained)[1]

        with self.partitioner():
            kept = jax.tree.leaves(jax.eval_shape(backward, self.trained, self.state, self.batch))
        total = 0
        for leaf in kept:
            if leaf.shape not in parameters:
                has_batch = any(n and n % batch_size == 0 for n in leaf.shape)
                total += size_of(leaf) // (split if has_batch else 1)
        return total

    def useful_flops(self) -> float:
        """Returns the operations of a step's products over all chips, without recomputation."""
        # Trace without kernels, because operations inside a kernel cannot be differentiated.
        with dataclasses.replace(self.partitioner, fused_attention=False)():
            return differentiated(self.forward, self.trained, self.state, self.batch)


class Compiled(NamedTuple):
    """A training step after compilation; bytes on each device."""

    program: Program | None  # None if the step does not fit: the compiler returns no program then
    temporaries: int  # gradients, activations, work space
    code: int  # size of the program
    held: int  # size of state and batch
    padding: int  # added to state and batch by the device's memory layout
    limit: int | None = None  # memory of a device, if the compiler reported it
    short_by: int = 0  # missing memory that the compiler reported; 0 if the compiler made a program

    @property
    def size(self) -> int:
        return self.held + self.padding + self.temporaries + self.code

    def limit_on(self, target: Target) -> int:
        """Returns the bytes of memory of each device, from the compiler or the data sheet."""
        return self.limit or int(target.chip.memory)

    def lacks_on(self, target: Target) -> int:
        """Returns the missing bytes on each device; 0 if the step fits."""
        return self.short_by or max(self.size - self.limit_on(target), 0)


def make_step(planned: Planned) -> Step:
    """Makes the step that `jaxir.training.loop.Run` runs, from shapes, without any weights."""
    recipe, partitioner = planned.recipe, planned.partitioner
    objective, seed = recipe.objective, recipe.seed
    model = abstract_model(planned.config)
    if planned.config.adapters is not None:
        model = halved_outline(model)
        if (weights := getattr(recipe.model, "weights", None)) is not None:
            model = nnx.merge(*quantizing.outline(*nnx.split(model), weights)[:2])
    objective.check_model(model)
    auxiliary = nnx.eval_shape(lambda: auxiliary_of(objective, model, form=planned.form, rngs=nnx.Rngs(seed)))
    built = recipe.optimizer.build(recipe.steps)
    frozen = (*objective.frozen, *(recipe.frozen or ()))
    plan = state_lib.plan_state(model, built.transform, partitioner, auxiliary=auxiliary, frozen=frozen)
    rows = partitioner.sharding(("batch",))
    batch = {
        name: jax.ShapeDtypeStruct((recipe.batch_size, *feature.shape), feature.dtype, sharding=rows)
        for name, feature in planned.features.items()
    }
    seeded = state_lib.make_step(plan, objective, built)
    key_data = np.asarray(jax.random.key_data(jax.random.key(seed)))  # the mesh's devices may not exist here

    def step(state: state_lib.TrainState, batch: Any) -> Any:
        return seeded(state, batch, jnp.asarray(key_data))

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))

    loss_of = state_lib.make_loss(plan, objective)

    def forward(trained: Any, state: state_lib.TrainState, batch: Any) -> Any:
        return loss_of(trained, state, batch, jax.random.key(seed))

    trained = plan.trained(plan.abstract.params, plan.abstract.auxiliary)
    return Step(jitted, plan.abstract, trained, batch, forward, partitioner)


def model_step(
    config: Any,
    run: Callable[[nnx.Module, jax.Array], jax.Array],
    ids_shape: tuple[int, int],
    mesh: Partitioner,
    weights: Scheme | None = None,
) -> Step:
    """Makes a step from shapes that calls `run(model, ids)` on token ids and trains nothing.

    `weights` is how the model is quantised; None: not at all.
    """
    graph, state = nnx.split(abstract_model(config))
    if weights is not None:
        graph, state, _ = quantizing.outline(graph, state, weights)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        param_shardings(state, mesh),
    )
    rows = mesh.sharding(("batch",))
    ids = jax.ShapeDtypeStruct(ids_shape, jnp.int32, sharding=rows)

    def forward(state: nnx.State, ids: jax.Array) -> jax.Array:
        return run(nnx.merge(graph, state), ids)

    return Step(jax.jit(forward, out_shardings=rows), state, state, ids, forward, mesh)


def lower(step: Step) -> jax.stages.Lowered:
    """Returns the lowered step."""
    with step.partitioner():
        return step.function.lower(step.state, step.batch)


def check_sizes(step: Step) -> None:
    """Raises a UserError if an array is so large that the compiler would abort the process."""
    with step.partitioner():
        array = largest(step.function.trace(step.state, step.batch).jaxpr.jaxpr)
    if (size := size_of(array)) > MOST_BYTES:
        rows = jax.tree.leaves(step.batch)[0].shape[0]
        raise UserError(
            f"an array of this step has {size / 2**50:,.0f} PiB ({array.dtype} {list(array.shape)}), more"
            f" than chips hold: reduce batch_size ({rows:,}) or the lengths of texts"
        )


def compile_step(step: Step, lowered: jax.stages.Lowered | None = None) -> Compiled:
    """Compiles a step for the devices of its mesh."""
    held = bytes_of(step.state) + bytes_of(step.batch)
    lowered = lowered or lower(step)
    try:
        compiled = compile_cache.compile_step(lowered, step.partitioner)
    except jax.errors.JaxRuntimeError as error:
        return _does_not_fit(error, held)
    memory = compiled.memory_analysis()
    return Compiled(
        program=parse(compiled.as_text()),
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        held=held,
        padding=max(memory.argument_size_in_bytes - held, 0),
    )


MOST_BYTES = 2**50  # limit of one array over all chips; the compiler's own counts overflow at 2**63


class CompilerSettings(NamedTuple):
    """JAX's compiler settings that differ from the defaults."""

    given: tuple[str, ...] = ()  # the settings, such as "JAX_OPTIMIZATION_LEVEL=O1"
    quick: bool = False  # whether one of the settings reduces optimisation


def compiler_settings() -> CompilerSettings:
    """Returns the settings of this process, from the environment or `jax.config`."""
    usual = {
        "jax_exec_time_optimization_effort": 0.0,
        "jax_memory_fitting_effort": 0.0,
        "jax_optimization_level": "UNKNOWN",
        "jax_memory_fitting_level": "O2",
    }
    found = {name: getattr(jax.config, name) for name in usual}
    given = {name: value for name, value in found.items() if value != usual[name]}
    quick = any(value < 0 if isinstance(value, float) else value in ("O0", "O1") for value in given.values())
    return CompilerSettings(tuple(f"{name.upper()}={value}" for name, value in given.items()), quick)


def bytes_of(tree: Any) -> int:
    """Returns the bytes that each device holds of a tree of sharded shapes."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _does_not_fit(error: Exception, held: int) -> Compiled:
    """Reads the required and the available memory from the compiler's error, in one of two forms:

    "Used 20.3G of 15.75G hbm", or "required for HLO temporaries (240.00G) exceeds available HBM (15.75G)".
    """
    message = str(error)
    used = re.search(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm", message) or re.search(
        r"required for [^(]*\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message
    )
    if used is None:
        first = next((line for line in message.splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"the compiler refused the step: {first:.300}") from error
    wanted, limit = (_bytes(*used.groups()[i : i + 2]) for i in (0, 2))
    return Compiled(
        program=None,
        temporaries=max(wanted - held, 0),
        code=0,
        held=held,
        padding=0,
        limit=limit,
        short_by=max(wanted - limit, 1),
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit])

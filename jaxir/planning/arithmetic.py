"""Estimates a GPU step from shapes and partitioning, because no GPU compiler is available."""

from __future__ import annotations

from jaxir.core.errors import UserError
from jaxir.costs.hlo import Program, parse
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.planning.program import Step, bytes_of, lower
from jaxir.runtime.compile_cache import aside
from jaxir.storage.temporary_outputs import temporary_directory

# Only the partitioned program of XLA's CPU compiler is read, so later passes need not optimise.
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_dump_hlo_as_text": True}


def estimate(
    config: DualEncoderConfig, step: Step, activations: int, without_remat: int, *, chunks: int
) -> tuple[int, int]:
    """Estimates bytes of temporaries and of memory traffic on each device.

    During a rematerialised block's backward pass all its activations exist; two blocks' weights are
    gathered at a time. Each array is written and read once, and weights once per pass. Gradient caching
    adds a forward pass and repeats all passes for each of its `chunks`.
    """
    backbone = config.backbone
    whole, gradients = step.num_parameters, bytes_of(step.trained)
    block = max(without_remat - activations, 0) // backbone.num_layers if backbone.remat else 0
    temporaries = gradients + activations + block + gathered_weights(config, whole)
    passes = 3 + (backbone.remat is True) + (chunks > 1)
    moved = bytes_of(step.state) + gradients + chunks * (without_remat + activations)
    return temporaries, 2 * moved + chunks * passes * whole * _itemsize(config)


def gathered_weights(config: DualEncoderConfig, parameters: int) -> int:
    """Returns the bytes of the gathered weights of two blocks."""
    return 2 * parameters * _itemsize(config) // max(1, config.backbone.num_layers)


def _itemsize(config: DualEncoderConfig) -> int:
    return 2 if config.backbone.dtype == "bfloat16" else 4


def partition(step: Step) -> Program | None:
    """Returns each device's program as XLA partitions it, before backend passes; None for one device."""
    if step.partitioner.mesh.size == 1:
        return None
    with temporary_directory() as directory:
        options = {"xla_dump_to": str(directory), "xla_dump_hlo_pass_re": "spmd-partitioning"} | _OPTIONS
        lowered = lower(step)
        aside(lambda: lowered.compile(compiler_options=options))
        written = sorted(directory.glob("*.after_spmd-partitioning.*.txt"))
        if not written:
            raise UserError("XLA did not write the partitioned program; unset XLA_FLAGS and plan again")
        return parse(written[-1].read_text())

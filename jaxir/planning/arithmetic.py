"""Estimates a step for machines without a compiler here (GPUs), from shapes and partitioning."""

from __future__ import annotations

from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.costs.hlo import Program, parse
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.planning.activation_memory import Kept
from jaxir.planning.program import Step, bytes_of, lower
from jaxir.runtime.compile_cache import aside
from jaxir.storage.temporary_outputs import temporary_directory

# Only the partitioned program of XLA's CPU compiler is used, so later passes need not optimise.
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_dump_hlo_as_text": True}


class Estimate(NamedTuple):
    """Estimate of a step on each device."""

    temporaries: int  # bytes of gradients, activations, gathered weights and work space
    traffic: int  # least bytes between memory and chip


def estimate(
    config: DualEncoderConfig, step: Step, kept: Kept, kept_without_remat: Kept, *, chunks: int = 1
) -> Estimate:
    """Estimates a step's memory and its traffic.

    While a rematerialised block is differentiated, all its activations exist; the weights of two blocks
    are
    gathered at a time. Activations are written and read once, parameters and optimizer state too. Weights
    are read by the forward, the backward and, if products are recomputed, the second forward pass.
    Gradient
    caching adds a forward pass and repeats all passes for each of its `chunks`.
    """
    backbone = config.backbone
    whole = step.num_parameters
    itemsize = _itemsize(config)
    block = 0
    if backbone.remat:
        block = max(kept_without_remat.activations - kept.activations, 0) // backbone.num_layers
    temporaries = kept.gradients + kept.activations + block + gathered_weights(config, whole)
    passes = 3 + (backbone.remat is True) + (chunks > 1)
    activations = chunks * (kept_without_remat.activations + kept.activations)
    traffic = 2 * (bytes_of(step.state) + kept.gradients + activations) + chunks * passes * whole * itemsize
    return Estimate(temporaries, traffic)


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
            raise UserError("XLA did not write down the partitioned program; is XLA_FLAGS set?")
        return parse(written[-1].read_text())

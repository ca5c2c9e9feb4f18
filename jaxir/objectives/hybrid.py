"""Training of hybrid encoders (BGE-M3): three heads at once, which learn from the sum of their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jaxir.core.values import checked
from jaxir.losses.self_distillation import self_distillation
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.objective import Metrics


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class HybridContrastive(Contrastive):
    """In-batch contrastive training of a hybrid encoder (Chen et al. 2024, arXiv:2402.03216, section 3.3).

    `embed` returns `losses.HybridVectors` of all texts.

    Attributes:
      loss: `self_distillation` of `jaxir.losses` with its settings bound, or another function that takes
        `losses.HybridVectors`.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = self_distillation
    reads_with = "heads"

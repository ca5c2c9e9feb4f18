"""Training of multi-vector encoders (late interaction, ColBERT): losses of MaxSim, not of dot products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxir.core.values import checked
from jaxir.losses.distillation import kl_distillation
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.distillation import SCORES, Distillation
from jaxir.objectives.objective import Batch, Metrics, RandomKey

# MaxSim sums over a query's tokens, so scores of passages differ enough without a small temperature. PyLate
# 1.6 and sentence-transformers 6.2 have the same defaults.
_SOFTMAX = functools.partial(in_batch_softmax, temperature=1.0, bidirectional=False)
_DIVERGENCE = functools.partial(kl_distillation, temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class LateInteraction(Contrastive):
    """In-batch contrastive training of a multi-vector encoder (Khattab and Zaharia 2020, arXiv:2004.12832).

    `embed` returns `losses.TokenVectors` of all texts: [B, L, D], and [B, N, L, D] of hard negatives.

    Attributes:
      loss: `in_batch_softmax` or `samtone` of `jaxir.losses` with its settings bound, or another function
        that takes `losses.TokenVectors`; default: `in_batch_softmax` at temperature 1, queries to passages.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = _SOFTMAX
    reads_with = "token_vectors"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class LateDistillation(Distillation):
    """`Distillation` of a multi-vector encoder: MaxSim is fitted to a teacher's scores.

    Attributes:
      loss: `kl_distillation` (default, at temperature 1) or `margin_mse` of `jaxir.losses` with its settings
        bound.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = _DIVERGENCE
    reads_with = "token_vectors"

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        embeddings = LateInteraction(chunks=self.chunks).embed(model, batch, key)
        return self.loss(*embeddings, **{name: batch[name] for name in SCORES})

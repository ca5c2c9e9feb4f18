"""Distillation: trains a dual encoder on a teacher's scores of each query's passages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Numbers, TextFormat
from jaxir.core.values import checked
from jaxir.losses.distillation import margin_mse
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.objective import Batch, LossObjective, Metrics, RandomKey
from jaxir.objectives.pair_batch import pair_features

SCORES = ("passage_score", "negative_scores")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Distillation(LossObjective):
    """Fits the scores of a query's positive and hard negatives to a teacher's scores, which the data contain.

    `jaxir.mine --teacher=SPEC` writes such data. To train on labels, too, put it and `Contrastive` into a
    `WeightedSum`.

    Attributes:
      loss: a loss of `jaxir.losses.distillation` with its settings bound.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = margin_mse
    evaluated_on_pairs = False
    loss_inputs = SCORES
    reads_with = "encode_together"

    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: pairs with hard negatives, and a teacher's score of each passage.

        Raises:
          UserError: the format has no hard negatives.
        """
        if not form.num_negatives:
            raise UserError(
                "distillation compares a passage with hard negatives: set num_negatives to 1 or more"
            )
        return pair_features(form) | {
            "passage_score": Numbers("passage_score"),
            "negative_scores": Numbers("negative_scores", form.num_negatives),
        }

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        embeddings = Contrastive(chunks=self.chunks).embed(model, batch, key)
        return self.loss(*embeddings, **{name: batch[name] for name in SCORES})

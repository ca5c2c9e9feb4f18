"""Trains a sequence-to-sequence model (T5) with teacher forcing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TextFormat, Tokens
from jaxir.core.values import checked
from jaxir.losses.tokens import token_cross_entropy
from jaxir.objectives.objective import Batch, Metrics, Objective, RandomKey


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Seq2Seq(Objective):
    """Predicts each token of the target from the source and the true tokens before it.

        loss = - mean over the tokens t of all targets of log P(y_t | y_1 ... y_{t-1}, source)

    This is T5's loss (Raffel et al. 2020) without label smoothing. The end-of-sequence token is predicted,
    too.

    Attributes:
      source: the field of an example with the text that the encoder reads.
      target: the field of an example with the text that the decoder learns to generate.
    """

    source: str = "source"
    target: str = "target"
    searched_on_pairs = False
    reads_with = "predict"

    def __post_init__(self):
        if self.source == self.target:
            raise UserError(f"source and target are the same field, {self.source!r}: name two fields")

    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: source_ids [Lp] and target_ids [Lq]."""
        return {
            "source_ids": Tokens(self.source, form.passage_length, form.passage_prompt),
            "target_ids": Tokens(self.target, form.query_length, form.query_prompt),
        }

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        targets = batch["target_ids"]
        hidden = model.predict(batch["source_ids"], targets, key=key)
        return token_cross_entropy(hidden, model.output_table, targets, targets > 0)

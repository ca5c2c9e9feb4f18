"""Trains a reader, which generates answers from passages: Fusion-in-Decoder (Izacard & Grave 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from jaxir.core.features import Features, TextFormat, Tokens
from jaxir.core.values import Count, checked
from jaxir.losses.tokens import over_tokens, token_losses
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.objective import Batch, Metrics, Objective, RandomKey


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class FusionInDecoder(Objective):
    """Predicts each token of an answer from the true tokens before it and all passages of the question.

        loss = - mean over the tokens t of all answers of log P(y_t | y_1 ... y_{t-1}, H)
        H    = [encoder(question, passage 1); ...; encoder(question, passage P)]

    Passages are encoded separately, so the encoder's cost grows with P and not with its square. The decoder
    attends to all tokens of H at once, except padding and missing passages.

    Attributes:
      passages: P, the maximum number of passages read per question.
      chunks: the number of parts for gradient caching, see `Contrastive`; here a part is a set of questions.
    """

    passages: Count = 100
    chunks: Count | Literal["auto"] = 1
    searched_on_pairs = False
    reads_with = "predict"

    def features(self, form: TextFormat) -> Features:
        """Returns the features source_ids [P, Lp] (question and passages), target_ids [Lq] (the answer)."""
        return {
            "source_ids": Tokens("passages", form.passage_length, form.passage_prompt, count=self.passages),
            "target_ids": Tokens("answer", form.query_length, form.query_prompt),
        }

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        def read(part: Batch, key: RandomKey) -> tuple[jax.Array, jax.Array]:
            hidden = model.predict(part["source_ids"], part["target_ids"], key=key)
            return token_losses(hidden, model.output_table, part["target_ids"])

        ids = {name: batch[name] for name in ("source_ids", "target_ids")}
        losses, hits = embed_in_chunks(read, ids, key, chunks=self.chunks)
        return over_tokens(losses, hits, ids["target_ids"] > 0)

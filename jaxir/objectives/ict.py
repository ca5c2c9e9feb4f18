"""The inverse cloze task: find the passage from which a sentence was removed (Lee et al. 2019)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxir.core.features import Features, Key, TextFormat, Tokens
from jaxir.core.values import Share, checked
from jaxir.models import layers
from jaxir.objectives.contrastive import Contrastive, Embeddings
from jaxir.objectives.objective import Batch, RandomKey


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ICT(Contrastive):
    """The inverse cloze task (Lee et al. 2019, arXiv:1906.00300, section 4; Chang et al. 2020).

    A random sentence q of a passage, which changes each epoch, is the query. The passage without q is its
    positive b, and the other passages of the batch are negatives. Some passages keep the sentence, so that
    the model also learns to match words:

        P(b | q) = exp s(q, b) / sum over the passages b' of the batch of exp s(q, b')

    Any other contrastive loss can be set. In evaluation (no key) no passage keeps its sentence.

    Attributes:
      keep: the share of passages that keep their sentence.
    """

    keep: Share = 0.1
    evaluated_on_pairs = False

    def features(self, form: TextFormat) -> Features:
        """Returns the features sentence_ids [1, Lq], context_ids [1, Lp], whole_ids [Lp], passage_key [2]."""
        whole = Tokens("passage", form.passage_length, form.passage_prompt)
        return {
            "sentence_ids": Tokens("sentences", form.query_length, form.query_prompt, count=1),
            "context_ids": dataclasses.replace(whole, field="contexts", count=1),
            "whole_ids": whole,
            "passage_key": Key("passage"),
        }

    def embed(self, model: Any, batch: Batch, key: RandomKey = None) -> Embeddings:
        """Like `Contrastive.embed`, for sentences as queries and passages mostly without their sentence."""
        choosing, encoding = layers.split_key(key, 2)
        contexts = batch["context_ids"][:, 0]
        if choosing is not None:
            whole = jax.random.bernoulli(choosing, float(self.keep), (len(contexts), 1))
            contexts = jnp.where(whole, batch["whole_ids"], contexts)
        pairs = {"query_ids": batch["sentence_ids"][:, 0], "passage_ids": contexts}
        return super().embed(model, pairs, encoding)

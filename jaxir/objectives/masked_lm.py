"""Masked language modelling: what keeps an encoder's words apart while another objective trains it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxir.features import Features, TextFormat, Tokens
from jaxir.losses.tokens import token_cross_entropy
from jaxir.models import layers
from jaxir.models.masked_lm import MaskedLMHead
from jaxir.objectives.lent import head_for
from jaxir.objectives.masking import choose_tokens, mask_as_bert
from jaxir.objectives.objective import Batch, Metrics, Objective
from jaxir.simple_types import Rate, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MaskedLM(Objective):
    """BERT's masked language model (Devlin et al. 2019), of the passage tower; SimCSE's auxiliary task.

        loss = - mean over masked places m of log P(token m | the text with its places masked)

    Its head is one layer under the encoder's token vectors, and a bias. Without a key, in evaluation, the
    same share is masked, always in the same places.

    Attributes:
      masking: share of the tokens that are predicted: of these 80 % are masked, 10 % become another token.
      head: `PretrainedMaskedLM(...)` of jaxir.interop.build, whose head it begins with; None: at random.
    """

    masking: Rate = 0.15
    head: Any = None
    evaluated_on_pairs = False

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: text_ids [L]."""
        return {"text_ids": Tokens("text", form.passage_length, form.passage_prompt)}

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> _Head:
        """Returns the head and the mask token.

        Raises:
          UserError: the tokenizer has no mask token, or the head to begin with is of another vocabulary or
            width.
        """
        return _Head(head_for(model, self.head, form=form, rngs=rngs), form.need_mask())

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: _Head,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss of the batch and its metrics, float32 []."""
        ids = batch["text_ids"]
        choosing, replacing, encoding = layers.split_key(key, 3)
        fixed = jax.random.key(0)
        chosen = choose_tokens(ids, fixed if choosing is None else choosing, share=self.masking)
        masked = mask_as_bert(
            ids,
            chosen,
            fixed if replacing is None else replacing,
            mask_id=auxiliary.mask_id,
            vocab_size=model.config.backbone.vocab_size,
        )
        encoder = model.encoder_of("passage")
        table = encoder.token_table
        hidden = auxiliary.head(encoder(masked, key=encoding))
        loss, metrics = token_cross_entropy(
            hidden,
            layers.weight(table.embedding, hidden.dtype),
            ids,
            chosen,
            bias=layers.weight(auxiliary.head.bias),
        )
        return loss, metrics


class _Head(nnx.Module):
    def __init__(self, head: MaskedLMHead, mask_id: int):
        self.head, self.mask_id = head, mask_id

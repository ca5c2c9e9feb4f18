"""Masked language modelling: what keeps an encoder's words apart while another objective trains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.features import TextFormat
from jaxir.core.values import Portion, checked
from jaxir.losses.tokens import over_tokens, token_losses
from jaxir.models import layers
from jaxir.models.backbones import Encoder
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masking import choose_tokens, mask_as_bert, most_chosen, places_of
from jaxir.objectives.objective import Batch, Metrics, TextObjective
from jaxir.objectives.pretrained_heads import MaskedLMSource, head_for


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MaskedLM(TextObjective):
    """BERT's masked language model (Devlin et al. 2019), of the passage tower; SimCSE's auxiliary task.

        loss = - mean over masked places m of log P(token m | the text with its places masked)

    Its head is one layer under the encoder's token vectors, and a bias. Without a key, in evaluation, the
    same share is masked, always in the same places.

    Attributes:
      masking: share of the tokens that are predicted: of these 80 % are masked, 10 % become another token.
      head: `PretrainedMaskedLM(...)` of jaxir.interop.build, whose head it begins with; None: at random.
    """

    masking: Portion = 0.15
    head: MaskedLMSource | None = None
    reads_with = "encoder_of"

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> MaskedWords:
        """Returns the head and the mask token.

        Raises:
          UserError: the tokenizer has no mask token, or the head to begin with is of another vocabulary or
            width.
        """
        return MaskedWords(model, self.head, form=form, rngs=rngs)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: MaskedWords,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        ids = batch["text_ids"]
        *masking, encoding = layers.split_key(key, 3)
        masked, chosen = auxiliary.mask(ids, masking, share=self.masking)
        encoder = model.encoder_of("passage")

        def read(part: Batch, key: jax.Array | None) -> tuple[jax.Array, ...]:
            hidden = encoder(part["masked"], key=key)
            return auxiliary.losses(encoder, hidden, part["ids"], part["chosen"], share=self.masking)

        parts = {"ids": ids, "masked": masked, "chosen": chosen}
        return over_tokens(*embed_in_chunks(read, parts, encoding, chunks=self.chunks))


class MaskedWords(nnx.Module):
    """What objectives have that mask texts and predict what stood there: a head and the mask token.

    Args:
      model: the dual encoder.
      source: whose head it begins with; None: at random.
      form: of its texts.
      rngs: of the head's parameters.

    Raises:
      UserError: the tokenizer has no mask token, or the head is of another vocabulary or width.
    """

    def __init__(self, model: Any, source: MaskedLMSource | None, *, form: TextFormat, rngs: nnx.Rngs):
        self.head, self.mask_id = head_for(model, source, form=form, rngs=rngs), form.need_mask()

    def mask(
        self, ids: jax.Array, keys: Sequence[jax.Array | None], *, share: float, fixed: int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Masks texts [B, L] as BERT does.

        Args:
          ids: [B, L]; 0 is padding.
          keys: of which tokens and of what stands there; None for always the same.
          share: of the tokens that are predicted.
          fixed: which one is always the same.

        Returns:
          The masked texts, and where their tokens are to be predicted, both [B, L].
        """
        # In evaluation they are two as well, or what replaces a token would follow from its being chosen.
        always = jax.random.key(fixed)
        choosing, replacing = keys if keys[0] is not None else (always, jax.random.fold_in(always, 1))
        chosen = choose_tokens(ids, choosing, share=share)
        vocab_size = len(self.head.bias[...])
        return mask_as_bert(ids, chosen, replacing, mask_id=self.mask_id, vocab_size=vocab_size), chosen

    def losses(
        self, encoder: Encoder, hidden: jax.Array, ids: jax.Array, chosen: jax.Array, *, share: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what `losses.tokens.over_tokens` takes the mean of, over the chosen places.

        Logits are made of these places alone, which are few: of as many of each text as `mask` may choose.

        Args:
          encoder: whose token vectors are those of the logits.
          hidden: [B, L, E], what it made of the masked texts.
          ids: [B, L], the texts.
          chosen: [B, L].
          share: what `mask` was given.

        Returns:
          -log P(token) at P places of each text, whether it is the most likely one, and whether the place was
          chosen: [B, P], float32 and bool.
        """
        places = places_of(chosen, most_chosen(ids.shape[1], share))
        hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
        targets, kept = (jnp.take_along_axis(x, places, axis=1) for x in (ids, chosen))
        x, bias = self.head(hidden), layers.weight(self.head.bias)
        table = layers.weight(encoder.token_table.embedding, x.dtype)
        return *token_losses(x, table, targets, bias=bias), kept

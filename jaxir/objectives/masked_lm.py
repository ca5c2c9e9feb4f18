"""Masked language modelling, alone or inside another objective."""

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
from jaxir.objectives.objective import Batch, Metrics, RandomKey, TextObjective
from jaxir.objectives.pretrained_heads import MaskedLMSource, head_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedTextObjective(TextObjective):
    """The base of objectives with BERT's masked language model of the passage tower.

    Attributes:
      masking: share of the tokens that the masked language model predicts: 80 % of these are masked, 10 %
        become another token.
      head: `PretrainedMaskedLM(...)` of jaxir.interop.build, from whose head the masked language model
        starts; None: random.
    """

    masking: Portion = 0.15
    head: MaskedLMSource | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MaskedLM(MaskedTextObjective):
    """BERT's masked language model (Devlin et al. 2019) of the passage tower; SimCSE's auxiliary task.

        loss = - mean over masked places m of log P(token m | the text with its places masked)

    The head is one layer, the encoder's token vectors and a bias. In evaluation (no key) the same share is
    masked, always in the same places.
    """

    reads_with = "encoder_of"

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> MaskedLMModule:
        return MaskedLMModule(model, self.head, form=form, rngs=rngs)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: MaskedLMModule, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        ids = batch["text_ids"]
        *masking, encoding = layers.split_key(key, 3)
        masked, chosen = auxiliary.mask(ids, masking, share=self.masking)
        encoder = model.encoder_of("passage")

        def read(part: Batch, key: RandomKey) -> tuple[jax.Array, ...]:
            hidden = encoder(part["masked"], key=key)
            return auxiliary.losses(encoder, hidden, part["ids"], part["chosen"], share=self.masking)

        parts = {"ids": ids, "masked": masked, "chosen": chosen}
        return over_tokens(*embed_in_chunks(read, parts, encoding, chunks=self.chunks))


class MaskedLMModule(nnx.Module):
    """A masked language model's head, which starts from `source` or is random, and the mask token."""

    def __init__(self, model: Any, source: MaskedLMSource | None, *, form: TextFormat, rngs: nnx.Rngs):
        self.head, self.mask_id = head_for(model, source, form=form, rngs=rngs), form.need_mask()

    def mask(
        self, ids: jax.Array, keys: Sequence[RandomKey], *, share: float, fixed: int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Masks `share` of the tokens of texts [B, L] as BERT does.

        `keys` are for the choice of tokens and for their replacements. If they are None, the masking is
        constant; `fixed` is its number.

        Returns:
          The masked texts, and which of their tokens are to be predicted, both [B, L].
        """
        # Two keys in evaluation too; with one, a token's replacement would depend on its having been chosen.
        always = jax.random.key(fixed)
        choosing, replacing = keys if keys[0] is not None else (always, jax.random.fold_in(always, 1))
        chosen = choose_tokens(ids, choosing, share=share)
        vocab_size = len(self.head.bias[...])
        return mask_as_bert(ids, chosen, replacing, mask_id=self.mask_id, vocab_size=vocab_size), chosen

    def losses(
        self, encoder: Encoder, hidden: jax.Array, ids: jax.Array, chosen: jax.Array, *, share: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the arguments of `losses.tokens.over_tokens` for the chosen places.

        Logits are computed at P places of each text, the most that `mask` may choose with this `share`.

        Args:
          encoder: whose token vectors give the logits.
          hidden: [B, L, E], the encoder's output for the masked texts.
          ids: [B, L], the original texts.
          chosen: [B, L], from `mask`.
          share: as given to `mask`.
        """
        places = places_of(chosen, most_chosen(ids.shape[1], share))
        hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
        targets, kept = (jnp.take_along_axis(x, places, axis=1) for x in (ids, chosen))
        x, bias = self.head(hidden), layers.weight(self.head.bias)
        table = layers.weight(encoder.token_table.embedding, x.dtype)
        return *token_losses(x, table, targets, bias=bias), kept

"""Masked language modelling, as an objective of its own or as a part of another objective."""

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
    """The base of objectives that train the passage tower as BERT's masked language model, too.

    Attributes:
      masking: the share of tokens that are predicted: 80 % of these are masked, 10 % become a random token,
        and 10 % stay.
      head: `PretrainedMaskedLM(...)` of jaxir.interop.build, whose output head initialises the head of this
        objective; None: random.
    """

    masking: Portion = 0.15
    head: MaskedLMSource | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MaskedLM(MaskedTextObjective):
    """BERT's masked language model (Devlin et al. 2019) of the passage tower; SimCSE's auxiliary task.

        loss = - mean over masked positions m of log P(token m | the masked text)

    The output head is one layer, followed by the encoder's token embeddings and a bias. In evaluation (no
    key) the same share is masked, always at the same positions.
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
    """A masked language model's output head, initialised from `source` or at random, and the mask token."""

    def __init__(self, model: Any, source: MaskedLMSource | None, *, form: TextFormat, rngs: nnx.Rngs):
        self.head, self.mask_id = head_for(model, source, form=form, rngs=rngs), form.need_mask()

    def mask(
        self, ids: jax.Array, keys: Sequence[RandomKey], *, share: float, fixed: int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Masks `share` of the tokens of texts [B, L] as in BERT.

        `keys` are two random keys: for the choice of tokens and for their replacements. If they are None, the
        masking is always the same for a seed of `fixed`.

        Returns:
          The masked texts, and which of their tokens are to be predicted, both [B, L].
        """
        # Evaluation needs two keys, too: with one, the choice of a token and its replacement would correlate.
        always = jax.random.key(fixed)
        choosing, replacing = keys if keys[0] is not None else (always, jax.random.fold_in(always, 1))
        chosen = choose_tokens(ids, choosing, share=share)
        vocab_size = len(self.head.bias[...])
        return mask_as_bert(ids, chosen, replacing, mask_id=self.mask_id, vocab_size=vocab_size), chosen

    def losses(
        self, encoder: Encoder, hidden: jax.Array, ids: jax.Array, chosen: jax.Array, *, share: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the arguments of `losses.tokens.over_tokens` for the chosen tokens, each [B, P].

        Logits are computed only at P positions of each text, the maximum number that `mask` chooses.

        Args:
          encoder: the encoder whose token embeddings are the output layer's weights.
          hidden: [B, L, E], the encoder's output for the masked texts.
          ids: [B, L], the original texts.
          chosen: [B, L], the tokens to predict, as returned by `mask`.
          share: the share of tokens that was given to `mask`.
        """
        places = places_of(chosen, most_chosen(ids.shape[1], share))
        hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
        targets, kept = (jnp.take_along_axis(x, places, axis=1) for x in (ids, chosen))
        x, bias = self.head(hidden), layers.weight(self.head.bias)
        table = encoder.token_table.whole(x.dtype)
        return *token_losses(x, table, targets, bias=bias), kept

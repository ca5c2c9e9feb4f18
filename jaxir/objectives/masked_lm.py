"""Masked language modelling: what keeps an encoder's words apart while another objective trains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.features import Features, TextFormat, Tokens
from jaxir.losses.tokens import token_cross_entropy
from jaxir.models import layers
from jaxir.models.backbones import Encoder
from jaxir.objectives.masking import choose_tokens, mask_as_bert
from jaxir.objectives.objective import Batch, Metrics, Objective
from jaxir.simple_types import Rate, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MaskedLM(Objective):
    """BERT's masked language model (Devlin et al. 2019), of the passage tower; SimCSE's auxiliary task.

        loss = - mean over masked places m of log P(token m | the text with its places masked)

    Its head, one layer under the encoder's token vectors and a bias, begins at random: folders of sentence
    encoders have none. Without a key, in evaluation, the same share is masked, always in the same places.

    Attributes:
      masking: share of the tokens that are predicted: of these 80 % are masked, 10 % become another token.
    """

    masking: Rate = 0.15
    evaluated_on_pairs = False

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: text_ids [L]."""
        return {"text_ids": Tokens("text", form.passage_length, form.passage_prompt)}

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> MaskedLMHead:
        """Returns the head.

        Raises:
          UserError: the tokenizer has no mask token.
        """
        return head_for(model, form, rngs=rngs)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: MaskedLMHead,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss of the batch and its metrics, float32 []."""
        ids = batch["text_ids"]
        *masking, encoding = layers.split_key(key, 3)
        masked, chosen = auxiliary.mask(ids, masking, share=self.masking)
        encoder = model.encoder_of("passage")
        hidden = encoder(masked, key=encoding)
        return auxiliary.loss(encoder, hidden, ids, chosen)


def head_for(model: Any, form: TextFormat, *, rngs: nnx.Rngs) -> MaskedLMHead:
    """Makes the head for a dual encoder.

    Raises:
      UserError: the tokenizer has no mask token.
    """
    backbone = model.config.backbone
    sizes = (backbone.embed_dim, backbone.vocab_size, form.need_mask())
    return MaskedLMHead(*sizes, dtype=backbone.dtype, rngs=rngs)


class MaskedLMHead(nnx.Module):
    """A dense layer, GELU and a norm; logits are its products with the token vectors, and a bias.

    Attributes:
      mask_id: the mask token.
      bias: [V].
    """

    def __init__(self, embed_dim: int, vocab_size: int, mask_id: int, *, dtype: str, rngs: nnx.Rngs):
        self.mask_id = mask_id
        self.dense = layers.Linear(
            embed_dim,
            embed_dim,
            axes=("embed", None),
            use_bias=True,
            dtype=dtype,
            init=layers.normal(0.02),
            rngs=rngs,
        )
        self.norm = layers.LayerNorm(embed_dim, epsilon=1e-12, dtype=dtype)
        self.bias = layers.param(jnp.zeros((vocab_size,), jnp.float32), "vocab")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what [B, L, E] are multiplied with the token vectors as: [B, L, E]."""
        return self.norm(jax.nn.gelu(self.dense(x), approximate=False))

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
        choosing, replacing = (jax.random.key(fixed) if key is None else key for key in keys)
        chosen = choose_tokens(ids, choosing, share=share)
        vocab_size = len(self.bias[...])
        return mask_as_bert(ids, chosen, replacing, mask_id=self.mask_id, vocab_size=vocab_size), chosen

    def loss(
        self, encoder: Encoder, hidden: jax.Array, ids: jax.Array, chosen: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Returns the mean of -log P(token) over the chosen places, and `token_accuracy`; float32 [].

        Args:
          encoder: whose token vectors are those of the logits.
          hidden: [B, L, E], what it made of the masked texts.
          ids: [B, L], the texts.
          chosen: [B, L].
        """
        x, bias = self(hidden), layers.weight(self.bias)
        return token_cross_entropy(
            x, layers.weight(encoder.token_table.embedding, x.dtype), ids, chosen, bias=bias
        )

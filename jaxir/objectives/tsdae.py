"""TSDAE: a text is written again from the vector of what was left of it (Wang et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from beartype import beartype
from flax import nnx
from jaxtyping import Array, Int32, Key, jaxtyped

from jaxir.features import Features, TextFormat, Tokens
from jaxir.losses.tokens import token_cross_entropy
from jaxir.models import layers
from jaxir.models.decoder import DecoderConfig, VectorDecoder
from jaxir.objectives.objective import Batch, Metrics, Objective
from jaxir.simple_types import Count, Rate, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TSDAE(Objective):
    """A denoising autoencoder of texts (arXiv:2104.06979, section 3).

    Of each text tokens are deleted; the passage tower makes a vector of the rest; a decoder that sees this
    vector alone, and the tokens before each, predicts the text. Its token vectors, in and out, are the
    encoder's. In the paper encoder and decoder share all weights, here no others than these.

    Attributes:
      deletion: share of the tokens that are deleted, each by itself; one stays in any case.
      decoder_layers: blocks of the decoder.
      decoder_head_dim: dimensions of a head of its attention.
      decoder_dropout: its dropout.
    """

    deletion: Rate = 0.6
    decoder_layers: Count = 2
    decoder_head_dim: Count = 32
    decoder_dropout: Rate = 0.1
    evaluated_on_pairs = False

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: text_ids [L]."""
        return {"text_ids": Tokens("text", form.passage_length, form.passage_prompt)}

    def auxiliary(self, model: Any, *, rngs: nnx.Rngs) -> VectorDecoder:
        """Returns the decoder."""
        backbone = model.config.backbone
        config = DecoderConfig(
            embed_dim=backbone.embed_dim,
            vector_dim=model.config.dimension,
            num_layers=self.decoder_layers,
            head_dim=self.decoder_head_dim,
            mlp_dim=4 * backbone.embed_dim,
            dropout_rate=self.decoder_dropout,
            dtype=backbone.dtype,
        )
        return VectorDecoder(config, rngs=rngs)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: VectorDecoder,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss of the batch and its metrics, float32 []. Without a key nothing is deleted."""
        ids = batch["text_ids"]
        deleting, encoding, decoding = layers.split_key(key, 3)
        left = ids if deleting is None else delete_tokens(ids, deleting, share=self.deletion)
        vector = model.encode(left, tower="passage", key=encoding)
        table = model.encoder_of("passage").token_table
        read, targets = ids[:, :-1], ids[:, 1:]
        hidden = auxiliary(table(read), read != 0, vector, key=decoding)
        loss, metrics = token_cross_entropy(
            hidden, layers.weight(table.embedding, hidden.dtype), targets, targets != 0
        )
        return loss, metrics | {"tokens_left": (left != 0).sum(1, dtype=jnp.float32).mean()}


@jaxtyped(typechecker=beartype)
def delete_tokens(ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float) -> Int32[Array, "B L"]:
    """Deletes tokens, each with probability `share`, and closes the gaps.

    The first token and the last one, which are special, stay, and at least one other.

    Args:
      ids: [B, L]; 0 is padding, on the right.
      key: of the choice.
      share: of the tokens that are deleted.
    """
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    last = (ids != 0).sum(1, dtype=jnp.int32)[:, None] - 1
    inside = (places > 0) & (places < last)
    draws = jnp.where(inside, jax.random.uniform(key, ids.shape), -1.0)
    kept = (ids != 0) & (~inside | (draws >= share) | (draws == draws.max(1, keepdims=True)))
    # What stays comes first, in its order.
    order = jnp.argsort(jnp.where(kept, places, places + ids.shape[1]), axis=1)
    return jnp.take_along_axis(jnp.where(kept, ids, 0), order, axis=1)

"""Decoders that attend to the vector of a text; autoencoders train them together with an encoder.

Attention to a single vector always returns its value, whatever the query. Queries and keys would have no
gradient, so queries and keys are left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, Layers, Rate, Size, checked
from jaxir.models import activations, layers, stacks
from jaxir.models.attention import Attention, rope_frequencies
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.runtime.partitioning import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DecoderConfig:
    """The shape of a decoder.

    Attributes:
      embed_dim: E, the width of the token vectors.
      vector_dim: D, the length of the vector; None: the decoder sees no vector.
      num_layers: number of blocks.
      head_dim: dimensions of a head; even, and a divisor of E.
      mlp_dim: units of the feed-forward layer.
      causal: whether a position sees no later positions.
      span: number of tokens that a position attends to, including its own; None: all.
      dropout_rate: dropout of each sublayer's output.
      dtype: the type of matrix products and activations; parameters are float32.
    """

    embed_dim: Size
    vector_dim: Size | None
    num_layers: Layers = 2
    head_dim: Size = 64
    mlp_dim: Size
    causal: bool = True
    span: Count | None = None
    dropout_rate: Rate = 0.1
    dtype: str = "float32"

    def __post_init__(self):
        if self.embed_dim % self.head_dim or self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even and divide embed_dim {self.embed_dim}")


class VectorDecoder(nnx.Module):
    """Blocks of self-attention, attention to one vector, and a feed-forward layer; pre-norm, with RoPE.

    Weights start from N(0, 0.02^2).
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.layers = stacks.make_stack(
            lambda rngs: _Block(config, rngs=rngs), config.num_layers, scan=False, rngs=rngs
        )
        self.norm = _norm(config)

    @checked_shapes
    def __call__(
        self,
        x: Float[Array, "B T E"],
        mask: Bool[Array, "B T"],
        vector: Float[Array, "B D"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T E"]:
        """Decodes token vectors x, which attend to the text's `vector`; padding is on the right."""
        keys = layers.split_key(key, self.config.num_layers)
        for block, block_key in zip(self.layers, keys, strict=True):
            x = block(x, mask, vector, key=block_key)
        return self.norm(x)


class _Block(nnx.Module):
    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        def dense(inputs: int, outputs: int, *axes: str) -> layers.Linear:
            return layers.Linear(inputs, outputs, axes=axes, dtype=config.dtype, rngs=rngs)

        self.config = config
        self.attention = Attention(
            config.embed_dim,
            num_heads=config.embed_dim // config.head_dim,
            head_dim=config.head_dim,
            stddevs=(0.02,) * 4,
            dtype=config.dtype,
            rngs=rngs,
        )
        seen = config.vector_dim
        self.value = None if seen is None else dense(seen, config.embed_dim, "embed", "joined_kv")
        self.out = None if seen is None else dense(config.embed_dim, config.embed_dim, "joined_kv", "embed")
        self.wi = dense(config.embed_dim, config.mlp_dim, "embed", "mlp")
        self.wo = dense(config.mlp_dim, config.embed_dim, "mlp", "embed")
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)

    def __call__(
        self, x: jax.Array, mask: jax.Array, vector: jax.Array, *, key: jax.Array | None
    ) -> jax.Array:
        config, keys = self.config, layers.split_key(key, 3)

        def added(x: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
            return layers.constrain_activation(x + layers.dropout(y, config.dropout_rate, key))

        seen = {"causal": config.causal, "frequencies": jnp.asarray(rope_frequencies(config.head_dim, 1e4))}
        seen |= {"window": None if config.span is None else config.span - 1}
        x = added(x, self.attention(self.attention_norm(x), mask, **seen, key=None), keys[0])
        if self.out is not None:
            x = added(x, self.out(self.value(vector))[:, None], keys[1])
        hidden = activations.gelu_tanh(self.wi(self.mlp_norm(x)))
        return added(x, self.wo(constrain(hidden, ("batch", "length", "mlp"))), keys[2])


def decoder_for(
    model: DualEncoderConfig, *, attends: bool = True, rngs: nnx.Rngs, **shape: Any
) -> VectorDecoder:
    """Makes a decoder over a model's token vectors; `shape` holds further fields of `DecoderConfig`."""
    width = model.backbone.embed_dim
    try:
        config = DecoderConfig(
            embed_dim=width,
            vector_dim=model.dimension if attends else None,
            mlp_dim=4 * width,
            dtype=model.backbone.dtype,
            **shape,
        )
    except ValueError as error:
        raise UserError(f"the objective's decoder: {error}") from error
    return VectorDecoder(config, rngs=rngs)


class WordDecoder(nnx.Module):
    """Maps a text's vector to a logit for each word of the vocabulary: dense layer, GELU, norm, dense layer.

    Weights start from N(0, 0.02^2).
    """

    def __init__(self, vector_dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        how = {"dtype": "float32", "rngs": rngs}
        self.dense = layers.Linear(vector_dim, vector_dim, axes=("embed", None), **how)
        self.norm = layers.LayerNorm(vector_dim, epsilon=1e-12, dtype="float32")
        self.out = layers.Linear(vector_dim, vocab_size, axes=("embed", "vocab"), **how)

    @checked_shapes
    def __call__(self, vector: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns logits [B, V] in float32 of vectors [B, D]."""
        hidden = self.norm(activations.gelu(self.dense(vector))[:, None])[:, 0]
        return constrain(self.out(hidden), ("batch", "vocab"))


def _norm(config: DecoderConfig) -> layers.LayerNorm:
    return layers.LayerNorm(config.embed_dim, epsilon=1e-6, dtype=config.dtype)

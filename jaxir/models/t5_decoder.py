"""The decoder of T5, versions 1.0 and 1.1 (Raffel et al. 2020).

Blocks of causal self-attention, attention to the encoder's output, and a feed-forward layer, as in `t5`. All
blocks share a table of relative position biases for keys before the query; attention to the encoder has no
bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.models import layers, stacks
from jaxir.models.attention import Cache
from jaxir.models.codec import Changed, Weights
from jaxir.models.t5 import T5Config, attention_of, bias_of, dropout, mlp_of, norm_of

_ATTENTIONS = {"attention": "layer.0.SelfAttention", "cross_attention": "layer.1.EncDecAttention"}
_WEIGHTS = {
    "decoder.relative_bias": Changed(
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias", np.transpose, np.transpose
    ),
    "decoder.layers.*.attention_norm": "decoder.block.*.layer.0.layer_norm",
    "decoder.layers.*.cross_attention_norm": "decoder.block.*.layer.1.layer_norm",
    "decoder.layers.*.mlp_norm": "decoder.block.*.layer.2.layer_norm",
    "decoder.layers.*.mlp.wi_1": "decoder.block.*.layer.2.DenseReluDense.wi_1",
    "decoder.layers.*.mlp.wo": "decoder.block.*.layer.2.DenseReluDense.wo",
    "decoder.norm": "decoder.final_layer_norm",
} | {
    f"decoder.layers.*.{ours}.{part}": f"decoder.block.*.{theirs}.{part[0]}"
    for ours, theirs in _ATTENTIONS.items()
    for part in ("query", "key", "value", "out")
}


def weights_of(config: T5Config) -> Weights:
    """Returns the table of a decoder's weights in a Hugging Face T5."""
    wi = "wi_0" if config.gated else "wi"
    return _WEIGHTS | {"decoder.layers.*.mlp.wi_0": f"decoder.block.*.layer.2.DenseReluDense.{wi}"}


class Memory(NamedTuple):
    """Keys and values of the encoder's output, for each block of the decoder, and the mask [B, S]."""

    caches: tuple[Cache, ...]
    mask: jax.Array


class T5Decoder(nnx.Module):
    """A T5 decoder over token vectors; it has the encoder's configuration."""

    def __init__(self, config: T5Config, *, num_layers: int, rngs: nnx.Rngs):
        self.config = config
        self.relative_bias = bias_of(config, bidirectional=False, rngs=rngs)
        self.layers = stacks.make_stack(
            lambda rngs: _Block(config, rngs=rngs), num_layers, scan=config.scan_layers, rngs=rngs
        )
        self.norm = norm_of(config)

    def __call__(
        self, x: jax.Array, memory: jax.Array, memory_mask: jax.Array, *, key: jax.Array | None = None
    ) -> jax.Array:
        """Decodes all positions of x [B, T, E]; `memory` [B, S, E] is the encoder's output."""
        rate = self.config.dropout_rate
        first, inside, last = layers.split_key(key, 3)
        x = layers.constrain_activation(dropout(x, rate, first))
        args = (jnp.ones(x.shape[:2], bool), self.relative_bias(x.shape[1]), memory, memory_mask)
        (x,) = stacks.run_stack(self.layers, [x], [args], remat=self.config.remat, keys=[inside])
        return layers.constrain_activation(dropout(self.norm(x), rate, last))

    def remember(self, memory: jax.Array, memory_mask: jax.Array) -> Memory:
        """Computes keys and values of the encoder's output [B, S, E] for decoding; the mask is [B, S]."""
        blocks = stacks.unstacked(self.layers)
        return Memory(tuple(block.cross_attention.remember(memory) for block in blocks), memory_mask)

    def empty_caches(self, rows: int, length: int) -> tuple[Cache, ...]:
        """Returns the caches, one for each block, of `rows` outputs of at most `length` positions."""
        return tuple(block.attention.empty_cache(rows, length) for block in stacks.unstacked(self.layers))

    def extend(
        self, x: jax.Array, caches: Sequence[Cache], memory: Memory
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Decodes the next T positions of N outputs; see `Attention.extend`.

        x is [N, T, E] token vectors without padding, and `memory` is the memory of B texts; output n belongs
        to text n // (N / B). Returns [N, T, E], and the caches with these positions.
        """
        length, filled = caches[0].key.shape[1], caches[0].filled
        bias = self.relative_bias.between(filled + jnp.arange(x.shape[1]), jnp.arange(length))
        after = []
        for block, cache, seen in zip(stacks.unstacked(self.layers), caches, memory.caches, strict=True):
            x, cache = block.extend(x, bias, cache, seen, memory.mask)
            after.append(cache)
        return self.norm(x), tuple(after)


class _Block(nnx.Module):
    """Self-attention, cross-attention and a feed-forward layer, each pre-norm with a residual connection."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm, self.cross_attention_norm, self.mlp_norm = (norm_of(config) for _ in range(3))
        self.attention, self.cross_attention = (
            attention_of(config, rngs=rngs),
            attention_of(config, rngs=rngs),
        )
        self.mlp = mlp_of(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array,
        bias: jax.Array,
        memory: jax.Array,
        memory_mask: jax.Array,
        *,
        key: jax.Array | None,
    ) -> jax.Array:
        keys = layers.split_key(key, 6)

        def added(x: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
            return layers.constrain_activation(x + dropout(y, self.config.dropout_rate, key))

        y = self.attention(self.attention_norm(x), mask, bias=bias, causal=True, key=keys[0])
        x = added(x, y, keys[1])
        x = added(
            x,
            self.cross_attention(self.cross_attention_norm(x), memory_mask, memory=memory, key=keys[2]),
            keys[3],
        )
        return added(x, self.mlp(self.mlp_norm(x), key=keys[4]), keys[5])

    def extend(
        self, x: jax.Array, bias: jax.Array, cache: Cache, memory: Cache, memory_mask: jax.Array
    ) -> tuple[jax.Array, Cache]:
        y, cache = self.attention.extend(self.attention_norm(x), cache, bias=bias)
        x = layers.constrain_activation(x + y)
        # Treat the outputs of one text as further queries to its memory, so that memory need not be repeated.
        queries = self.cross_attention_norm(x).reshape(len(memory_mask), -1, x.shape[2])
        y = self.cross_attention.recall(queries, memory, memory_mask)
        x = layers.constrain_activation(x + y.reshape(x.shape))
        return layers.constrain_activation(x + self.mlp(self.mlp_norm(x), key=None)), cache

"""Self-attention, and attention to the vectors of another text (a memory), with T5's bias, RoPE or neither.

`attention` chooses the kernel, and `Attention` has the projections. Callers pass padding,
causality and windows instead of one mask, so that each kernel gets them in the form that it supports.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.models import cudnn_attention, fused_attention, fused_dense, layers
from jaxir.models.operators import operator
from jaxir.runtime.partitioning import constrain, in_force

# A window that covers any text, so that layers with and without a window can share a scanned block.
NO_WINDOW = 2**30


class Cache(NamedTuple):
    """Keys and values that are computed only once, of earlier positions or of a memory (cross-attention).

    Attributes:
      key: the keys [B, S, G, K], already rotated if the model uses RoPE.
      value: the values [B, S, G, K].
      filled: int32 [], the number of positions that are filled.
    """

    key: jax.Array
    value: jax.Array
    filled: jax.Array


class Attention(nnx.Module):
    """Attention with its four projections.

    `num_kv_heads` heads of keys and values are each shared by several query heads (Ainslie et al. 2023); None
    means num_heads. `memory_width` is the width of a memory; None means the width of x. `use_bias` says
    whether the projections of queries, keys and values have biases, `out_bias` whether that of the output has
    one; an `out_bias` of None means `use_bias`. `head_norms` normalise the heads [B, L, H, K] of queries,
    keys and values before RoPE. `scale` multiplies the logits; None means head_dim^-1/2. `stddevs` are the
    standard deviations of the initial query, key, value and output kernels. `dropout_rate` applies to
    attention weights; with `drop_for_all` a weight is dropped for all queries of a text or for none, as in
    T5X. A caller that reads results at positions hidden by the mask sets `reads_at_padding`, because kernels
    may skip these positions.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        memory_width: int | None = None,
        use_bias: bool = False,
        out_bias: bool | None = None,
        head_norms: Sequence[layers.RMSNorm | None] = (None, None, None),
        scale: float | None = None,
        stddevs: tuple[float, float, float, float],
        dropout_rate: float = 0.0,
        drop_for_all: bool = False,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        kv_heads = num_kv_heads or num_heads
        if num_heads % kv_heads:
            raise ValueError(f"num_heads {num_heads} must be a multiple of num_kv_heads {kv_heads}")

        def dense(
            inputs: int, outputs: int, *axes: str, stddev: float, bias: bool = use_bias
        ) -> layers.Linear:
            how = {"use_bias": bias, "dtype": dtype, "init": layers.normal(stddev), "rngs": rngs}
            return layers.Linear(inputs, outputs, axes=axes, **how)

        joined, memory = ("embed", "joined_kv"), memory_width or width
        self.query = dense(width, num_heads * head_dim, *joined, stddev=stddevs[0])
        self.key = dense(memory, kv_heads * head_dim, *joined, stddev=stddevs[1])
        self.value = dense(memory, kv_heads * head_dim, *joined, stddev=stddevs[2])
        out_bias = use_bias if out_bias is None else out_bias
        self.out = dense(num_heads * head_dim, width, "joined_kv", "embed", stddev=stddevs[3], bias=out_bias)
        self.query_norm, self.key_norm, self.value_norm = head_norms
        self.head_dim, self.scale = head_dim, head_dim**-0.5 if scale is None else scale
        self.dropout_rate, self.drop_for_all = dropout_rate, drop_for_all
        self.reads_at_padding = False

    def __call__(
        self,
        x: Float[Array, "B T E"],
        mask: Bool[Array, "B S"],
        *,
        memory: Float[Array, "B S M"] | None = None,
        bias: Float[Array, "1 H T S"] | None = None,
        causal: bool = False,
        window: int | Int[Array, ""] | None = None,
        frequencies: Float[Array, " F"] | None = None,
        norm: nnx.Module | None = None,
        added: bool = False,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T E"]:
        """Attends from x to itself, or to `memory` if given; `mask` is true at real tokens of the keys' text.

        `frequencies` are RoPE's (see `rotate`) and cannot be combined with a memory. For `bias`, `causal` and
        `window` see `attention`. `norm` normalises x first, and with `added` x itself is added to
        the result. A dropout key of None turns dropout off.
        """
        parts, residual = self._projected(x, memory, norm, added)
        y = attention(
            *map(self._heads, parts),
            mask=mask,
            bias=bias,
            scale=self.scale,
            causal=causal,
            window=window,
            crossed=memory is not None,
            dropout_rate=self.dropout_rate,
            drop_for_all=self.drop_for_all,
            dropout_key=key,
            norms=(self.query_norm, self.key_norm, self.value_norm),
            frequencies=frequencies,
            reads_at_padding=self.reads_at_padding,
        )
        y = y.reshape(*x.shape[:2], -1)
        return fused_dense.apply(self.out, y, residual if added else None)

    def _projected(
        self, x: jax.Array, memory: jax.Array | None, norm: nnx.Module | None, added: bool
    ) -> tuple[Sequence[jax.Array], jax.Array]:
        """Returns queries, keys and values [B, L, H K], and x, which is the residual if `added`."""
        dense = self.query, self.key, self.value
        if memory is None and fused_dense.projects(dense, norm, x, in_force()):
            found = fused_dense.project(dense, norm, x, passed=added, partitioner=in_force())
            return [checkpoint_name(part, layers.PROJECTED) for part in found[:3]], found[-1]
        y = x if norm is None else norm(x)
        seen = y if memory is None else memory
        return (self.query(y), self.key(seen), self.value(seen)), x

    def _heads(self, y: jax.Array) -> jax.Array:
        # Constrain the sharding before the reshape: between two reshapes, this would force two layouts.
        heads = y.shape[2] // self.head_dim
        y = constrain(y, ("batch", "length", "heads"), (*y.shape[:2], heads))
        return y.reshape(*y.shape[:2], heads, self.head_dim)

    def empty_cache(self, rows: int, length: int) -> Cache:
        """Returns an empty cache [`rows`, `length`, G, K] of self-attention."""
        kv_heads = self.key.kernel.shape[1] // self.head_dim
        shape, axes = (rows, length, kv_heads, self.head_dim), ("batch", "length", "heads", "kv")
        nothing = constrain(jnp.zeros(shape, self.key.dtype), axes)
        return Cache(nothing, nothing, jnp.int32(0))

    @checked_shapes
    def extend(
        self,
        x: Float[Array, "B T E"],
        cache: Cache,
        *,
        bias: Float[Array, "1 H T S"] | None = None,
        window: int | Int[Array, ""] | None = None,
        frequencies: Float[Array, " F"] | None = None,
    ) -> tuple[Float[Array, "B T E"], Cache]:
        """Reads the next T positions with causal self-attention; the cache has the positions before them.

        x has no padding, and the cache must have room for T positions. `bias` is for T queries and all S
        positions of the cache. Returns the output, and the cache extended by the T positions.
        """
        start = cache.filled
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        if frequencies is not None:
            query, key = rotate(query, frequencies, start), rotate(key, frequencies, start)

        def added(kept: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(kept, new, start, axis=1)

        cache = Cache(added(cache.key, key), added(cache.value, value), start + x.shape[1])
        y = attention(
            query,
            cache.key,
            cache.value,
            mask=jnp.ones(cache.key.shape[:2], bool),
            bias=bias,
            scale=self.scale,
            causal=True,
            window=window,
            start=start,
        )
        return self.out(y.reshape(*x.shape[:2], -1)), cache

    @checked_shapes
    def remember(self, memory: Float[Array, "B S M"]) -> Cache:
        key, value = self._heads(self.key(memory)), self._heads(self.value(memory))
        return Cache(key, value, jnp.int32(memory.shape[1]))

    @checked_shapes
    def recall(
        self, x: Float[Array, "B T E"], cache: Cache, mask: Bool[Array, "B S"]
    ) -> Float[Array, "B T E"]:
        """Attends from x to the memory whose cache `remember` returned."""
        query = self._heads(self.query(x))
        y = attention(query, cache.key, cache.value, mask=mask, bias=None, scale=self.scale, crossed=True)
        return self.out(y.reshape(*x.shape[:2], -1))


@checked_shapes
def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    *,
    mask: Bool[Array, "B *T S"],
    bias: Float[Array, "#B H T S"] | None,
    bias_of_text: bool = False,
    scale: float,
    causal: bool = False,
    window: int | Int[Array, ""] | None = None,
    start: Int[Array, ""] | None = None,
    crossed: bool = False,
    dropout_rate: float = 0.0,
    drop_for_all: bool = False,
    dropout_key: Key[Array, ""] | None = None,
    norms: Sequence[layers.RMSNorm | None] = (None, None, None),
    frequencies: Float[Array, " F"] | Float[np.ndarray, " F"] | None = None,
    reads_at_padding: bool = False,
) -> Float[Array, "B T H K"]:
    """Attends from every position to the visible ones: softmax(scale q k^T + bias) v, softmax in float32.

    A position that sees no key has an undefined result. Without `dropout_key` nothing is dropped. The fused
    kernels of GPUs do not support dropout.

    Args:
      query: [B, T, H, K] for H heads of K dimensions.
      key: [B, S, G, K]: query head h reads head h // (H / G).
      value: [B, S, G, K].
      mask: [B, S], true at real tokens, with padding on the right; or [B, T, S], true where a position sees
        another.
      bias: [1, H, T, S], added to the logits, or [B, H, T, S] with `bias_of_text`.
      bias_of_text: whether each text has its own bias.
      scale: factor of the logits; 1.0 for T5.
      causal: whether a position sees no later positions.
      window: the largest distance at which a position sees another; None: any distance.
      start: position of the first query among the keys; None: 0. `causal` and `window` then need T = S.
      crossed: whether the keys belong to another text (cross-attention); `mask` then describes that text.
      dropout_rate: probability of dropping an attention weight.
      drop_for_all: drop a weight for all queries of a text or for none.
      dropout_key: random key of the dropout; None turns dropout off.
      norms: the modules that normalise the heads of queries, keys and values before attention.
      frequencies: RoPE's (see `rotate`), which then rotates queries and keys; None: no RoPE.
      reads_at_padding: whether the results at positions that `mask` hides are needed. cuDNN's kernels
        otherwise skip these positions.
    """
    dropped = dropout_key is not None and dropout_rate > 0.0
    near = _distance_mask(query, key, causal=causal, window=window, start=start)
    if bias is not None and not bias_of_text and bias.shape[0] != 1:
        raise ValueError(f"bias has {bias.shape[0]} texts, not 1: set bias_of_text=True")
    # cuDNN computes no gradient for a bias that differs between texts.
    plain = not crossed and not bias_of_text and start is None and mask.ndim == 2
    fused = plain and fused_attention.takes(query, key, in_force())
    mapped = fused and fused_attention.maps_heads(query)
    if not mapped:
        query, key, value = _mapped(query, key, value, norms, frequencies)
    if fused:
        key_of = {"dropout_key": dropout_key if dropped else None, "partitioner": in_force()}
        how = {"causal": causal, "window": window, "dropout_rate": dropout_rate, "drop_for_all": drop_for_all}
        how |= {"norms": norms, "frequencies": frequencies} if mapped else {}
        return fused_attention.attend(query, key, value, mask=mask, bias=bias, scale=scale, **how, **key_of)
    if drop_for_all:
        # Dropping a weight for all queries equals dropping its value. This needs only random numbers
        # [B, S, G, 1], and no support of dropout in cuDNN.
        value = layers.dropout(value, dropout_rate, dropout_key, same_along=-1)
        dropped, dropout_key = False, None
    if plain and not dropped and near is None and cudnn_attention.allows(query, key, bias):
        return cudnn_attention.attend(query, key, value, mask, bias, scale, reads_at_padding)
    if not dropped and query.dtype == jnp.float32 and jax.default_backend() != "cpu":
        return jax.nn.dot_product_attention(
            query, key, value, bias=bias, mask=_visible(mask, near), scale=scale, implementation="xla"
        )
    if dropped:
        return _unfused(query, key, value, mask, near, bias, scale, dropout_rate, dropout_key)
    return unfused(query, key, value, mask, near, bias, scale=scale)


def _mapped(query, key, value, norms, frequencies):
    query, key, value = (
        x if norm is None else norm(x) for x, norm in zip((query, key, value), norms, strict=True)
    )
    if frequencies is None:
        return query, key, value
    return rotate(query, frequencies), rotate(key, frequencies), value


def _distance_mask(
    query: jax.Array, key: jax.Array, *, causal: bool, window: Any, start: jax.Array | None
) -> jax.Array | None:
    """Returns [T, S], true where causality and window let a query see a key; None if all keys are seen."""
    if not causal and window is None:
        return None
    if start is None and query.shape[1] != key.shape[1]:
        raise ValueError(f"{query.shape[1]} queries for {key.shape[1]} keys need `start`, the first position")
    positions = jnp.arange(key.shape[1])
    queries = positions if start is None else jnp.arange(query.shape[1]) + start
    distance = queries[:, None] - positions[None, :]
    near = jnp.ones_like(distance, bool) if window is None else jnp.abs(distance) <= window
    return near & (distance >= 0) if causal else near


def _visible(mask: jax.Array, near: jax.Array | None) -> jax.Array:
    mask = mask[:, None] if mask.ndim == 3 else mask[:, None, None]  # [B, 1, 1 or T, S]
    return mask if near is None else mask & near[None, None]


@operator
def unfused(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    near: jax.Array | None,
    bias: jax.Array | None,
    *,
    scale: float,
) -> jax.Array:
    """Computes `attention` [B, T, H, K] without dropout; `near`, bool [T, S], is from `_distance_mask`."""
    return _unfused(query, key, value, mask, near, bias, scale, 0.0, None)


def _unfused(query, key, value, mask, near, bias, scale, dropout_rate, dropout_key):
    # jax.nn.dot_product_attention has no dropout, and its bfloat16 gradient mixes types, which strict
    # promotion forbids. This function is up to twice as fast on a CPU for two reasons. With heads before
    # positions the products are plain matrix products. The division by the softmax's sum comes after the
    # product with the values.
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    (rows, heads, length, _), groups = query.shape, key.shape[1]

    def joined(x: jax.Array) -> jax.Array:
        """Reshapes [B, H, T, X] to [B, G, H / G T, X]: queries that share keys become rows of one product."""
        return x if heads == groups else x.reshape(rows, groups, heads // groups * length, x.shape[3])

    def apart(x: jax.Array) -> jax.Array:
        return x if heads == groups else x.reshape(rows, heads, length, x.shape[3])

    logits = jnp.einsum("BHTK,BHSK->BHTS", joined(query), key, preferred_element_type=jnp.float32)
    logits = apart(logits) * scale
    if bias is not None:
        logits += bias
    logits = jnp.where(_visible(mask, near), logits, -0.7 * jnp.finfo(jnp.float32).max)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    weights = layers.dropout(weights, dropout_rate, dropout_key).astype(value.dtype)
    mixed = jnp.einsum("BHTS,BHSK->BHTK", joined(weights), value, preferred_element_type=jnp.float32)
    return (apart(mixed) / total).astype(value.dtype).swapaxes(1, 2)


def rope_frequencies(head_dim: int, base: float) -> np.ndarray:
    """Returns float32 [head_dim / 2]: base^(-2i / head_dim), the angle of RoPE per position."""
    return (1.0 / base ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


@checked_shapes
def rotate(
    x: Float[Array, "B L H K"],
    frequencies: Float[Array, " F"] | Float[np.ndarray, " F"],
    start: Int[Array, ""] | None = None,
) -> Float[Array, "B L H K"]:
    """Rotates queries or keys [B, L, H, K] by their positions (RoPE, Su et al. 2021), in float32.

    Dimensions i and i + K/2 are a pair, as in Hugging Face's models (the paper pairs 2i with 2i + 1). A pair
    is rotated by the angle position * frequencies[i]. The first position is `start`, by default 0.
    """
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    positions = positions if start is None else positions + start.astype(jnp.float32)
    angles = positions[:, None] * frequencies[None, :]
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)

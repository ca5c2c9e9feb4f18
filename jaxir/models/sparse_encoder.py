"""Learned sparse encoders: texts as weights of the tokens of a vocabulary.

SPLADE pools the saturated logits of a masked language model over the tokens of a text: by their sum (Formal
et al. 2021, arXiv:2107.05720, eq. 2), or by their maximum in SPLADE v2 (arXiv:2109.10086, eq. 6). The query
side may be inference-free: each token of a query has a stored weight (Geng et al. 2024, arXiv:2411.04403).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, checked
from jaxir.models import layers, outlines
from jaxir.models.adapters import Adapters, attach
from jaxir.models.after_pooling import l2_normalize
from jaxir.models.dual_encoder import Tower
from jaxir.models.masked_lm import MaskedLanguageModel, MaskedLMConfig
from jaxir.models.sparse_config import Score, SparseConfig
from jaxir.runtime.partitioning import constrain

SparsePooling = Literal["max", "sum"]
Saturation = Literal["relu", "log1p_relu"]
CHUNK = 2048  # tokens of the vocabulary whose logits [B, L, CHUNK] are in memory at once


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SparseEncoderConfig(MaskedLMConfig, SparseConfig):
    """The components of a sparse encoder, in addition to those of its masked language model.

    Attributes:
      pooling: "max" or "sum" over the tokens of a text.
      saturation: "relu": a logit x becomes log(1 + relu(x)); "log1p_relu": log(1 + log(1 + relu(x))).
      static_queries: whether queries get stored weights of their tokens; else both sides run the model.
      frozen: whether training in sentence-transformers leaves the stored weights of queries as they are.
      factors: whether weights are multiplied by stored factors of tokens; weights of tokens that are not in
        the text are then 0.
      max_active_dims: the number of weights of a vector that are kept, the largest ones; None: all.
      normalized: whether vectors are scaled to length 1 before small weights are dropped.
      score: how vectors are compared.
      adapters: LoRA in the encoder; None: none.
    """

    pooling: SparsePooling = "max"
    saturation: Saturation = "relu"
    static_queries: bool = False
    factors: bool = False
    frozen: bool = False
    max_active_dims: Count | None = None
    normalized: bool = False
    score: Score = "dot"
    adapters: Adapters | None = None

    @property
    def dimension(self) -> int:
        return self.backbone.vocab_size

    @property
    def summary(self) -> str:
        queries = ", stored weights for queries" if self.static_queries else ""
        return f"{self.backbone.summary}, {self.pooling} of {self.dimension:,} token weights{queries}"

    def make(self, *, rngs: nnx.Rngs) -> SparseEncoderModel:
        return SparseEncoderModel(self, rngs=rngs)


class SparseEncoderModel(layers.Summarised, MaskedLanguageModel):
    """The module of a sparse encoder: a masked language model, and perhaps `query_weights` [V]."""

    config: SparseEncoderConfig

    def __init__(self, config: SparseEncoderConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if config.static_queries:
            self.query_weights = layers.param(outlines.filled(1, (config.dimension,)), "vocab")
        if config.factors:
            self.factors = layers.param(outlines.filled(1, (config.dimension,)), "vocab")
        attach(self, config.adapters, rngs=rngs)

    @checked_shapes
    def encode(
        self, ids: Int[Array, "B L"], *, tower: Tower = "passage", key: Key[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Returns the weights, float32, of all tokens by the language model; 0 in `ids` is padding.

        Both towers run the language model, because `SparseEncoder` reads stored query weights itself. The
        logits [B, L, V] are never in memory at once (`pooled_logits`).
        """
        return self.token_weights([(ids, tower, key)])[0]

    def token_weights(self, texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]]) -> list[jax.Array]:
        """Returns the weights [B, V] of several batches, each (token ids [B, L], tower, dropout key).

        All batches run together: with FSDP the encoder's weights are gathered once.
        """
        ids, _, keys = zip(*texts, strict=True)
        found = [self.head(hidden) for hidden in self.encoder.together(ids, keys)]
        table = self.output_table.whole(found[0].dtype)
        bias = layers.weight(self.head.bias)
        how = {"pooling": self.config.pooling, "saturation": self.config.saturation}
        pooled = [
            constrain(pooled_logits(hidden, rows != 0, table, bias, **how), ("batch", None))
            for hidden, rows in zip(found, ids, strict=True)
        ]
        if self.config.factors:
            factors = layers.weight(self.factors)[None]
            pooled = [x * factors * _presence(rows, x.shape[1]) for x, rows in zip(pooled, ids, strict=True)]
        return [l2_normalize(x) for x in pooled] if self.config.normalized else pooled

    @property
    def stored_weights(self) -> jax.Array:
        """The stored weights [V] of queries, in jaxir's order of tokens."""
        return self.query_weights[...]


def _presence(ids: jax.Array, size: int) -> jax.Array:
    """Returns float32 [B, V], V being `size`: 1 for each token of the vocabulary in a text [L], else 0."""
    rows = jnp.arange(len(ids))[:, None]
    found = jnp.zeros((len(ids), size), jnp.float32)
    return found.at[rows, layers.table_rows(ids)].max((ids != 0).astype(jnp.float32))


@checked_shapes
def pooled_logits(
    hidden: Float[Array, "B L E"],
    mask: Bool[Array, "B L"],
    table: Float[Array, "V E"],
    bias: Float[Array, " V"],
    *,
    pooling: SparsePooling,
    saturation: Saturation,
    chunk: int = CHUNK,
) -> Float[Array, "B V"]:
    """Pools saturated logits over positions: float32 [B, V]; a text without tokens gets zeros.

    The logits of only `chunk` tokens of the vocabulary are in memory at once, in the backward pass, too. For
    a maximum the backward pass keeps its position, int32 [B, V]; for a sum it recomputes the logits. The
    gradient of a maximum goes to the first of equal logits, as in PyTorch.

    Args:
      hidden: token vectors.
      mask: true at the tokens of the text.
      table: vectors whose products with `hidden` are the logits of the vocabulary.
      bias: added to the logits.
      pooling: "max" or "sum".
      saturation: see `SparseEncoderConfig`.
      chunk: tokens of the vocabulary whose logits are computed at once.
    """
    return _pooled(_How(pooling, saturation, min(chunk, len(table))), hidden, mask, table, bias)


class _How(NamedTuple):
    pooling: SparsePooling
    saturation: Saturation
    chunk: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pooled(how: _How, hidden: jax.Array, mask: jax.Array, table: jax.Array, bias: jax.Array) -> jax.Array:
    return _pooled_and_kept(how, hidden, mask, table, bias)[0]


def _pooled_and_kept(
    how: _How, hidden: jax.Array, mask: jax.Array, table: jax.Array, bias: jax.Array
) -> tuple[jax.Array, Any]:
    """Returns the weights [B, V], and what the backward pass reads."""

    def pool(_: None, part: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        positive = _positive_logits(hidden, mask, *part)
        if how.pooling == "sum":
            return None, (saturated(positive, how.saturation).sum(1), None)
        # Saturation is monotonic, so the maximum may come first.
        found = positive.argmax(1).astype(jnp.int32)
        return None, (saturated(positive.max(1), how.saturation), found)

    _, parts = jax.lax.scan(pool, None, _in_chunks(how, table, bias))
    pooled = _joined(parts[0], len(table))
    return pooled, (hidden, mask, table, bias, pooled, parts[1])


def _gradients(how: _How, kept: Any, slopes: jax.Array) -> tuple[jax.Array, None, jax.Array, jax.Array]:
    """Returns the gradients of `hidden`, `table` and `bias`; `slopes` [B, V] are those of the weights."""
    hidden, mask, table, bias, pooled, places = kept
    if how.pooling == "max":
        slopes = slopes * _slope(pooled, how.saturation)
    slopes = _split(slopes, how.chunk)

    def pull(total: jax.Array, part: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        rows, more, given, place = part
        if how.pooling == "max":
            here = place[:, None] == jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :, None]
            of_logits = jnp.where(here, given[:, None], 0.0)
        else:
            positive = _positive_logits(hidden, mask, rows, more)
            of_logits = given[:, None] * _slope(saturated(positive, how.saturation), how.saturation)
        of_bias, of_logits = of_logits.sum((0, 1)), of_logits.astype(hidden.dtype)
        total += jnp.einsum("BLV,VE->BLE", of_logits, rows, preferred_element_type=jnp.float32)
        of_rows = jnp.einsum("BLV,BLE->VE", of_logits, hidden, preferred_element_type=jnp.float32)
        return total, (of_rows.astype(table.dtype), of_bias)

    parts = (*_in_chunks(how, table, bias), slopes, places)
    of_hidden, (of_table, of_bias) = jax.lax.scan(pull, jnp.zeros(hidden.shape, jnp.float32), parts)
    num, width = table.shape
    return (
        of_hidden.astype(hidden.dtype),
        None,
        of_table.reshape(-1, width)[:num],
        of_bias.reshape(-1)[:num].astype(bias.dtype),
    )


_pooled.defvjp(_pooled_and_kept, _gradients)


def _positive_logits(hidden: jax.Array, mask: jax.Array, rows: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns float32 [B, L, C]: the logits, at least 0, and 0 at padding."""
    logits = jnp.einsum("BLE,VE->BLV", hidden, rows, preferred_element_type=jnp.float32)
    return jnp.maximum(jnp.where(mask[..., None], logits + bias[None, None].astype(jnp.float32), 0.0), 0.0)


def _in_chunks(how: _How, table: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the table as [V / C, C, E] and the bias as [V / C, C], filled up with zeros."""
    filled = [(0, -len(table) % how.chunk)]
    return (
        jnp.pad(table, [*filled, (0, 0)]).reshape(-1, how.chunk, table.shape[1]),
        jnp.pad(bias, filled).reshape(-1, how.chunk),
    )


def _split(x: jax.Array, size: int) -> jax.Array:
    """Splits x [B, V] into chunks [V / C, B, C], filled up with zeros."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)]).reshape(len(x), -1, size).swapaxes(0, 1)


def _joined(parts: jax.Array, num: int) -> jax.Array:
    """Joins chunks [V / C, B, C] to [B, V], V being `num`."""
    return parts.swapaxes(0, 1).reshape(parts.shape[1], -1)[:, :num]


def saturated(x: jax.Array, saturation: Saturation) -> jax.Array:
    """Returns log(1 + x) of x >= 0, or log(1 + log(1 + x)) for "log1p_relu"."""
    x = jnp.log1p(x)
    return jnp.log1p(x) if saturation == "log1p_relu" else x


def _slope(saturated: jax.Array, saturation: Saturation) -> jax.Array:
    """Returns the derivative of `saturated` at the logit whose saturated value is given; 0 at 0."""
    # With y = log(1 + x), dy/dx = exp(-y). With y = log(1 + log(1 + x)), dy/dx = exp(-y) * exp(1 - exp(y)).
    slope = jnp.exp(-saturated)
    if saturation == "log1p_relu":
        slope *= jnp.exp(-jnp.expm1(saturated))
    return jnp.where(saturated > 0, slope, 0.0)

"""Learned sparse encoders: texts as weights of the tokens of a vocabulary.

SPLADE (Formal et al. 2021, arXiv:2107.05720, eq. 2) sums, and SPLADE v2 (arXiv:2109.10086, eq. 6) takes the
maximum of, the saturated logits of a masked language model over the tokens of a text. The query side may be
inference-free: each token of a query has a stored weight (Geng et al. 2024, arXiv:2411.04403).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, checked
from jaxir.models import layers, outlines
from jaxir.models.adapters import Adapters, attach
from jaxir.models.masked_lm import MaskedLanguageModel, MaskedLMConfig

SparsePooling = Literal["max", "sum"]
Saturation = Literal["relu", "log1p_relu"]
CHUNK = 2048  # tokens of the vocabulary whose logits [B, L, CHUNK] are in memory at once


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SparseEncoderConfig(MaskedLMConfig):
    """The components of a sparse encoder, in addition to those of its masked language model.

    Attributes:
      pooling: "max" or "sum" over the tokens of a text.
      saturation: "relu": a logit x becomes log(1 + relu(x)); "log1p_relu": log(1 + log(1 + relu(x))).
      static_queries: whether queries have stored weights of their tokens; else both sides use the model.
      max_active_dims: the number of weights of a vector that are kept, the largest; None: all.
      adapters: LoRA in the encoder; None: none.
    """

    pooling: SparsePooling = "max"
    saturation: Saturation = "relu"
    static_queries: bool = False
    max_active_dims: Count | None = None
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
        attach(self, config.adapters, rngs=rngs)

    @checked_shapes
    def encode(self, ids: Int[Array, "B L"], *, key: Key[Array, ""] | None = None) -> Float[Array, "B V"]:
        """Returns the weights, float32, of all tokens by the language model; 0 in `ids` is padding.

        The logits [B, L, V] are never in memory at once: they are pooled for `CHUNK` tokens at a time.
        """
        hidden = self.head(self.encoder(ids, key=key))
        table = self.encoder.token_table.whole(hidden.dtype)
        how = {"pooling": self.config.pooling, "saturation": self.config.saturation}
        return pooled_logits(hidden, ids != 0, table, layers.weight(self.head.bias), **how)


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

    Args:
      hidden: token vectors.
      mask: true at the tokens of the text.
      table: vectors whose products with `hidden` are the logits of the vocabulary.
      bias: added to the logits.
      pooling: "max" or "sum".
      saturation: see `SparseEncoderConfig`.
      chunk: tokens of the vocabulary whose logits are computed at once.
    """
    num, size = len(table), min(chunk, len(table))

    def pool(start: jax.Array, pooled: jax.Array) -> jax.Array:
        start = jnp.minimum(start * size, num - size)  # the last chunk overlaps the one before it
        rows, more = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (table, bias))
        logits = (
            jnp.einsum("BLE,VE->BLV", hidden, rows, preferred_element_type=jnp.float32) + more[None, None]
        )
        positive = jnp.maximum(jnp.where(mask[..., None], logits, 0.0), 0.0)
        if pooling == "max":  # saturation is monotonic, so the maximum may come first
            found = _saturated(positive.max(1), saturation)
        else:
            found = _saturated(positive, saturation).sum(1)
        return jax.lax.dynamic_update_slice_in_dim(pooled, found, start, axis=1)

    return jax.lax.fori_loop(0, -(-num // size), pool, jnp.zeros((len(hidden), num), jnp.float32))


def _saturated(x: jax.Array, saturation: Saturation) -> jax.Array:
    x = jnp.log1p(x)
    return jnp.log1p(x) if saturation == "log1p_relu" else x

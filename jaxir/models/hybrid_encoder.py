"""Hybrid encoders (BGE-M3: Chen et al. 2024, arXiv:2402.03216): one encoder with three heads.

A text gets one vector, a weight for each of its tokens, and a vector for each of its tokens, in one pass.
Each head can be used alone: `HybridEncoderConfig.dense`, `.lexical` and `.multi_vector` describe the models
that have only this head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, Size, checked
from jaxir.losses._types import HybridVectors
from jaxir.models import layers
from jaxir.models.adapters import Adapters, attach
from jaxir.models.after_pooling import AfterPooling, l2_normalize
from jaxir.models.backbones import BackboneConfig, make_encoder
from jaxir.models.dual_encoder import DualEncoderConfig, Tower, pool
from jaxir.models.multi_vector import MultiVectorConfig, make_token_modules, token_vectors
from jaxir.models.sparse_config import Score, SparseConfig
from jaxir.runtime.partitioning import constrain

HybridPooling = Literal["cls", "mean", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LexicalEncoderConfig(SparseConfig):
    """The components of an encoder that weighs the tokens of a text, as BGE-M3's sparse head does.

    Attributes:
      backbone: the encoder.
      unweighted: ids of tokens that get no weight, such as those that start and end a text.
      max_active_dims: see `SparseConfig`.
      normalized: see `SparseConfig`.
      score: see `SparseConfig`.
      adapters: LoRA in the encoder; None: none.
    """

    form: ClassVar[str] = "lexical"

    backbone: BackboneConfig
    unweighted: tuple[int, ...] = ()
    max_active_dims: Count | None = None
    normalized: bool = False
    score: Score = "dot"
    adapters: Adapters | None = None

    @property
    def dimension(self) -> int:
        return self.backbone.vocab_size

    @property
    def summary(self) -> str:
        return f"{self.backbone.summary}, weights of the tokens of a text"

    def make(self, *, rngs: nnx.Rngs) -> LexicalEncoderModel:
        return LexicalEncoderModel(self, rngs=rngs)


class LexicalEncoderModel(layers.Summarised):
    """The module of an encoder that weighs the tokens of a text."""

    def __init__(self, config: LexicalEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)
        self.token_weight = _make_weight(config.backbone, rngs=rngs)
        attach(self, config.adapters, rngs=rngs)

    @checked_shapes
    def encode(
        self, ids: Int[Array, "B L"], *, tower: Tower = "passage", key: Key[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Returns float32 [B, V]: the largest weight of each token of a text; 0 in `ids` is padding."""
        return self.token_weights([(ids, tower, key)])[0]

    def token_weights(self, texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]]) -> list[jax.Array]:
        """Returns the weights [B, V] of several batches, each (token ids [B, L], tower, dropout key)."""
        ids, _, keys = zip(*texts, strict=True)
        found = self.encoder.together(ids, keys)
        weights = (
            lexical_weights(self.token_weight, self.config, *pair) for pair in zip(found, ids, strict=True)
        )
        return [in_vocabulary(*pair, self.config.dimension) for pair in zip(ids, weights, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class HybridEncoderConfig:
    """The components of a hybrid encoder. Both towers share all parameters.

    Attributes:
      backbone: the encoder.
      token_dimension: dimension of a token's vector.
      pooling: how the vectors of the tokens become the vector of the text, as in `DualEncoderConfig`; BGE-M3
        has "cls".
      skipped: ids of tokens that have no vector of their own, such as the first.
      unweighted: ids of tokens that get no weight, such as those that start and end a text.
      adapters: LoRA in the encoder; None: none.
    """

    backbone: BackboneConfig
    token_dimension: Size
    pooling: HybridPooling = "cls"
    skipped: tuple[int, ...] = ()
    unweighted: tuple[int, ...] = ()
    adapters: Adapters | None = None

    @property
    def dense(self) -> DualEncoderConfig:
        return DualEncoderConfig(
            backbone=self.backbone, pooling=self.pooling, similarity="cosine", adapters=self.adapters
        )

    @property
    def lexical(self) -> LexicalEncoderConfig:
        return LexicalEncoderConfig(
            backbone=self.backbone, unweighted=self.unweighted, adapters=self.adapters
        )

    @property
    def multi_vector(self) -> MultiVectorConfig:
        dense = AfterPooling(kind="dense", dimension=self.token_dimension, activation="identity")
        return MultiVectorConfig(
            backbone=self.backbone,
            token_modules=(dense, AfterPooling(kind="normalize")),
            similarity="meanmaxsim",
            skipped=self.skipped,
            skipped_in=("query", "passage"),
            adapters=self.adapters,
        )

    @property
    def dimension(self) -> int:
        """D, the length of the one vector of a text."""
        return self.backbone.output_dim

    @property
    def summary(self) -> str:
        return (
            f"{self.backbone.summary}, {self.dimension} dimensions, weights of {self.backbone.vocab_size:,}"
            f" tokens, {self.token_dimension} dimensions a token"
        )

    def make(self, *, rngs: nnx.Rngs) -> HybridEncoderModel:
        return HybridEncoderModel(self, rngs=rngs)


class HybridEncoderModel(layers.Summarised):
    """The module of a hybrid encoder."""

    def __init__(self, config: HybridEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)
        self.token_weight = _make_weight(config.backbone, rngs=rngs)
        self.token_modules = make_token_modules(config.multi_vector, rngs=rngs)
        attach(self, config.adapters, rngs=rngs)

    def heads(self, texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]]) -> list[HybridVectors]:
        """Encodes several batches, each (token ids [B, L], tower, dropout key), by the three heads."""
        ids, towers, keys = zip(*texts, strict=True)
        found = []
        for hidden, batch, tower in zip(self.encoder.together(ids, keys), ids, towers, strict=True):
            weights = lexical_weights(self.token_weight, self.config, hidden, batch)
            vectors = token_vectors(self.token_modules, hidden)
            tokens = self.config.multi_vector.scored_vectors(vectors, batch, tower)
            found.append(HybridVectors(self._dense(hidden, batch), batch, weights, tokens))
        return found

    def encode_together(
        self, texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]], **unused: Any
    ) -> list[jax.Array]:
        """Returns the vectors [B, D] of several batches as a dual encoder does; evaluators use them."""
        ids, _, keys = zip(*texts, strict=True)
        return [self._dense(*pair) for pair in zip(self.encoder.together(ids, keys), ids, strict=True)]

    @checked_shapes
    def encode(
        self, ids: Int[Array, "B L"], *, tower: Tower = "passage", key: Key[Array, ""] | None = None
    ) -> Float[Array, "B D"]:
        """Embeds token ids as a dual encoder does: float32 [B, D] of length 1; 0 is padding, on the right."""
        return self.encode_together([(ids, tower, key)])[0]

    @checked_shapes
    def encode_packed(self, ids: Int[Array, "B L"]) -> Float[Array, "B N"]:
        """Returns all outputs of each text as one row, which `unpacked` takes apart."""
        found = self.heads([(ids, "passage", None)])[0]
        flat = found.tokens.vectors.reshape(len(ids), -1)
        return jnp.concatenate([found.dense, found.weights, flat], axis=1)

    def _dense(self, hidden: jax.Array, ids: jax.Array) -> jax.Array:
        pooled = pool(hidden, self.encoder.is_pooled(ids), how=self.config.pooling, left_out=0)
        return constrain(l2_normalize(pooled), ("batch", None))


def unpacked(
    row: np.ndarray, config: HybridEncoderConfig, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Splits a row that `encode_packed` returned for `length` tokens, some of which may be padding.

    Returns:
      the text's vector [D], the weights of its tokens [length] and their vectors [length, token_dimension].
    """
    dense, weights, vectors = np.split(row, [config.dimension, config.dimension + length])
    return dense, weights, vectors.reshape(length, config.token_dimension)


def lexical_weights(
    linear: layers.Linear,
    config: LexicalEncoderConfig | HybridEncoderConfig,
    hidden: jax.Array,
    ids: jax.Array,
) -> jax.Array:
    """Returns the weights [B, L] of the tokens of texts, from their vectors [B, L, E].

    A weight is relu(w . h + b). If a token occurs several times in a text, only its largest weight is kept;
    the others become 0.
    """
    counted = ids != 0
    for token in config.unweighted:
        counted &= ids != token
    x = hidden.astype(jnp.float32).reshape(-1, hidden.shape[-1])
    weights = jnp.where(counted, jax.nn.relu(linear(x)).reshape(ids.shape), 0.0)
    same = ids[:, :, None] == ids[:, None, :]
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)
    larger = weights[:, None, :] > weights[:, :, None]
    equal_before = (weights[:, None, :] == weights[:, :, None]) & (places[None, :] < places[:, None])[None]
    return jnp.where((same & (larger | equal_before)).any(2), 0.0, weights)


def in_vocabulary(ids: jax.Array, weights: jax.Array, size: int) -> jax.Array:
    """Spreads the weights [B, L] of texts' tokens over the vocabulary: returns [B, V], V being `size`."""

    def of_text(ids: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.zeros(size, jnp.float32).at[ids].add(weights)

    return constrain(jax.vmap(of_text)(ids, weights), ("batch", None))


def _make_weight(backbone: BackboneConfig, *, rngs: nnx.Rngs) -> layers.Linear:
    width = backbone.output_dim
    init = layers.normal(width**-0.5)
    return layers.Linear(width, 1, use_bias=True, axes=("embed", None), dtype="float32", init=init, rngs=rngs)

"""Forms of sparse encoders without a language model's head: stored weights, codes, and pooled token vectors.

Stored weights are those of SparseStaticEmbedding of sentence-transformers. Codes are the top-k activations of
a sparse autoencoder over a dense encoder's vector (CSR: Wen et al. 2025, arXiv:2503.01776).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, Natural, Size, checked
from jaxir.models import layers, outlines
from jaxir.models.adapters import Adapters, attach
from jaxir.models.after_pooling import AfterPooling, l2_normalize, width_after
from jaxir.models.backbones import BackboneConfig, make_encoder
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, Tower
from jaxir.models.hybrid_encoder import LexicalEncoderConfig
from jaxir.models.multi_vector import make_token_modules, token_vectors
from jaxir.models.sparse_config import Score, SparseConfig
from jaxir.models.sparse_encoder import Saturation, SparseEncoderConfig, SparsePooling, saturated
from jaxir.models.word_vectors import WordVectorsConfig
from jaxir.runtime.partitioning import constrain

_NORM_EPSILON = 1e-5  # added to the deviation by `SparseAutoEncoder` of sentence-transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SparseStaticConfig(SparseConfig):
    """Stored weights, such as inverse document frequencies: a text's vector has each token's weight once.

    Attributes:
      backbone: the table of weights, of width 1.
      max_active_dims: see `SparseConfig`.
      normalized: see `SparseConfig`.
      score: see `SparseConfig`.
      frozen: whether training in sentence-transformers leaves the weights as they are.
    """

    form: ClassVar[str] = "static"

    backbone: WordVectorsConfig
    max_active_dims: Count | None = None
    normalized: bool = False
    score: Score = "dot"
    frozen: bool = False

    def __post_init__(self):
        # Another type would only round the weights, which no product reads.
        object.__setattr__(self, "backbone", dataclasses.replace(self.backbone, dtype="float32"))

    def stores_weights(self, tower: Tower) -> bool:
        return True

    @property
    def dimension(self) -> int:
        return self.backbone.vocab_size

    @property
    def summary(self) -> str:
        return f"stored weights of {self.dimension:,} tokens"

    def make(self, *, rngs: nnx.Rngs) -> "SparseStaticModel":
        return SparseStaticModel(self, rngs=rngs)


class SparseStaticModel(layers.Summarised):
    """The module of stored weights [V]; `SparseEncoder` reads them without a program."""

    def __init__(self, config: SparseStaticConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)

    @property
    def stored_weights(self) -> jax.Array:
        """The weights [V], in jaxir's order of tokens."""
        return self.encoder.table.embedding[...][:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AutoEncoder:
    """A sparse autoencoder: a linear map to `dimension` codes, of which `top` are kept, and a map back.

    Attributes:
      dimension: H, the number of codes.
      top: the number of codes that are kept, the largest ones; kept codes below 0 become 0.
      auxiliary: the number of unused codes that training in sentence-transformers reads, `k_aux`.
      dead_threshold: the number of steps after which this training counts a code as unused.
      normalize: whether a vector is standardised first: its mean becomes 0 and its deviation 1.
    """

    dimension: Size
    top: Count
    auxiliary: Natural = 512
    dead_threshold: Natural = 30
    normalize: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SparseCodesConfig(DualEncoderConfig, SparseConfig):
    """A dense encoder with one tower, and codes of its vectors.

    Attributes:
      codes: the autoencoder.
      max_active_dims: see `SparseConfig`; None: `codes.top`.
      normalized: see `SparseConfig`.
      score: see `SparseConfig`. `similarity` is the dense encoder's: "cosine" normalises its vectors.
    """

    form: ClassVar[str] = "codes"
    of_tokens: ClassVar[bool] = False

    codes: AutoEncoder
    max_active_dims: Count | None = None
    normalized: bool = False
    score: Score = "dot"

    @property
    def dense_dimension(self) -> int:
        return DualEncoderConfig.dimension.fget(self)

    @property
    def dimension(self) -> int:
        return self.codes.dimension

    @property
    def active_dims(self) -> int:
        return self.max_active_dims or self.codes.top

    @property
    def summary(self) -> str:
        return f"{self.backbone.summary}, {self.codes.top} of {self.dimension:,} codes"

    def make(self, *, rngs: nnx.Rngs) -> "SparseCodesModel":
        return SparseCodesModel(self, rngs=rngs)


class SparseCodesModel(DualEncoderModel):
    """The module of a `SparseCodesConfig`."""

    config: SparseCodesConfig

    def __init__(self, config: SparseCodesConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.codes = _Codes(config.codes, config.dense_dimension, rngs=rngs)

    @checked_shapes
    def encode(self, ids: Int[Array, "B L"], **how: Any) -> Float[Array, "B H"]:
        """Returns all codes, float32 [B, H], with 0 for those below 0; the caller keeps the largest.

        The arguments are those of `DualEncoderModel.encode`.
        """
        return self.codes(super().encode(ids, **how))


class _Codes(nnx.Module):
    """The encoder's side of a sparse autoencoder; `last_nonzero` [H] only counts steps of training."""

    def __init__(self, codes: AutoEncoder, width: int, *, rngs: nnx.Rngs):
        self.normalize = codes.normalize
        init = layers.normal(width**-0.5)
        how = {"axes": ("embed", None), "use_bias": False, "dtype": "float32", "init": init, "rngs": rngs}
        self.linear = layers.Linear(width, codes.dimension, **how)
        self.pre_bias = layers.param(outlines.filled(0, (width,)), None)
        self.bias = layers.param(outlines.filled(0, (codes.dimension,)), None)
        self.last_nonzero = layers.param(outlines.filled(0, (codes.dimension,)), None)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.normalize:
            x -= x.mean(-1, keepdims=True)
            x /= x.std(-1, keepdims=True, ddof=1) + _NORM_EPSILON
        x = self.linear(x - layers.weight(self.pre_bias)[None])
        return jax.nn.relu(x + layers.weight(self.bias)[None])


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PooledTokensConfig(SparseConfig):
    """Saturated and pooled token vectors of an encoder: SpladePooling without a language model's head.

    Attributes:
      backbone: the encoder.
      token_modules: modules that are applied, in this order, to each token's vector from the encoder.
      pooling: "max" or "sum" over the tokens of a text.
      saturation: see `SparseEncoderConfig`.
      max_active_dims: see `SparseConfig`.
      normalized: see `SparseConfig`.
      score: see `SparseConfig`.
      adapters: LoRA in the encoder; None: none.
    """

    form: ClassVar[str] = "token_vectors"
    of_tokens: ClassVar[bool] = False

    backbone: BackboneConfig
    token_modules: tuple[AfterPooling, ...] = ()
    pooling: SparsePooling = "max"
    saturation: Saturation = "relu"
    max_active_dims: Count | None = None
    normalized: bool = False
    score: Score = "dot"
    adapters: Adapters | None = None

    @property
    def dimension(self) -> int:
        return width_after(self.token_modules, self.backbone.output_dim)

    @property
    def summary(self) -> str:
        return f"{self.backbone.summary}, {self.pooling} of token vectors of {self.dimension:,} dimensions"

    def make(self, *, rngs: nnx.Rngs) -> "PooledTokensModel":
        return PooledTokensModel(self, rngs=rngs)


class PooledTokensModel(layers.Summarised):
    """The module of a `PooledTokensConfig`."""

    def __init__(self, config: PooledTokensConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)
        self.token_modules = make_token_modules(config, rngs=rngs)
        attach(self, config.adapters, rngs=rngs)

    @checked_shapes
    def encode(
        self, ids: Int[Array, "B L"], *, tower: Tower = "passage", key: Key[Array, ""] | None = None
    ) -> Float[Array, "B D"]:
        """Returns the pooled vectors, float32; 0 in `ids` is padding. Both towers are the same."""
        x = token_vectors(self.token_modules, self.encoder(ids, key=key))
        x = jnp.where((ids != 0)[..., None], x, 0.0)
        x = saturated(jax.nn.relu(x), self.config.saturation)
        x = x.max(1) if self.config.pooling == "max" else x.sum(1)
        return constrain(l2_normalize(x) if self.config.normalized else x, ("batch", None))


FORMS = {
    config.form: config
    for config in (
        SparseEncoderConfig,
        SparseStaticConfig,
        SparseCodesConfig,
        PooledTokensConfig,
        LexicalEncoderConfig,
    )
}

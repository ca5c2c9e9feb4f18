"""DeBERTa-v2 and v3 encoders (He et al. 2021, arXiv:2006.03654; He et al. 2023, arXiv:2111.09543).

Post-norm blocks as in BERT, without absolute positions. Attention is disentangled: queries also attend to
keys of distances, and keys to queries of distances, from one table that all blocks share. Distances are
bucketed logarithmically. The convolution of the two largest v2 models is not supported.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, Layers, Positive, Rate, Size, Within, checked
from jaxir.models import backbones, layers, stacks
from jaxir.models.attention import Attention, attention
from jaxir.models.backbones import BackboneConfig, StackEncoder, register
from jaxir.models.blocks import PostNormBlock
from jaxir.models.codec import ACTIVATIONS, Entry, HuggingFace, ScoreHead, TokenHead
from jaxir.runtime.partitioning import constrain

_WEIGHTS = {
    "token": "embeddings.word_embeddings",
    "token_norm": "embeddings.LayerNorm",
    "relative": "encoder.rel_embeddings",
    "relative_norm": "encoder.LayerNorm",
    "layers.*.attention.query": "encoder.layer.*.attention.self.query_proj",
    "layers.*.attention.key": "encoder.layer.*.attention.self.key_proj",
    "layers.*.attention.value": "encoder.layer.*.attention.self.value_proj",
    "layers.*.attention.position_query": "encoder.layer.*.attention.self.pos_query_proj",
    "layers.*.attention.position_key": "encoder.layer.*.attention.self.pos_key_proj",
    "layers.*.attention.out": "encoder.layer.*.attention.output.dense",
    "layers.*.attention_norm": "encoder.layer.*.attention.output.LayerNorm",
    "layers.*.wi": "encoder.layer.*.intermediate.dense",
    "layers.*.wo": "encoder.layer.*.output.dense",
    "layers.*.mlp_norm": "encoder.layer.*.output.LayerNorm",
}
_TERMS = {"p2c": "position_to_content", "c2p": "content_to_position"}
_NORMS = {"none": False, "layer_norm": True}
_LEFT_OUT = ("pooler.", "classifier.", "cls.", "lm_predictions.", "mask_predictions.", "embeddings.position_")
_POSITIONS, _FARTHEST, _BUCKETS = "max_position_embeddings", "max_relative_positions", "position_buckets"


def _read_attention(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    """Reads the settings of attention, and refuses those that are not supported."""
    if not content.get("relative_attention") or content.get("position_biased_input", True):
        raise ValueError(
            "absolute positions are not supported: relative_attention must be true and"
            " position_biased_input false, as in DeBERTa-v3"
        )
    if content.get("conv_kernel_size"):
        raise ValueError(
            "the convolution next to the first block (conv_kernel_size, as in deberta-v2-xlarge and -xxlarge)"
            " is not supported; DeBERTa-v3 has none"
        )
    width, heads = content["hidden_size"], content["num_attention_heads"]
    for name, parts in (("embedding_size", 1), ("attention_head_size", heads)):
        if (found := content.get(name)) is not None and found * parts != width:
            raise ValueError(f"{name} {found!r} is not supported with hidden_size {width}")
    terms = content.get("pos_att_type") or []
    terms = [term.strip() for term in terms.lower().split("|")] if isinstance(terms, str) else terms
    if unknown := [term for term in terms if term not in _TERMS]:
        raise ValueError(f"pos_att_type {unknown[0]!r} is not supported; supported are {', '.join(_TERMS)}")
    farthest = content.get(_FARTHEST, -1)
    return {
        "relative_max_distance": content[_POSITIONS] if farthest < 1 else farthest,
        "relative_buckets": max(content.get(_BUCKETS, -1), 0),
        **{ours: theirs in terms for theirs, ours in _TERMS.items()},
    }


def _write_attention(config: "DebertaConfig", pad_id: int) -> dict[str, Any]:
    return {
        _POSITIONS: config.relative_max_distance,
        _FARTHEST: -1,  # -1 means max_position_embeddings
        _BUCKETS: config.relative_buckets or -1,
        "pos_att_type": [theirs for theirs, ours in _TERMS.items() if getattr(config, ours)],
    }


_FOLDER = HuggingFace(
    model_type="deberta-v2",
    architecture="DebertaV2Model",
    entries={
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "shared_projections": Entry("share_att_key", False),
        "relative_norm": Entry("norm_rel_ebd", "none", _NORMS),
        "layer_norm_epsilon": Entry("layer_norm_eps", 1e-7),
        "activation": Entry("hidden_act", "gelu", ACTIVATIONS),
        "dropout_rate": Entry("hidden_dropout_prob", 0.1),
        "attention_dropout_rate": Entry("attention_probs_dropout_prob", 0.1),
    },
    weights=lambda config: _WEIGHTS,
    fixed={"type_vocab_size": 0},
    written={"relative_attention": True, "position_biased_input": False},
    read_more=_read_attention,
    write_more=_write_attention,
    left_out=_LEFT_OUT,
    token_head=TokenHead(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions",
        prefix="deberta.",
        # A folder with `legacy` false has the same head under other names.
        renamed=(
            (r"lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
            (r"lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
        ),
        written={"legacy": True},
    ),
    score_head=ScoreHead(
        pooler="pooler.dense",
        activations=("gelu", "relu", "tanh"),
        prefix="deberta.",
        entries={"activation": "pooler_hidden_act"},
        widths=("pooler_hidden_size",),
        written={"pooler_dropout": 0.0},
    ),
    tokenizer_class="DebertaV2Tokenizer",
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DebertaConfig(BackboneConfig):
    """The sizes and settings of a DeBERTa encoder. The defaults are DeBERTa-v3 base.

    Attributes:
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      num_heads: heads of attention, each of E / num_heads dimensions.
      mlp_dim: units of the feed-forward layer.
      relative_buckets: number of buckets of distances on each side; the first half hold one distance each. 0:
        every distance up to `relative_max_distance` has its own bucket.
      relative_max_distance: all distances of at least this many tokens share the last bucket.
      content_to_position: whether queries attend to keys of distances.
      position_to_content: whether keys attend to queries of distances.
      shared_projections: whether distances share the query and key projections of tokens, or have their own.
      relative_norm: whether the table of distances is normalised first.
      layer_norm_epsilon: epsilon of every norm.
      activation: activation of the feed-forward layer.
      dropout_rate: dropout of embeddings, distances and each sublayer's output.
      attention_dropout_rate: dropout of attention weights.
      dtype, remat, scan_layers: see `BackboneConfig`.
    """

    kind: ClassVar[str] = "deberta-v2"
    title: ClassVar[str] = "DeBERTa"
    token_table: ClassVar[str] = "token"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = (_FOLDER,)
    vocab_size: Size = 128100
    embed_dim: Size = 768
    num_layers: Layers = 12
    num_heads: Size = 12
    mlp_dim: Size = 3072
    relative_buckets: Annotated[int, Within(0, 2**16)] = 256
    relative_max_distance: Count = 512
    content_to_position: bool = True
    position_to_content: bool = True
    shared_projections: bool = True
    relative_norm: bool = True
    layer_norm_epsilon: Positive = 1e-7
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    dropout_rate: Rate = 0.1
    attention_dropout_rate: Rate = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    def __post_init__(self):
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} must be a multiple of num_heads {self.num_heads}")
        buckets, farthest = self.relative_buckets, self.relative_max_distance
        if 0 < buckets < 4 or (buckets and farthest < buckets // 2 + 2):
            raise ValueError(
                f"relative_buckets {buckets} must be 0 or at least 4, and relative_max_distance {farthest}"
                " must exceed half of relative_buckets by 2 or more"
            )

    @property
    def relative_span(self) -> int:
        """Number of rows of the table of distances for one side: keys before the query, or keys after it."""
        return self.relative_buckets or self.relative_max_distance

    def make(self, *, rngs: nnx.Rngs) -> "Deberta":
        return Deberta(self, rngs=rngs)


PUBLISHED = {
    "microsoft/deberta-v3-xsmall": DebertaConfig(embed_dim=384, num_heads=6, mlp_dim=1536),
    "microsoft/deberta-v3-small": DebertaConfig(num_layers=6),
    "microsoft/deberta-v3-base": DebertaConfig(),
    "microsoft/deberta-v3-large": DebertaConfig(embed_dim=1024, num_layers=24, num_heads=16, mlp_dim=4096),
    "microsoft/mdeberta-v3-base": DebertaConfig(vocab_size=251000),
}
backbones.PUBLISHED.update(PUBLISHED)


class Deberta(StackEncoder):
    """A DeBERTa encoder; weights start from N(0, 0.02^2)."""

    def __init__(self, config: DebertaConfig, *, rngs: nnx.Rngs):
        width, rows = config.embed_dim, 2 * config.relative_span
        how = {"dtype": config.dtype, "rngs": rngs}
        self.config = config
        self.token = layers.Embedding(config.vocab_size, width, axis="vocab", **how)
        self.token_norm = _norm(config)
        self.relative = layers.Embedding(rows, width, axis="relpos_buckets", **how)
        self.relative_norm = _norm(config) if config.relative_norm else None
        self.layers = stacks.make_stack(
            lambda rngs: PostNormBlock(config, DisentangledAttention(config, rngs=rngs), rngs=rngs),
            config.num_layers,
            scan=config.scan_layers,
            rngs=rngs,
        )

    def embed(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        return [
            layers.constrain_activation(layers.dropout(self.token_norm(x), self.config.dropout_rate, key))
            for x, key in zip(self.token.together(ids), keys, strict=True)
        ]

    def block_args(self, ids: Sequence[jax.Array], xs: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
        """Returns the mask, the table of distances [P, E], and its rows by distance [2, 2L] (see `_rows`)."""
        table = self.relative.whole(self.config.dtype)
        if self.relative_norm is not None:
            table = self.relative_norm(table[None])[0]
        return [(batch != 0, table, self._rows(batch.shape[1])) for batch in ids]

    def _rows(self, length: int) -> jax.Array:
        """Returns int32 [2, 2L]: rows of the table for distances L - 1 ... -L, and for -(L - 1) ... L."""
        upwards = jnp.arange(2 * length, dtype=jnp.int32) - (length - 1)
        distances = jnp.array([[-1], [1]], jnp.int32) * upwards[None]
        span, farthest = self.config.relative_span, self.config.relative_max_distance
        if self.config.relative_buckets:
            distances = log_buckets(distances, num_buckets=span, max_distance=farthest)
        return jnp.clip(distances + span, 0, 2 * span - 1)


@checked_shapes
def log_buckets(distance: Int[Array, "N M"], *, num_buckets: int, max_distance: int) -> Int[Array, "N M"]:
    """Returns the bucket of each distance (query position - key position), with its sign.

    With m half of the buckets, a size up to m has its own bucket. Larger sizes have bucket m + ceil((m - 1)
    log_g(size / m)), at most 2m, with g = (max_distance - 1) / m. The paper has no such buckets; the formula
    is from He et al.'s code.
    """
    middle = num_buckets // 2
    growth = ((max_distance - 1) / middle) ** (1 / (middle - 1))
    # Integer bounds, because the formula's logarithm could round either way at the last bound.
    bounds = np.floor(middle * growth ** np.arange(middle) + 1e-6).astype(np.int32) + 1
    size = jnp.abs(distance)
    beyond = (size[..., None] >= jnp.asarray(bounds)[None, None]).sum(-1, dtype=size.dtype)
    return jnp.sign(distance) * (jnp.minimum(size, middle) + beyond)


def _norm(config: DebertaConfig) -> layers.LayerNorm:
    return layers.LayerNorm(config.embed_dim, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


class DisentangledAttention(Attention):
    """Attention whose logits are (q_i k_j + q_i k(i - j) + k_j q(i - j)) / sqrt(K n), n the number of terms.

    k(d) and q(d) are projections of a row of the table of distances (He et al. 2021, eq. 4).
    """

    def __init__(self, config: DebertaConfig, *, rngs: nnx.Rngs):
        def of_distances(wanted: bool) -> layers.Linear | None:
            if not wanted or config.shared_projections:
                return None
            width, axes = config.embed_dim, ("embed", "joined_kv")
            return layers.Linear(width, width, axes=axes, dtype=config.dtype, rngs=rngs)

        num_terms = 1 + config.content_to_position + config.position_to_content
        head_dim = config.embed_dim // config.num_heads
        super().__init__(
            config.embed_dim,
            num_heads=config.num_heads,
            head_dim=head_dim,
            use_bias=True,
            scale=(head_dim * num_terms) ** -0.5,
            stddevs=(0.02,) * 4,
            dropout_rate=config.attention_dropout_rate,
            dtype=config.dtype,
            rngs=rngs,
        )
        self.config = config
        self.position_key = of_distances(config.content_to_position)
        self.position_query = of_distances(config.position_to_content)

    @checked_shapes
    def __call__(
        self,
        x: Float[Array, "B L E"],
        mask: Bool[Array, "B L"],
        table: Float[Array, "P E"],
        rows: Int[Array, "2 R"],
        *,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B L E"]:
        """Attends from x to itself.

        `table` has a vector for each bucket of distances. `rows` are the rows of `table` for distances L - 1
        ... -L, and for -(L - 1) ... L.
        """
        weights_key, table_key = layers.split_key(key, 2)
        query, keys, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        table = layers.dropout(table, self.config.dropout_rate, table_key)
        terms = []
        if self.config.content_to_position:
            terms.append(
                _relative_logits(query, self._projected(table, rows[0], self.position_key, self.key))
            )
        if self.config.position_to_content:
            met = _relative_logits(keys, self._projected(table, rows[1], self.position_query, self.query))
            terms.append(met.swapaxes(2, 3))
        bias = sum(terms) * self.scale if terms else None
        dropped = {"dropout_rate": self.dropout_rate, "dropout_key": weights_key}
        shared = {"mask": mask, "scale": self.scale, **dropped}
        y = attention(query, keys, value, bias=bias, bias_of_text=bool(terms), **shared)
        return self.out(y.reshape(*x.shape[:2], -1))

    def _projected(
        self, table: jax.Array, rows: jax.Array, own: layers.Linear | None, shared: layers.Linear
    ) -> jax.Array:
        """Returns the projection [R, H, K] of the given rows [R] of the table."""
        found = (shared if own is None else own)(jnp.take(table, rows, axis=0))
        found = found.reshape(-1, self.config.num_heads, self.head_dim)
        return constrain(found, (None, "heads", "kv"))


def _relative_logits(x: jax.Array, distances: jax.Array) -> jax.Array:
    """Returns float32 [B, H, L, L]: element (i, j) is x_i times distances[j - i + L - 1].

    x is [B, L, H, K], `distances` [2L, H, K]. The product of all pairs is computed, then each row is shifted
    one position further to the left than the row before, by reshaping to another width. A lookup has a slow
    gradient; only exported programs, where L is symbolic, use a lookup.
    """
    products = jnp.einsum("BLHK,RHK->BHLR", x, distances, preferred_element_type=jnp.float32)
    rows, heads, length, _ = products.shape
    if not isinstance(length, int):
        places = jnp.arange(length, dtype=jnp.int32)
        places = places[None, :] - places[:, None] + (length - 1)
        places = jnp.broadcast_to(places[None, None], (rows, heads, length, length))
        return jnp.take_along_axis(products, places, axis=3)
    flat = products.reshape(rows, heads, 2 * length * length)[:, :, length - 1 : 2 * length * length - 1]
    return flat.reshape(rows, heads, length, 2 * length - 1)[..., :length]

"""ModernBERT encoders (Warner et al. 2024, arXiv:2412.13663).

Pre-norm blocks without biases, RoPE, gated feed-forward layers. Every third block attends to the whole text,
other blocks to a window. The first block has no attention norm, because the embeddings are normalised. As it
lacks this parameter, it is not part of the stack.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxir.core.values import Count, Layers, Positive, Rate, Size, checked
from jaxir.models import backbones, layers, stacks
from jaxir.models.attention import NO_WINDOW, Attention, rope_frequencies
from jaxir.models.backbones import BackboneConfig, Edit, Encoder, edited, register
from jaxir.models.blocks import FeedForward, PreNormBlock
from jaxir.models.codec import ACTIVATIONS, Entry, HuggingFace, ScoreHead, TokenHead


def _block(ours: str, theirs: str) -> dict[str | tuple[str, ...], str]:
    return {
        tuple(f"{ours}.attention.{name}" for name in ("query", "key", "value")): f"{theirs}.attn.Wqkv",
        f"{ours}.attention.out": f"{theirs}.attn.Wo",
        f"{ours}.mlp_norm": f"{theirs}.mlp_norm",
        (f"{ours}.mlp.wi_0", f"{ours}.mlp.wi_1"): f"{theirs}.mlp.Wi",
        f"{ours}.mlp.wo": f"{theirs}.mlp.Wo",
    }


_WEIGHTS = {
    "token": "embeddings.tok_embeddings",
    "token_norm": "embeddings.norm",
    **_block("first", "layers.0"),
    **_block("layers.*", "layers.*"),
    "layers.*.attention_norm": "layers.*.attn_norm",
    "norm": "final_norm",
}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_EVERY = "global_attn_every_n_layers"
_BASES = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}


def _layer_types(num_layers: int, every: int) -> list[str]:
    return [_LOCAL if i % every else _GLOBAL for i in range(num_layers)]


def _read_layers(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    """Reads from config.json, as transformers 5 or 4 writes it, which layers are local and RoPE's bases."""
    every, num = content.get(_EVERY, 3), content["num_hidden_layers"]
    types = content.get("layer_types")
    if types is not None:
        every = next((i for i, kind in enumerate(types) if i and kind == _GLOBAL), num)
        if types != _layer_types(num, every):
            raise ValueError(f"layer_types must be {_GLOBAL} every {every} layers, from the first layer on")
    bases = {}
    for kind, (name, default) in _BASES.items():
        rope = (content.get("rope_parameters") or {}).get(kind) or {}
        if rope.get("rope_type", "default") != "default" or content.get("rope_scaling"):
            raise ValueError("RoPE scaling is not supported: set rope_type to default, rope_scaling to null")
        base = rope.get("rope_theta", content.get(name, default))
        # In transformers 4 local layers without a base use the global base.
        bases[kind] = bases[_GLOBAL] if kind == _LOCAL and base is None else float(base)
    return {"global_every": every, "global_rope_base": bases[_GLOBAL], "local_rope_base": bases[_LOCAL]}


def _write_layers(config: "ModernBertConfig", pad_id: int) -> dict[str, Any]:
    bases = {_GLOBAL: config.global_rope_base, _LOCAL: config.local_rope_base}
    return {
        "layer_types": _layer_types(config.num_layers, config.global_every),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": b} for kind, b in bases.items()},
        _EVERY: config.global_every,
        **{_BASES[kind][0]: base for kind, base in bases.items()},
    }


_FOLDER = HuggingFace(
    model_type="modernbert",
    architecture="ModernBertModel",
    entries={
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "local_attention": Entry("local_attention", 128),
        "layer_norm_epsilon": Entry("norm_eps", 1e-5),
        "activation": Entry("hidden_activation", "gelu", ACTIVATIONS),
        "embedding_dropout_rate": Entry("embedding_dropout", 0.0),
        "attention_dropout_rate": Entry("attention_dropout", 0.0),
        "mlp_dropout_rate": Entry("mlp_dropout", 0.0),
    },
    weights=lambda config: _WEIGHTS,
    fixed={"norm_bias": False, "attention_bias": False, "mlp_bias": False},
    read_more=_read_layers,
    write_more=_write_layers,
    pad_id=50283,
    first_layer=1,
    left_out=("head.", "decoder.", "classifier."),
    token_head=TokenHead(
        dense="head.dense",
        norm="head.norm",
        decoder="decoder",
        bias="decoder",
        prefix="model.",
        activation="gelu",
        activation_entry="classifier_activation",
        norm_bias=False,
        lacks_biases=True,
        written={"classifier_bias": True, "decoder_bias": True},
    ),
    score_head=ScoreHead(
        pooler="head.dense",
        activations=("gelu",),
        norm="head.norm",
        prefix="model.",
        poolings=("cls", "mean"),
        entries={"pooling": "classifier_pooling"},
        fixed={"classifier_activation": "gelu", "classifier_bias": False},
        written={"classifier_dropout": 0.0},
    ),
    heeds_tokenizer_class=False,  # folders often name a wrong class
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ModernBertConfig(BackboneConfig):
    """The sizes and settings of a ModernBERT encoder. The defaults are ModernBERT base.

    Attributes:
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      num_heads: heads of attention, each of E / num_heads dimensions.
      mlp_dim: units of the feed-forward layer.
      max_positions: maximum number of tokens per text.
      global_every: of every `global_every` blocks, the first attends to the whole text.
      local_attention: width of the window of the other blocks, in tokens: half of it on each side.
      global_rope_base: base of RoPE's angles in global attention.
      local_rope_base: base of RoPE's angles in local attention.
      layer_norm_epsilon: epsilon of every norm.
      activation: activation of the feed-forward layer; its result is multiplied by a second linear map.
      embedding_dropout_rate: dropout of embeddings.
      attention_dropout_rate: dropout of attention weights and of attention's output.
      mlp_dropout_rate: dropout of feed-forward units.
      dtype, remat, scan_layers: see `BackboneConfig`; the first block is not stacked.
    """

    kind: ClassVar[str] = "modernbert"
    embeds_unattended: ClassVar[bool] = True
    title: ClassVar[str] = "ModernBERT"
    token_table: ClassVar[str] = "token"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = (_FOLDER,)
    vocab_size: Size = 50368
    embed_dim: Size = 768
    num_layers: Layers = 22
    num_heads: Size = 12
    mlp_dim: Size = 1152
    max_positions: Size = 8192
    global_every: Count = 3
    local_attention: Size = 128
    global_rope_base: Positive = 160_000.0
    local_rope_base: Positive = 10_000.0
    layer_norm_epsilon: Positive = 1e-5
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    embedding_dropout_rate: Rate = 0.0
    attention_dropout_rate: Rate = 0.0
    mlp_dropout_rate: Rate = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    def __post_init__(self):
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"embed_dim {self.embed_dim} must be a multiple of 2 x num_heads {self.num_heads}: RoPE"
                " rotates pairs of dimensions"
            )
        if self.num_layers < 2:
            raise ValueError("num_layers must be at least 2, not 1: the first block is not part of the stack")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def reach(self) -> int:
        return self.local_attention // 2

    def make(self, *, rngs: nnx.Rngs) -> "ModernBert":
        return ModernBert(self, rngs=rngs)


PUBLISHED = {
    "answerdotai/ModernBERT-base": ModernBertConfig(),
    "answerdotai/ModernBERT-large": ModernBertConfig(
        embed_dim=1024, num_layers=28, num_heads=16, mlp_dim=2624
    ),
}
backbones.PUBLISHED.update(PUBLISHED)


class ModernBert(Encoder):
    """A ModernBERT encoder.

    Weights start from N(0, 0.02^2). Weights that write to the residual stream start from a standard deviation
    that is sqrt(2 num_layers) times smaller.
    """

    def __init__(self, config: ModernBertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token = layers.Embedding(
            config.vocab_size, config.embed_dim, axis="vocab", dtype=config.dtype, rngs=rngs
        )
        self.token_norm, self.norm = _norm(config), _norm(config)
        self.first = _block(config, first=True, rngs=rngs)
        self.layers = stacks.make_stack(
            lambda rngs: _block(config, first=False, rngs=rngs),
            config.num_layers - 1,
            scan=config.scan_layers,
            rngs=rngs,
        )

    def embed(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Returns the token vectors [B, L, E] that the first block reads."""
        longest, rate = max(batch.shape[1] for batch in ids), self.config.embedding_dropout_rate
        if longest > (limit := self.config.max_positions):
            raise ValueError(f"{longest} tokens exceed the model's {limit} positions: truncate the text")
        return [
            layers.constrain_activation(layers.dropout(self.token_norm(x), rate, key))
            for x, key in zip(self.token.together(ids), keys, strict=True)
        ]

    def together(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
    ) -> list[jax.Array]:
        config = self.config
        split = [layers.split_key(key, 3) for key in keys]
        xs = edited(self.embed(ids, [first for first, _, _ in split]), edits)
        everywhere = np.arange(config.num_layers) % config.global_every == 0
        windows = np.where(everywhere, NO_WINDOW, config.local_attention // 2).astype(np.int32)
        bases = [
            rope_frequencies(config.head_dim, base)
            for base in (config.global_rope_base, config.local_rope_base)
        ]
        frequencies = np.where(everywhere[:, None], *bases)
        args = [(batch != 0,) for batch in ids]
        for at, stack, chosen in ((1, nnx.List([self.first]), slice(1)), (2, self.layers, slice(1, None))):
            xs = stacks.run_stack(
                stack,
                xs,
                args,
                remat=config.remat,
                keys=[each[at] for each in split],
                per_layer=(windows[chosen], frequencies[chosen]),
            )
        return [layers.constrain_activation(self.norm(x)) for x in xs]


def _norm(config: ModernBertConfig) -> layers.LayerNorm:
    return layers.LayerNorm(
        config.embed_dim, epsilon=config.layer_norm_epsilon, dtype=config.dtype, use_bias=False
    )


class _Block(PreNormBlock):
    def attend(
        self,
        x: jax.Array,
        mask: jax.Array,
        window: Int[Array, ""],
        frequencies: Float[Array, " F"],
        *,
        key: jax.Array | None,
        **how: Any,
    ) -> jax.Array:
        return self.attention(x, mask, window=window, frequencies=frequencies, key=key, **how)


def _block(config: ModernBertConfig, *, first: bool, rngs: nnx.Rngs) -> _Block:
    out_stddev = 0.02 * (2 * config.num_layers) ** -0.5
    attention = Attention(
        config.embed_dim,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        stddevs=(0.02, 0.02, 0.02, out_stddev),
        dropout_rate=config.attention_dropout_rate,
        dtype=config.dtype,
        rngs=rngs,
    )
    mlp = FeedForward(
        config.embed_dim,
        config.mlp_dim,
        activation=config.activation,
        stddevs=(0.02, out_stddev),
        dropout_rate=config.mlp_dropout_rate,
        dtype=config.dtype,
        rngs=rngs,
    )
    norms = (None if first else _norm(config), _norm(config))
    return _Block(attention, mlp, norms=norms, dropout_rates=(config.attention_dropout_rate, 0.0))

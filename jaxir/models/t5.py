"""T5 encoders, versions 1.0 and 1.1 (Raffel et al. 2020).

Pre-norm blocks with RMS norms, without biases and absolute positions: all blocks share one table of relative
position biases. Attention logits are not divided by sqrt(K); the initialisation is scaled instead.

Dropout is that of T5X (t5x/examples/t5/layers.py, network.py): a feature is dropped from all positions of a
text or from none, and an attention weight for all queries or for none. This needs a random number for each
text and feature. By the TPU compiler's estimate, a number for each element would be a step's largest cost.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Buckets, Count, Layers, Positive, Rate, Size, checked
from jaxir.models import backbones, layers, stacks
from jaxir.models.attention import Attention
from jaxir.models.backbones import BackboneConfig, StackEncoder, register
from jaxir.models.blocks import FeedForward, PreNormBlock
from jaxir.models.codec import ACTIVATIONS, Changed, Entry, HuggingFace, Weights
from jaxir.models.relative_bias import RelativeBias

_BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
_WEIGHTS = {
    "token": "shared",
    "relative_bias": Changed(_BIAS, np.transpose, np.transpose),
    "layers.*.attention_norm": "encoder.block.*.layer.0.layer_norm",
    "layers.*.attention.query": "encoder.block.*.layer.0.SelfAttention.q",
    "layers.*.attention.key": "encoder.block.*.layer.0.SelfAttention.k",
    "layers.*.attention.value": "encoder.block.*.layer.0.SelfAttention.v",
    "layers.*.attention.out": "encoder.block.*.layer.0.SelfAttention.o",
    "layers.*.mlp_norm": "encoder.block.*.layer.1.layer_norm",
    "layers.*.mlp.wi_0": "encoder.block.*.layer.1.DenseReluDense.wi_0",
    "layers.*.mlp.wi_1": "encoder.block.*.layer.1.DenseReluDense.wi_1",
    "layers.*.mlp.wo": "encoder.block.*.layer.1.DenseReluDense.wo",
    "norm": "encoder.final_layer_norm",
}
_UNGATED = {"layers.*.mlp.wi_0": "encoder.block.*.layer.1.DenseReluDense.wi"}


def _weights(config: "T5Config") -> Weights:
    return _WEIGHTS if config.gated else _WEIGHTS | _UNGATED


def _read_feed_forward(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    default = "gated-gelu" if content["model_type"] == "mt5" else "relu"
    name = content.get("feed_forward_proj", default)
    gated, name = name.startswith("gated-"), name.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    # "gated-gelu" means the tanh approximation of GELU, plain "gelu" means exact GELU.
    return {"gated": gated, "activation": "gelu_tanh" if gated and name == "gelu" else ACTIVATIONS[name]}


def _write_feed_forward(config: "T5Config", pad_id: int) -> dict[str, Any]:
    name = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    if config.gated and name == "gelu":
        raise ValueError("a Hugging Face T5 cannot have a gated exact gelu: its 'gated-gelu' is gelu_tanh")
    return {"feed_forward_proj": f"gated-{name.removesuffix('_new')}" if config.gated else name}


_T5 = HuggingFace(
    model_type="t5",
    architecture="T5EncoderModel",
    entries={
        "vocab_size": "vocab_size",
        "embed_dim": "d_model",
        "num_layers": "num_layers",
        "num_heads": "num_heads",
        "head_dim": "d_kv",
        "mlp_dim": "d_ff",
        "relative_buckets": Entry("relative_attention_num_buckets", 32),
        "relative_max_distance": Entry("relative_attention_max_distance", 128),
        "layer_norm_epsilon": Entry("layer_norm_epsilon", 1e-6),
        "dropout_rate": Entry("dropout_rate", 0.1),
    },
    weights=_weights,
    written={"is_encoder_decoder": False, "use_cache": False, "eos_token_id": 1},
    read_more=_read_feed_forward,
    write_more=_write_feed_forward,
    # Other names of the table of token vectors. (In T5 1.1 lm_head has its own table.)
    aliases={"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")},
    left_out=("decoder.", "encoder.embed_tokens.", "lm_head", "classifier."),
    begins=False,
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class T5Config(BackboneConfig):
    """The sizes and settings of a T5 encoder. The defaults are T5 1.1 base.

    Attributes:
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      num_heads: heads of attention.
      head_dim: dimensions of each head; num_heads * head_dim need not be E.
      mlp_dim: units of the feed-forward layer.
      activation: activation of the feed-forward layer: "relu" in T5 1.0, "gelu_tanh" in T5 1.1.
      gated: whether a second linear map multiplies the activation (T5 1.1).
      relative_buckets: number of relative position buckets, half of them for each direction.
      relative_max_distance: all distances of at least this many tokens share the last bucket.
      layer_norm_epsilon: epsilon of every norm.
      dropout_rate: dropout of embeddings, attention weights, feed-forward units, sublayers' outputs and the
        encoder's output; all positions of a text share a mask.
      dtype, remat, scan_layers: see `BackboneConfig`.
    """

    kind: ClassVar[str] = "t5"
    embeds_unattended: ClassVar[bool] = True
    title: ClassVar[str] = "T5 encoder"
    token_table: ClassVar[str] = "token"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = (_T5, dataclasses.replace(_T5, model_type="mt5"))
    vocab_size: Size = 32128
    embed_dim: Size = 768
    num_layers: Layers = 12
    num_heads: Size = 12
    head_dim: Size = 64
    mlp_dim: Size = 2048
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu_tanh"
    gated: bool = True
    relative_buckets: Buckets = 32
    relative_max_distance: Count = 128
    layer_norm_epsilon: Positive = 1e-6
    dropout_rate: Rate = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    def make(self, *, rngs: nnx.Rngs) -> "T5Encoder":
        return T5Encoder(self, rngs=rngs)


_SIZES = ("embed_dim", "num_heads", "head_dim", "mlp_dim", "num_layers")
_PRESETS = {
    "1.0-small": (512, 8, 64, 2048, 6),
    "1.0-base": (768, 12, 64, 3072, 12),
    "1.0-large": (1024, 16, 64, 4096, 24),
    "1.0-3b": (1024, 32, 128, 16384, 24),
    "1.0-11b": (1024, 128, 128, 65536, 24),
    "1.1-small": (512, 6, 64, 1024, 8),
    "1.1-base": (768, 12, 64, 2048, 12),
    "1.1-large": (1024, 16, 64, 2816, 24),
    "1.1-xl": (2048, 32, 64, 5120, 24),
    "1.1-xxl": (4096, 64, 64, 10240, 24),
}


def preset(
    name: str,
    *,
    dropout_rate: Rate = 0.1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: layers.Remat = False,
    scan_layers: bool = False,
) -> T5Config:
    """Returns the config of a published T5 encoder.

    Args:
      name: "1.0-" followed by small, base, large, 3b or 11b; or "1.1-" by small, base, large, xl or xxl.
      dropout_rate: see `T5Config`.
      dtype: type of matrix products.
      remat: what the backward pass recomputes of blocks.
      scan_layers: whether to scan over the blocks.
    """
    if name not in _PRESETS:
        raise UserError(f"no T5 preset {name!r}{suggest(name, _PRESETS)}; give one of {', '.join(_PRESETS)}")
    gated = name.startswith("1.1")
    return T5Config(
        **dict(zip(_SIZES, _PRESETS[name], strict=True)),
        gated=gated,
        activation="gelu_tanh" if gated else "relu",
        dropout_rate=dropout_rate,
        dtype=dtype,
        remat=remat,
        scan_layers=scan_layers,
    )


backbones.PUBLISHED.update(
    {f"google/t5-v1_1-{size}": preset(f"1.1-{size}") for size in ("small", "base", "large", "xl", "xxl")}
    | {
        f"{owner}t5-{size}": preset(f"1.0-{size}")
        for owner in ("", "google-t5/")
        for size in ("small", "base", "large", "3b", "11b")
    }
)


class T5Encoder(StackEncoder):
    """A T5 encoder; its initial weights are distributed as in T5's reference implementation."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.token = layers.Embedding(
            config.vocab_size,
            config.embed_dim,
            axis="vocab",
            dtype=config.dtype,
            init=layers.normal(1.0),
            rngs=rngs,
        )
        self.relative_bias = bias_of(config, rngs=rngs)
        self.layers = stacks.make_stack(
            lambda rngs: _block(config, rngs=rngs), config.num_layers, scan=config.scan_layers, rngs=rngs
        )
        self.norm = norm_of(config)

    def embed(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        return self._dropped(self.token.together(ids), keys)

    def block_args(self, ids: Sequence[jax.Array], xs: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return [(batch != 0, self.relative_bias(batch.shape[1])) for batch in ids]

    def finish(self, xs: list[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        return self._dropped(map(self.norm, xs), keys)

    def _dropped(self, xs: Iterable[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        rate = self.config.dropout_rate
        return [layers.constrain_activation(dropout(x, rate, k)) for x, k in zip(xs, keys, strict=True)]


def bias_of(config: T5Config, *, bidirectional: bool = True, rngs: nnx.Rngs) -> RelativeBias:
    """Makes the table of biases that all blocks share."""
    return RelativeBias(
        config.num_heads,
        num_buckets=config.relative_buckets,
        max_distance=config.relative_max_distance,
        bidirectional=bidirectional,
        stddev=config.embed_dim**-0.5,
        rngs=rngs,
    )


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """T5X's dropout: drops features of x [B, L, E], each from all positions of a text or from none."""
    return layers.dropout(x, rate, key, same_along=1)


def norm_of(config: T5Config) -> layers.RMSNorm:
    return layers.RMSNorm(config.embed_dim, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


def mlp_of(config: T5Config, *, rngs: nnx.Rngs) -> FeedForward:
    return FeedForward(
        config.embed_dim,
        config.mlp_dim,
        activation=config.activation,
        gated=config.gated,
        stddevs=(config.embed_dim**-0.5, config.mlp_dim**-0.5),
        dropout_rate=config.dropout_rate,
        same_along=1,
        dtype=config.dtype,
        rngs=rngs,
    )


def attention_of(config: T5Config, *, rngs: nnx.Rngs) -> Attention:
    """Makes attention to the text itself, or to a memory of the same width."""
    width, head_dim = config.embed_dim, config.head_dim
    out = (config.num_heads * head_dim) ** -0.5
    return Attention(
        width,
        num_heads=config.num_heads,
        head_dim=head_dim,
        scale=1.0,
        stddevs=((width * head_dim) ** -0.5, width**-0.5, width**-0.5, out),
        dropout_rate=config.dropout_rate,
        drop_for_all=True,
        dtype=config.dtype,
        rngs=rngs,
    )


class _Block(PreNormBlock):
    def attend(
        self,
        x: jax.Array,
        mask: jax.Array,
        bias: Float[Array, "1 H L L"],
        *,
        key: jax.Array | None,
        **how: Any,
    ) -> jax.Array:
        return self.attention(x, mask, bias=bias, key=key, **how)


def _block(config: T5Config, *, rngs: nnx.Rngs) -> _Block:
    attention, mlp = attention_of(config, rngs=rngs), mlp_of(config, rngs=rngs)
    norms, rates = (norm_of(config), norm_of(config)), (config.dropout_rate, config.dropout_rate)
    return _Block(attention, mlp, norms=norms, dropout_rates=rates, same_along=1)

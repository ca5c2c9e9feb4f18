"""Gemma 3 and EmbeddingGemma as encoders.

Gemma Team 2025, arXiv:2503.19786; Schechter Vera et al. 2025, arXiv:2509.20354. Blocks are Llama's with norms
before and after attention and the feed-forward layer. Norms multiply by 1 + scale, token vectors by sqrt(E).
Most layers see a window, the others the whole text, each kind with its own RoPE.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.values import Layers, Natural, Positive, Rate, Size, checked
from jaxir.models import backbones, layers
from jaxir.models.attention import Attention
from jaxir.models.backbones import BackboneConfig, register
from jaxir.models.blocks import FeedForward
from jaxir.models.codec import ACTIVATIONS, Entry, HuggingFace
from jaxir.models.rotary import (
    FULL,
    SLIDING,
    RotaryBlock,
    RotaryStack,
    check_heads,
    read_bases,
    read_heads,
    width_of,
    windows_of,
    write_layers,
)

WEIGHTS = {
    "token": "embed_tokens",
    "layers.*.attention_norm": "layers.*.input_layernorm",
    "layers.*.attention.query": "layers.*.self_attn.q_proj",
    "layers.*.attention.key": "layers.*.self_attn.k_proj",
    "layers.*.attention.value": "layers.*.self_attn.v_proj",
    "layers.*.attention.out": "layers.*.self_attn.o_proj",
    "layers.*.attention.query_norm": "layers.*.self_attn.q_norm",
    "layers.*.attention.key_norm": "layers.*.self_attn.k_norm",
    "layers.*.attention_output_norm": "layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "layers.*.pre_feedforward_layernorm",
    "layers.*.mlp.wi_0": "layers.*.mlp.gate_proj",
    "layers.*.mlp.wi_1": "layers.*.mlp.up_proj",
    "layers.*.mlp.wo": "layers.*.mlp.down_proj",
    "layers.*.mlp_output_norm": "layers.*.post_feedforward_layernorm",
    "norm": "norm",
}


def _read(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    num, every = content["num_hidden_layers"], content.get("sliding_window_pattern", 6)
    types = content.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(num)]
    both_sides = bool(content.get("use_bidirectional_attention"))
    width = content.get("sliding_window", 4096)
    distance = width // 2 if both_sides else width - 1
    older = {} if content.get("rope_parameters") else content
    bases = read_bases(
        content,
        full=content.get("rope_theta") or 1_000_000.0,
        local=older.get("rope_local_base_freq") or 10_000.0,
    )
    return (
        read_heads({"head_dim": 256} | dict(content))
        | bases
        | {
            "causal": not both_sides,
            "windows": windows_of(types, num, distance),
            "attention_scale_from": float(content.get("query_pre_attn_scalar", 256)),
        }
    )


def _write(config: "GemmaConfig", pad_id: int) -> dict[str, Any]:
    distance = width_of(config, default=4095 if config.causal else 2048)
    return write_layers(config) | {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "use_bidirectional_attention": not config.causal,
        "sliding_window": distance + 1 if config.causal else 2 * distance,
        "query_pre_attn_scalar": _whole(config.attention_scale_from),
    }


def _whole(x: float) -> int | float:
    return int(x) if x == int(x) else x


_FOLDER = HuggingFace(
    model_type="gemma3_text",
    architecture="Gemma3TextModel",
    entries={
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "layer_norm_epsilon": Entry("rms_norm_eps", 1e-6),
        "activation": Entry("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        "attention_dropout_rate": Entry("attention_dropout", 0.0),
    },
    weights=lambda config: WEIGHTS,
    fixed={"attention_bias": False, "attn_logit_softcapping": None},
    read_more=_read,
    write_more=_write,
    left_out=("lm_head.",),
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class GemmaConfig(BackboneConfig):
    """The sizes and settings of a Gemma 3 encoder. The defaults are EmbeddingGemma 300M.

    Attributes:
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      num_heads: heads of queries.
      num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads heads of queries.
      head_dim: dimensions of a head.
      mlp_dim: units of the feed-forward layer.
      max_positions: maximum number of tokens per text.
      causal: whether a token sees only the tokens before it.
      windows: for each layer the largest distance at which a token sees another; `attention.NO_WINDOW` for
        layers without a window. Empty: no layer has a window.
      attention_scale_from: s; attention's logits are multiplied by s^-1/2.
      rope_base: base of RoPE's angles in layers without a window.
      local_rope_base: base of RoPE's angles in layers with a window.
      layer_norm_epsilon: epsilon of every norm.
      activation: activation of the feed-forward layer; its result is multiplied by a second linear map.
      attention_dropout_rate: dropout of attention weights.
      dtype, remat, scan_layers: see `BackboneConfig`.
    """

    kind: ClassVar[str] = "gemma"
    embeds_unattended: ClassVar[bool] = True
    title: ClassVar[str] = "Gemma 3"
    token_table: ClassVar[str] = "token"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = (_FOLDER,)
    vocab_size: Size = 262_144
    embed_dim: Size = 768
    num_layers: Layers = 24
    num_heads: Size = 3
    num_kv_heads: Size = 1
    head_dim: Size = 256
    mlp_dim: Size = 1152
    max_positions: Size = 2048
    causal: bool = False
    windows: tuple[Natural, ...] = windows_of([SLIDING if (i + 1) % 6 else FULL for i in range(24)], 24, 256)
    attention_scale_from: Positive = 256.0
    rope_base: Positive = 1_000_000.0
    local_rope_base: Positive = 10_000.0
    layer_norm_epsilon: Positive = 1e-6
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu_tanh"
    attention_dropout_rate: Rate = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    def __post_init__(self):
        check_heads(self)

    def make(self, *, rngs: nnx.Rngs) -> "Gemma":
        return Gemma(self, rngs=rngs)


backbones.PUBLISHED["google/embeddinggemma-300m"] = GemmaConfig()


class ScaledStack(RotaryStack):
    """A stack whose token vectors are multiplied by sqrt(E), rounded to their type as transformers does."""

    def embed(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        return [x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype) for x in super().embed(ids, keys)]


class Gemma(ScaledStack):
    """A Gemma 3 encoder; weights start from N(0, 0.02^2)."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config, lambda rngs: _block(config, rngs=rngs), _norm(config, config.embed_dim), rngs=rngs
        )


def _norm(config: GemmaConfig, size: int, axis: str | None = "embed") -> layers.RMSNorm:
    how = {"epsilon": config.layer_norm_epsilon, "dtype": config.dtype}
    return layers.RMSNorm(size, axis=axis, from_zero=True, **how)


def _block(config: GemmaConfig, *, rngs: nnx.Rngs) -> RotaryBlock:
    attention = Attention(
        config.embed_dim,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        head_norms=(_norm(config, config.head_dim, "kv"), _norm(config, config.head_dim, "kv"), None),
        scale=config.attention_scale_from**-0.5,
        stddevs=(0.02,) * 4,
        dropout_rate=config.attention_dropout_rate,
        dtype=config.dtype,
        rngs=rngs,
    )
    mlp = FeedForward(
        config.embed_dim,
        config.mlp_dim,
        activation=config.activation,
        stddevs=(0.02, 0.02),
        dtype=config.dtype,
        rngs=rngs,
    )
    norms = [_norm(config, config.embed_dim) for _ in range(4)]
    block = RotaryBlock(
        attention,
        mlp,
        norms=(norms[0], norms[1]),
        output_norms=(norms[2], norms[3]),
        dropout_rates=(0.0, 0.0),
    )
    block.causal, block.has_windows = config.causal, bool(config.windows)
    return block

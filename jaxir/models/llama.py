"""Llama and its relatives as encoders: Llama, Mistral, Qwen2, Qwen3, EuroBERT and UltraBERT.

Pre-norm blocks with RMSNorm, RoPE, grouped heads and gated feed-forward layers (Touvron et al. 2023,
arXiv:2307.09288; Jiang et al. 2023, arXiv:2310.06825; Yang et al. 2025, arXiv:2505.09388; Boizard et al.
2025, arXiv:2503.05500). The families differ in biases, in norms of queries and keys, in windows, and in
whether a position sees later ones. The head that predicts tokens is left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from flax import nnx

from jaxir.core.values import Layers, Natural, Positive, Rate, Size, checked
from jaxir.models import backbones, layers
from jaxir.models.attention import Attention
from jaxir.models.backbones import BackboneConfig, register
from jaxir.models.blocks import FeedForward
from jaxir.models.codec import ACTIVATIONS, Entry, HuggingFace, TokenHead
from jaxir.models.rotary import (
    FULL,
    SLIDING,
    RotaryBlock,
    RotaryStack,
    check_heads,
    layer_types,
    read_bases,
    read_heads,
    rope_of,
    width_of,
    windows_of,
    write_layers,
)

_WEIGHTS = {
    "token": "embed_tokens",
    "layers.*.attention_norm": "layers.*.input_layernorm",
    "layers.*.attention.query": "layers.*.self_attn.q_proj",
    "layers.*.attention.key": "layers.*.self_attn.k_proj",
    "layers.*.attention.value": "layers.*.self_attn.v_proj",
    "layers.*.attention.out": "layers.*.self_attn.o_proj",
    "layers.*.attention.query_norm": "layers.*.self_attn.q_norm",
    "layers.*.attention.key_norm": "layers.*.self_attn.k_norm",
    "layers.*.mlp_norm": "layers.*.post_attention_layernorm",
    "layers.*.mlp.wi_0": "layers.*.mlp.gate_proj",
    "layers.*.mlp.wi_1": "layers.*.mlp.up_proj",
    "layers.*.mlp.wo": "layers.*.mlp.down_proj",
    "norm": "norm",
}
_ENTRIES = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "layer_norm_epsilon": Entry("rms_norm_eps", 1e-6),
    "activation": Entry("hidden_act", "silu", ACTIVATIONS),
    "attention_dropout_rate": Entry("attention_dropout", 0.0),
}
_BIASES = {"out_bias": Entry("attention_bias", False), "mlp_bias": Entry("mlp_bias", False)}
_CAUSAL = {"causal": Entry("is_causal", True)}
# Fields of the configuration -> entries of RoPE's parameters of the type "llama3".
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_factor": "low_freq_factor",
    "rope_high_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
}


def _read(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    rope = rope_of(content, None, 10_000.0)
    fields: dict[str, Any] = read_heads(content) | {"rope_base": float(rope["rope_theta"])}
    if rope["rope_type"] == "llama3":
        fields |= {ours: rope[theirs] for ours, theirs in _LLAMA3.items()}
        for name in ("rope_factor", "rope_low_factor", "rope_high_factor"):
            fields[name] = float(fields[name])
    return fields


def _write(config: "LlamaConfig", pad_id: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_factor != 1.0:
        rope |= {"rope_type": "llama3"} | {theirs: getattr(config, ours) for ours, theirs in _LLAMA3.items()}
    return {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_parameters": rope,
    }


def _read_llama(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    return _read(content, pad_id) | {"qkv_bias": content.get("attention_bias", False)}


def _write_llama(config: "LlamaConfig", pad_id: int) -> dict[str, Any]:
    if config.qkv_bias != config.out_bias:
        raise ValueError(
            f"{config.model_type} needs equal qkv_bias and out_bias, not {config.qkv_bias} and"
            f" {config.out_bias}; use another format"
        )
    return _write(config, pad_id)


def _read_mistral(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    window = content.get("sliding_window", 4096)
    return _read(content, pad_id) | {"windows": _windows(content, lambda i: window is not None, window)}


def _write_mistral(config: "LlamaConfig", pad_id: int) -> dict[str, Any]:
    if len(set(config.windows)) > 1:
        raise ValueError("mistral needs the same window in every layer; use another format")
    return _write(config, pad_id) | {"sliding_window": config.windows[0] + 1 if config.windows else None}


def _read_qwen(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    window = content.get("sliding_window", 4096) if content.get("use_sliding_window") else None
    first = content.get("max_window_layers", 28)
    return _read(content, pad_id) | {
        "windows": _windows(content, lambda i: window is not None and i >= first, window)
    }


def _read_qwen3(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    biases = {"qkv_bias": content.get("attention_bias", False)}
    return _read_qwen({"head_dim": 128} | dict(content), pad_id) | biases


def _windows(content: Mapping[str, Any], is_local: Any, width: int | None) -> tuple[int, ...]:
    """Returns the windows of a causal model, in which a position sees `width` positions, itself included."""
    num = content["num_hidden_layers"]
    types = content.get("layer_types") or [SLIDING if is_local(i) else FULL for i in range(num)]
    return windows_of(types, num, width and width - 1)


def _write_qwen(config: "LlamaConfig", pad_id: int) -> dict[str, Any]:
    types = layer_types(config.windows, config.num_layers)
    width = width_of(config, default=4095) + 1
    window = {"use_sliding_window": SLIDING in types, "sliding_window": width}
    return _write(config, pad_id) | window | {"layer_types": types, "max_window_layers": config.num_layers}


def _read_ultrabert(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    num, width = content["num_hidden_layers"], content.get("sliding_window", 128)
    types = content.get("layer_types")
    if (older := content.get("attention_windows")) is not None:
        width = next((window for window in older if window), width)
        types = types or [SLIDING if window else FULL for window in older]
    types = types or [SLIDING if (i + 1) % 3 else FULL for i in range(num)]
    bases = {FULL: 2_560_000.0, SLIDING: 10_000.0}
    if isinstance(content.get("rope_theta"), list) and not content.get("rope_parameters"):
        bases |= dict(zip(types, content["rope_theta"], strict=True))
    more = {"qkv_bias": content.get("attention_bias", False), "windows": windows_of(types, num, width)}
    return read_heads(content) | more | read_bases(content, full=bases[FULL], local=bases[SLIDING])


def _write_ultrabert(config: "LlamaConfig", pad_id: int) -> dict[str, Any]:
    if config.rope_factor != 1.0:
        raise ValueError("ultrabert cannot have RoPE scaling; use another format")
    window = {"sliding_window": width_of(config, default=128)}
    return _write_llama(config, pad_id) | window | write_layers(config)


def _folder(model_type: str, architecture: str, **more: Any) -> HuggingFace:
    more["entries"] = _ENTRIES | more.get("entries", {})
    more["implied"] = {"model_type": model_type} | more.get("implied", {})
    return HuggingFace(
        model_type=model_type,
        architecture=architecture,
        weights=lambda config: _WEIGHTS,
        left_out=("lm_head.", "score.", "dense.", "classifier.", "head.", "rotary_emb."),
        begins=False,
        **{"read_more": _read, "write_more": _write} | more,
    )


_NO_BIASES = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_NO_LOCAL = {"local_rope_base": None}
# The logits are products of token vectors and the encoder's output: no dense layer or norm comes between.
_LM_HEAD = TokenHead(
    dense=None, norm=None, decoder="lm_head", bias="lm_head", prefix="model.", lacks_biases=True, tied=False
)
_FOLDERS = (
    _folder(
        "llama",
        "LlamaModel",
        entries=_BIASES | _CAUSAL,
        implied={"query_key_norm": False, "windows": ()} | _NO_LOCAL,
        read_more=_read_llama,
        write_more=_write_llama,
    ),
    _folder(
        "mistral",
        "MistralModel",
        entries=_CAUSAL,
        implied={"query_key_norm": False} | _NO_BIASES | _NO_LOCAL,
        read_more=_read_mistral,
        write_more=_write_mistral,
    ),
    _folder(
        "qwen2",
        "Qwen2Model",
        entries=_CAUSAL,
        implied={"query_key_norm": False} | _NO_BIASES | {"qkv_bias": True} | _NO_LOCAL,
        read_more=_read_qwen,
        write_more=_write_qwen,
    ),
    _folder(
        "qwen3",
        "Qwen3Model",
        entries={"out_bias": Entry("attention_bias", False)} | _CAUSAL,
        implied={"query_key_norm": True, "mlp_bias": False} | _NO_LOCAL,
        read_more=_read_qwen3,
        write_more=lambda config, pad_id: _write_llama(config, pad_id) | _write_qwen(config, pad_id),
    ),
    _folder(
        "eurobert",
        "EuroBertModel",
        entries=_BIASES | {"layer_norm_epsilon": Entry("rms_norm_eps", 1e-5)},
        implied={"query_key_norm": False, "windows": (), "causal": False} | _NO_LOCAL,
        read_more=_read_llama,
        write_more=_write_llama,
        token_head=_LM_HEAD,
    ),
    _folder(
        "ultrabert",
        "UltrabertModel",
        entries=_BIASES,
        implied={"query_key_norm": False, "causal": False},
        read_more=_read_ultrabert,
        write_more=_write_ultrabert,
    ),
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LlamaConfig(BackboneConfig):
    """The sizes and settings of an encoder with Llama's blocks. The defaults are Qwen3 0.6B.

    Attributes:
      model_type: the family, whose folders Hugging Face's transformers reads.
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
      query_key_norm: whether the heads of queries and keys are normalised.
      qkv_bias: whether the projections of queries, keys and values have biases.
      out_bias: whether the projection of attention's output has a bias.
      mlp_bias: whether the feed-forward layer has biases.
      rope_base: base of RoPE's angles.
      local_rope_base: base of RoPE's angles in layers with a window; None: `rope_base`.
      rope_factor: factor by which Llama 3 slows down RoPE's slow angles; 1: none.
      rope_low_factor: angles that turn less than this many times in `rope_original_positions` are slowed
        down.
      rope_high_factor: angles that turn more than this many times keep their speed.
      rope_original_positions: positions of the first pretraining.
      layer_norm_epsilon: epsilon of every norm.
      activation: activation of the feed-forward layer; its result is multiplied by a second linear map.
      attention_dropout_rate: dropout of attention weights.
      dtype, remat, scan_layers: see `BackboneConfig`.
    """

    kind: ClassVar[str] = "llama"
    embeds_unattended: ClassVar[bool] = True
    token_table: ClassVar[str] = "token"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = _FOLDERS
    model_type: Literal["llama", "mistral", "qwen2", "qwen3", "eurobert", "ultrabert"] = "qwen3"
    vocab_size: Size = 151_669
    embed_dim: Size = 1024
    num_layers: Layers = 28
    num_heads: Size = 16
    num_kv_heads: Size = 8
    head_dim: Size = 128
    mlp_dim: Size = 3072
    max_positions: Size = 32_768
    causal: bool = True
    windows: tuple[Natural, ...] = ()
    query_key_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_base: Positive = 1_000_000.0
    local_rope_base: Positive | None = None
    rope_factor: Positive = 1.0
    rope_low_factor: Positive = 1.0
    rope_high_factor: Positive = 4.0
    rope_original_positions: Size = 8192
    layer_norm_epsilon: Positive = 1e-6
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "silu"
    attention_dropout_rate: Rate = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    def __post_init__(self):
        check_heads(self)

    @property
    def title(self) -> str:
        return self.model_type.title().replace("bert", "BERT")

    def make(self, *, rngs: nnx.Rngs) -> "Llama":
        return Llama(self, rngs=rngs)


_SIZES = {
    "0.6B": {},
    "4B": {"embed_dim": 2560, "num_layers": 36, "num_heads": 32, "mlp_dim": 9728},
    "8B": {"embed_dim": 4096, "num_layers": 36, "num_heads": 32, "mlp_dim": 12_288},
}
backbones.PUBLISHED.update(
    {f"Qwen/Qwen3-Embedding-{name}": LlamaConfig(**sizes) for name, sizes in _SIZES.items()}
    | {
        "intfloat/e5-mistral-7b-instruct": LlamaConfig(
            model_type="mistral",
            vocab_size=32_000,
            embed_dim=4096,
            num_layers=32,
            num_heads=32,
            mlp_dim=14_336,
            query_key_norm=False,
            windows=(4095,) * 32,
            rope_base=10_000.0,
            layer_norm_epsilon=1e-5,
        )
    }
)


class Llama(RotaryStack):
    """An encoder with Llama's blocks; weights start from N(0, 0.02^2)."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config, lambda rngs: _block(config, rngs=rngs), _norm(config, config.embed_dim), rngs=rngs
        )

    def global_frequencies(self) -> np.ndarray:
        return _slowed(super().global_frequencies(), self.config)


def _slowed(frequencies: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """Returns Llama 3's frequencies: low ones are divided by a factor, with a smooth transition."""
    if config.rope_factor == 1.0:
        return frequencies
    low, high = config.rope_low_factor, config.rope_high_factor
    turns = config.rope_original_positions * frequencies.astype(np.float64) / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequencies * (kept + (1 - kept) / config.rope_factor)).astype(np.float32)


def _norm(config: LlamaConfig, size: int, axis: str | None = "embed") -> layers.RMSNorm:
    return layers.RMSNorm(size, epsilon=config.layer_norm_epsilon, dtype=config.dtype, axis=axis)


def _block(config: LlamaConfig, *, rngs: nnx.Rngs) -> RotaryBlock:
    head_norms = [_norm(config, config.head_dim, "kv") if config.query_key_norm else None for _ in range(2)]
    attention = Attention(
        config.embed_dim,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        use_bias=config.qkv_bias,
        out_bias=config.out_bias,
        head_norms=(*head_norms, None),
        stddevs=(0.02,) * 4,
        dropout_rate=config.attention_dropout_rate,
        dtype=config.dtype,
        rngs=rngs,
    )
    mlp = FeedForward(
        config.embed_dim,
        config.mlp_dim,
        activation=config.activation,
        biases=(config.mlp_bias,) * 2,
        stddevs=(0.02, 0.02),
        dtype=config.dtype,
        rngs=rngs,
    )
    norms = (_norm(config, config.embed_dim), _norm(config, config.embed_dim))
    block = RotaryBlock(attention, mlp, norms=norms, dropout_rates=(0.0, 0.0))
    block.causal, block.has_windows = config.causal, bool(config.windows)
    return block

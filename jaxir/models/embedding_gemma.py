"""EmbeddingGemma 2's text encoder, as transformers 5.24 defines it (`EmbeddingGemma2TextModel`).

Blocks are Gemma's with three differences. Layers that see the whole text have heads of another size and
number than those with a window. Values are normalised too. After the feed-forward layer, a third part adds
W_o (f(W_g x) * norm(W_i x_0 / sqrt(E))), where x_0 are the token vectors that the first block reads. A linear
map after the last norm gives the output another width than the blocks.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Layers, Natural, Positive, Rate, Size, checked
from jaxir.models import backbones, fused_dense, layers, outlines
from jaxir.models.activations import ACTIVATIONS as FUNCTIONS
from jaxir.models.attention import NO_WINDOW, Attention, rope_frequencies
from jaxir.models.backbones import BackboneConfig, register
from jaxir.models.blocks import FeedForward, PreNormBlock
from jaxir.models.codec import ACTIVATIONS, Entry, HuggingFace, Weights
from jaxir.models.gemma import WEIGHTS as GEMMA_WEIGHTS
from jaxir.models.gemma import ScaledStack
from jaxir.models.layers import over_rms
from jaxir.models.rotary import (
    FULL,
    SLIDING,
    check_heads,
    layer_types,
    read_bases,
    width_of,
    windows_of,
    write_layers,
)
from jaxir.runtime.partitioning import constrain

_WEIGHTS = GEMMA_WEIGHTS | {
    "layers.*.gate": "layers.*.ple_block.per_layer_input_gate",
    "layers.*.gate_out": "layers.*.ple_block.per_layer_projection",
    "layers.*.gate_norm": "layers.*.ple_block.post_per_layer_input_norm",
    "layers.*.scale": "layers.*.layer_scalar",
    "input_norm": "ple.per_layer_projection_norm",
    "projection": "embedding_projection",
}


def _weights(config: "EmbeddingGemmaConfig") -> Weights:
    inputs = tuple(f"layers.{i}.gate_input" for i in range(config.num_layers))
    return {**_WEIGHTS, inputs: "ple.per_layer_model_projection"}


def _read(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    num, every = content["num_hidden_layers"], content.get("sliding_window_pattern", 6)
    kinds = list(content.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(num)])
    kinds[-1:] = [FULL]  # the last layer is global, as in transformers
    default = {
        "head_dim": content.get("global_head_dim", 512),
        "num_key_value_heads": content.get("num_global_key_value_heads", 1),
    }
    wide = [str(i) for i, kind in enumerate(kinds) if kind == FULL]
    sizes = content.get("per_layer_config") or dict.fromkeys(wide, default)
    if sorted(sizes) != sorted(wide) or any(sizes[i] != sizes[wide[0]] for i in wide):
        raise ValueError(f"per_layer_config must have the same sizes for each layer of {FULL}, and no others")
    return read_bases(content, full=1_000_000.0, local=10_000.0) | {
        "windows": windows_of(kinds, num, content.get("sliding_window", 512)),
        "global_head_dim": sizes[wide[0]]["head_dim"],
        "global_num_kv_heads": sizes[wide[0]]["num_key_value_heads"],
    }


def _write(config: "EmbeddingGemmaConfig", pad_id: int) -> dict[str, Any]:
    kinds = layer_types(config.windows, config.num_layers)
    if kinds[-1] != FULL:
        raise ValueError("embedding_gemma2_text cannot have a window in its last layer; use another format")
    sizes = {"head_dim": config.global_head_dim, "num_key_value_heads": config.global_num_kv_heads}
    return write_layers(config) | {
        "sliding_window": width_of(config, default=512),
        "per_layer_config": {str(i): sizes for i, kind in enumerate(kinds) if kind == FULL},
    }


_TEXT = HuggingFace(
    model_type="embedding_gemma2_text",
    architecture="EmbeddingGemma2TextModel",
    entries={
        "vocab_size": Entry("vocab_size", 262_144),
        "embed_dim": Entry("hidden_size", 512),
        "output_dim": Entry("embedding_dim", 768),
        "num_layers": Entry("num_hidden_layers", 24),
        "num_heads": Entry("num_attention_heads", 4),
        "num_kv_heads": Entry("num_key_value_heads", 2),
        "head_dim": Entry("head_dim", 256),
        "mlp_dim": Entry("intermediate_size", 2048),
        "gate_dim": Entry("hidden_size_per_layer_input", 512),
        "max_positions": Entry("max_position_embeddings", 262_144),
        "layer_norm_epsilon": Entry("rms_norm_eps", 1e-6),
        "activation": Entry("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        "attention_dropout_rate": Entry("attention_dropout", 0.0),
    },
    weights=_weights,
    fixed={"attention_bias": False},
    read_more=_read,
    write_more=_write,
)
_WHOLE = dataclasses.replace(
    _TEXT, model_type="embedding_gemma2", architecture="EmbeddingGemma2Model", text_entry="text_config"
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EmbeddingGemmaConfig(BackboneConfig):
    """The sizes and settings of EmbeddingGemma 2's text encoder. The defaults are the published
    ones.

    Attributes:
      vocab_size: rows of the token table.
      embed_dim: E, the width of the blocks.
      output_dim: the width of the output.
      num_layers: number of blocks.
      num_heads: heads of queries.
      num_kv_heads: heads of keys and values in layers with a window.
      head_dim: dimensions of a head in layers with a window.
      global_num_kv_heads: heads of keys and values in layers without a window.
      global_head_dim: dimensions of a head in layers without a window.
      mlp_dim: units of the feed-forward layer.
      gate_dim: units of the third part of a block.
      max_positions: maximum number of tokens per text.
      windows: for each layer the largest distance at which a token sees another; `attention.NO_WINDOW` for
        layers without a window. Empty: no layer has a window.
      rope_base: base of RoPE's angles in layers without a window.
      local_rope_base: base of RoPE's angles in layers with a window.
      layer_norm_epsilon: epsilon of every norm.
      activation: activation of the feed-forward layer and of the third part.
      attention_dropout_rate: dropout of attention weights.
      dtype, remat, scan_layers: see `BackboneConfig`.
    """

    kind: ClassVar[str] = "embedding_gemma"
    title: ClassVar[str] = "EmbeddingGemma 2"
    token_table: ClassVar[str] = "token"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = (_TEXT, _WHOLE)
    vocab_size: Size = 262_144
    embed_dim: Size = 512
    output_dim: Size = 768
    num_layers: Layers = 24
    num_heads: Size = 4
    num_kv_heads: Size = 2
    head_dim: Size = 256
    global_num_kv_heads: Size = 1
    global_head_dim: Size = 512
    mlp_dim: Size = 2048
    gate_dim: Size = 512
    max_positions: Size = 262_144
    windows: tuple[Natural, ...] = windows_of([SLIDING if (i + 1) % 6 else FULL for i in range(24)], 24, 512)
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
        wide = {"num_kv_heads": self.global_num_kv_heads, "head_dim": self.global_head_dim}
        check_heads(types.SimpleNamespace(**vars(self) | wide))

    def make(self, *, rngs: nnx.Rngs) -> "EmbeddingGemma":
        return EmbeddingGemma(self, rngs=rngs)


backbones.PUBLISHED["google/embeddinggemma-2"] = EmbeddingGemmaConfig()


class EmbeddingGemma(ScaledStack):
    """EmbeddingGemma 2's text encoder; weights start from N(0, 0.02^2)."""

    def __init__(self, config: EmbeddingGemmaConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config,
            lambda window, rngs: _Block(config, window, rngs=rngs),
            _norm(config, config.embed_dim),
            rngs=rngs,
            kinds=config.windows or (NO_WINDOW,) * config.num_layers,
        )
        self.input_norm = _norm(config, config.gate_dim, None)
        self.projection = layers.Linear(
            config.embed_dim,
            config.output_dim,
            axes=("embed", "affinity"),
            use_bias=False,
            dtype=config.dtype,
            rngs=rngs,
        )

    def block_args(self, ids: Sequence[jax.Array], xs: Sequence[jax.Array]) -> list[tuple[Any, ...]]:
        scale = layers.weight(self.input_norm.scale)
        return [(batch != 0, x, scale) for batch, x in zip(ids, xs, strict=True)]

    def per_layer(self) -> Sequence[Any]:
        return ()

    def finish(self, xs: list[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        return [layers.constrain_activation(self.projection(x)) for x in super().finish(xs, keys)]


def _norm(config: EmbeddingGemmaConfig, size: int, axis: str | None = "embed", **how: Any) -> layers.RMSNorm:
    return layers.RMSNorm(size, epsilon=config.layer_norm_epsilon, dtype=config.dtype, axis=axis, **how)


class _Block(PreNormBlock):
    """One block; `window` is `NO_WINDOW` in layers that see the whole text."""

    def __init__(self, config: EmbeddingGemmaConfig, window: int, *, rngs: nnx.Rngs):
        is_global = window == NO_WINDOW
        head_dim = config.global_head_dim if is_global else config.head_dim
        width, how = config.embed_dim, {"dtype": config.dtype, "rngs": rngs}
        attention = Attention(
            width,
            num_heads=config.num_heads,
            head_dim=head_dim,
            num_kv_heads=config.global_num_kv_heads if is_global else config.num_kv_heads,
            head_norms=(
                _norm(config, head_dim, "kv"),
                _norm(config, head_dim, "kv"),
                _norm(config, head_dim, scaled=False),
            ),
            scale=1.0,
            stddevs=(0.02,) * 4,
            dropout_rate=config.attention_dropout_rate,
            **how,
        )
        mlp = FeedForward(width, config.mlp_dim, activation=config.activation, stddevs=(0.02, 0.02), **how)
        norms = [_norm(config, width) for _ in range(5)]
        super().__init__(
            attention,
            mlp,
            norms=(norms[0], norms[1]),
            output_norms=(norms[2], norms[3]),
            dropout_rates=(0.0, 0.0),
        )

        def dense(inputs: int, outputs: int, *axes: str) -> layers.Linear:
            return layers.Linear(inputs, outputs, axes=axes, use_bias=False, **how)

        self.gate_input, self.gate = (dense(width, config.gate_dim, "embed", "mlp") for _ in range(2))
        self.gate_out = dense(config.gate_dim, width, "mlp", "embed")
        self.gate_norm = norms[4]
        self.scale = layers.param(outlines.filled(1, (1,)), None)
        self.activation, self.epsilon = config.activation, config.layer_norm_epsilon
        self.window, self.base = (None, config.rope_base) if is_global else (window, config.local_rope_base)

    @checked_shapes
    def __call__(
        self,
        x: Float[Array, "B L E"],
        mask: Bool[Array, "B L"],
        first: Float[Array, "B L E"],
        input_scale: Float[Array, " G"],
        *,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B L E"]:
        x = super().__call__(x, mask, key=key)
        signal = over_rms(fused_dense.apply(self.gate_input, first) * first.shape[-1] ** -0.5, self.epsilon)
        gate = FUNCTIONS[self.activation](fused_dense.apply(self.gate, x))
        gate *= (signal * input_scale[None, None]).astype(gate.dtype)
        y = self.gate_norm(fused_dense.apply(self.gate_out, constrain(gate, ("batch", "length", "mlp"))))
        # transformers does not train the scale, which is a buffer there.
        scale = jax.lax.stop_gradient(layers.weight(self.scale))
        return layers.constrain_activation((x + y) * scale[None, None].astype(x.dtype))

    def attend(self, x: jax.Array, mask: jax.Array, *, key: jax.Array | None, **how: Any) -> jax.Array:
        frequencies = jnp.asarray(rope_frequencies(self.attention.head_dim, self.base))
        return self.attention(x, mask, window=self.window, frequencies=frequencies, key=key, **how)

"""The stack, the blocks and the entries of config.json that encoders with RoPE and windows share."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxir.models import layers, stacks
from jaxir.models.attention import NO_WINDOW, rope_frequencies
from jaxir.models.backbones import StackEncoder
from jaxir.models.blocks import PreNormBlock

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in config.json


def read_heads(content: Mapping[str, Any]) -> dict[str, int]:
    """Reads the number of heads of keys and the size of a head, which config.json may leave out."""
    heads = content["num_attention_heads"]
    return {
        "num_kv_heads": content.get("num_key_value_heads") or heads,
        "head_dim": content.get("head_dim") or content["hidden_size"] // heads,
    }


def rope_of(content: Mapping[str, Any], kind: str | None, base: float) -> dict[str, Any]:
    """Returns the parameters of RoPE for layers of `kind`, from config.json of transformers 5 or 4.

    `base` is the default of `rope_theta`. Raises ValueError if the type of scaling is not supported.
    """
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope = (rope.get(kind) or {}) if kind and (kind in rope or not rope) else rope
    found = {"rope_theta": content.get("rope_theta") or base} | rope
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if found["rope_type"] not in ("default", "llama3"):
        raise ValueError(f"RoPE of type {found['rope_type']!r} is not supported, only default and llama3")
    return found


def read_bases(content: Mapping[str, Any], *, full: float, local: float) -> dict[str, float]:
    """Reads RoPE's bases of layers without and with a window, whose defaults are `full` and `local`.

    Raises ValueError if RoPE is scaled.
    """
    content = {name: value for name, value in content.items() if name != "rope_theta"}
    ropes = rope_of(content, FULL, full), rope_of(content, SLIDING, local)
    if any(rope["rope_type"] != "default" for rope in ropes):
        raise ValueError(
            f"RoPE scaling is not supported for {content['model_type']}: set rope_type to default"
        )
    whole, near = (float(rope["rope_theta"]) for rope in ropes)
    return {"rope_base": whole, "local_rope_base": near}


def write_layers(config: Any) -> dict[str, Any]:
    """Returns the entries of config.json for the kind of each layer and RoPE's base for each kind."""
    bases = {FULL: config.rope_base, SLIDING: config.local_rope_base or config.rope_base}
    return {
        "layer_types": layer_types(config.windows, config.num_layers),
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": base} for k, base in bases.items()},
    }


def windows_of(types: Sequence[str], num: int, distance: int | None) -> tuple[int, ...]:
    """Returns the `windows` of a configuration: local layers see tokens up to `distance` away."""
    if len(types) != num or not {*types} <= {FULL, SLIDING}:
        raise ValueError(f"layer_types must have {num} items, each {FULL} or {SLIDING}")
    if SLIDING not in types:
        return ()
    if distance is None:
        raise ValueError(f"layer_types has {SLIDING}, so sliding_window must be a number of tokens")
    return tuple(distance if kind == SLIDING else NO_WINDOW for kind in types)


def layer_types(windows: Sequence[int], num: int) -> list[str]:
    """Returns the kind of each layer, as config.json names it."""
    return [FULL if not windows or windows[i] == NO_WINDOW else SLIDING for i in range(num)]


def width_of(config: Any, *, default: int) -> int:
    """Returns the distance that all layers with a window see, or `default` if there are none."""
    found = {window for window in config.windows if window != NO_WINDOW}
    if len(found) > 1:
        raise ValueError(f"a Hugging Face folder holds one window size, not {len(found)}; use another format")
    return max(found, default=default)


def check_heads(config: Any) -> None:
    """Checks the heads and windows of a configuration; raises a ValueError."""
    object.__setattr__(config, "windows", tuple(config.windows))  # jaxir.json stores a tuple as a list
    if config.windows and len(config.windows) != config.num_layers:
        raise ValueError(f"windows must have {config.num_layers} items, one a layer, or none")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd, but RoPE rotates pairs of dimensions")


class RotaryStack(StackEncoder):
    """An encoder with a token table, a stack of blocks that use RoPE, and a last norm.

    Each block gets a window and RoPE's frequencies. `make_block` and `kinds` are those of
    `stacks.make_stack`.
    """

    config: Any

    def __init__(
        self,
        config: Any,
        make_block: Callable[..., nnx.Module],
        norm: nnx.Module,
        *,
        rngs: nnx.Rngs,
        kinds: Sequence[Hashable] | None = None,
    ):
        self.config = config
        self.token = layers.Embedding(
            config.vocab_size, config.embed_dim, axis="vocab", dtype=config.dtype, rngs=rngs
        )
        self.layers = stacks.make_stack(
            make_block, config.num_layers, scan=config.scan_layers, rngs=rngs, kinds=kinds
        )
        self.norm = norm

    def embed(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Returns token vectors [B, L, E]; raises ValueError if a text has too many tokens."""
        longest = max(batch.shape[1] for batch in ids)
        if longest > (limit := self.config.max_positions):
            raise ValueError(f"{longest} tokens exceed the model's {limit} positions: truncate the text")
        return [layers.constrain_activation(x) for x in self.token.together(ids)]

    def per_layer(self) -> Sequence[Any]:
        config = self.config
        windows = np.array(config.windows or [NO_WINDOW] * config.num_layers, np.int32)
        return windows, self.frequencies()

    def frequencies(self) -> np.ndarray:
        """Returns RoPE's frequencies of each layer, [num_layers, head_dim / 2]."""
        config, whole = self.config, self.global_frequencies()
        near = rope_frequencies(config.head_dim, config.local_rope_base) if config.local_rope_base else whole
        local = np.array(layer_types(config.windows, config.num_layers)) == SLIDING
        return np.where(local[:, None], near, whole)

    def global_frequencies(self) -> np.ndarray:
        """Returns RoPE's frequencies of layers without a window, [head_dim / 2]."""
        return rope_frequencies(self.config.head_dim, self.config.rope_base)

    def finish(self, xs: list[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        return [layers.constrain_activation(self.norm(x)) for x in xs]


class RotaryBlock(PreNormBlock):
    """A pre-norm block that uses RoPE; `causal` and `has_windows` are the same in all layers."""

    causal: bool = False
    has_windows: bool = False

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
        how |= {"causal": self.causal, "window": window if self.has_windows else None}
        return self.attention(x, mask, frequencies=frequencies, key=key, **how)

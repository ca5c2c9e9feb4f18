"""T5 encoders, versions 1.0 and 1.1 (Raffel et al. 2020).

Pre-norm blocks with RMS norms and no biases, no absolute positions: all blocks share one table of relative
position biases. Attention logits are not divided by sqrt(K): the initialisation is scaled instead.

Dropout is T5X's (t5x/examples/t5/layers.py, network.py): a feature is dropped from all positions of a text or
from none, and an attention weight for all queries or for none. A number is drawn for each text and feature
instead of one for each element, which by the TPU compiler's account would be the largest cost of a step.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, jaxtyped

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Buckets, Count, Layers, Positive, Rate, Size, checked
from jaxir.models import activations, backbones, layers
from jaxir.models.attention import Attention
from jaxir.models.backbones import BackboneConfig, Edit, Encoder, edited, register
from jaxir.models.codec import ACTIVATIONS, Changed, Entry, HuggingFace, Weights
from jaxir.runtime.partitioning import constrain

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
    said = content.get("feed_forward_proj", default)
    gated, name = said.startswith("gated-"), said.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; there are {', '.join(ACTIVATIONS)}")
    # "gated-gelu" has always meant the tanh approximation, "gelu" alone never did.
    return {"gated": gated, "activation": "gelu_tanh" if gated and name == "gelu" else ACTIVATIONS[name]}


def _write_feed_forward(config: "T5Config", pad_id: int) -> dict[str, Any]:
    name = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    if config.gated and name == "gelu":
        raise ValueError("T5 has no gated exact gelu: its 'gated-gelu' is the tanh approximation")
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
    # One table under several names. (In T5 1.1 lm_head's is another.)
    aliases={"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")},
    left_out=("decoder.", "encoder.embed_tokens.", "lm_head", "classifier."),
    begins=False,
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class T5Config(BackboneConfig):
    """The shape of a T5 encoder and how it is computed. The defaults are T5 1.1 base.

    Attributes:
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      num_heads: heads of attention.
      head_dim: dimensions of each head; num_heads * head_dim need not be E.
      mlp_dim: units of the feed-forward layer.
      activation: of the feed-forward layer: "relu" in 1.0, "gelu_tanh" in 1.1.
      gated: whether a second linear map multiplies the activation (1.1).
      relative_buckets: number of relative position buckets, half of them for each direction.
      relative_max_distance: distance, in tokens, from which on all share the last bucket.
      layer_norm_epsilon: epsilon of every norm.
      dropout_rate: dropout of embeddings, attention weights, feed-forward units, sublayers' outputs and the
        result, with masks that all positions of a text share.
      dtype: the type of matrix products and activations; parameters are float32.
      remat: what the backward pass computes anew of a block instead of keeping it: nothing, all but
        matrix products ("products"), all but these and gathered weights ("weights"), or all; "auto" has
        training take the quickest that fits.
      scan_layers: stack the blocks' parameters and scan over them: compile time does not grow with depth.
    """

    kind: ClassVar[str] = "t5"
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

    @property
    def summary(self) -> str:
        """What it is, in a few words."""
        return f"T5 encoder, {self.num_layers} layers x {self.embed_dim}"

    def make(self, *, rngs: nnx.Rngs) -> "T5Encoder":
        """Makes the encoder, with random parameters."""
        return T5Encoder(self, rngs=rngs)


# name: (E, heads, dimensions of a head, feed-forward units, layers)
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
      name: "1.0-" and small, base, large, 3b or 11b, or "1.1-" and small, base, large, xl or xxl.
      dropout_rate: see T5Config, like the rest.
      dtype: type of matrix products.
      remat: what to recompute of blocks in the backward pass.
      scan_layers: whether to scan over the blocks.

    Raises:
      UserError: there is no such preset.
    """
    if name not in _PRESETS:
        raise UserError(f"no T5 preset {name!r}{suggest(name, _PRESETS)}; there are {', '.join(_PRESETS)}")
    embed_dim, num_heads, head_dim, mlp_dim, num_layers = _PRESETS[name]
    gated = name.startswith("1.1")
    return T5Config(
        embed_dim=embed_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_layers=num_layers,
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


class T5Encoder(Encoder):
    """A T5 encoder.

    Args:
      config: its shape.
      rngs: source of the `params` key; weights start as in the reference implementation.
    """

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
        self.relative_bias = RelativeBias(config, rngs=rngs)
        self.layers = layers.make_stack(
            lambda rngs: _Block(config, rngs=rngs), config.num_layers, scan=config.scan_layers, rngs=rngs
        )
        self.norm = norm_of(config)

    def together(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
    ) -> list[jax.Array]:
        """Encodes batches of token ids [B, L], each of a length of its own, as calls for each would.

        What a device does not hold of a weight it gathers once for all of them.
        """
        rate, remat = self.config.dropout_rate, self.config.remat
        split = [layers.split_key(key, 3) for key in keys]
        xs = [
            layers.constrain_activation(dropout(x, rate, key))
            for x, (key, _, _) in zip(self.token.together(ids), split, strict=True)
        ]
        xs = edited(xs, edits)
        args = [(batch != 0, self.relative_bias(batch.shape[1])) for batch in ids]
        xs = layers.run_stack(self.layers, xs, args, remat=remat, keys=[key for _, key, _ in split])
        return [
            layers.constrain_activation(dropout(self.norm(x), rate, key))
            for x, (_, _, key) in zip(xs, split, strict=True)
        ]


class RelativeBias(nnx.Module):
    """A learnt number for each head and bucket of distances, added to attention logits.

    Args:
      config: how many there are.
      bidirectional: whether half of the buckets are for keys after the query; without, none are.
      rngs: source of the `params` key.
    """

    def __init__(self, config: T5Config, *, bidirectional: bool = True, rngs: nnx.Rngs):
        init = layers.normal(config.embed_dim**-0.5)
        shape = (config.num_heads, config.relative_buckets)
        self.embedding = layers.param(init(rngs.params(), shape), "heads", "relpos_buckets")
        self.config, self.bidirectional = config, bidirectional

    def __call__(self, length: int) -> jax.Array:
        """Returns the biases [1, H, L, L], float32: row for the query's position, column for the key's."""
        positions = jnp.arange(length)
        return self.between(positions, positions)

    def between(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the biases [1, H, T, S], float32, of queries and keys at positions [T] and [S]."""
        buckets = relative_buckets(
            keys[None, :] - queries[:, None],
            num_buckets=self.config.relative_buckets,
            max_distance=self.config.relative_max_distance,
            bidirectional=self.bidirectional,
        )
        # A product with one-hot vectors: its gradient is one too; a lookup's adds H L L numbers to few rows.
        chosen = jax.nn.one_hot(buckets, self.config.relative_buckets, axis=0, dtype=jnp.float32)
        bias = jnp.einsum(
            "HN,NTS->HTS", layers.weight(self.embedding), chosen, precision=jax.lax.Precision.HIGHEST
        )
        return constrain(bias[None], (None, "heads", "length", "length"))


@jaxtyped(typechecker=beartype)
def relative_buckets(
    distance: Int[Array, "T S"], *, num_buckets: int, max_distance: int, bidirectional: bool = True
) -> Int[Array, "T S"]:
    """Returns the bucket of each distance (key position - query position).

    Half of the buckets are for keys after the query; unless `bidirectional`, all are for those before it and
    for itself. Of each side's, the first half hold one distance each, the others ranges whose bounds grow
    geometrically up to `max_distance`; farther ones fall into the last.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    growth = (max_distance / exact) ** (1 / (side - exact))
    # Whole bounds: where one is a power of two the original formula's logarithm could round either way.
    bounds = jnp.array([math.ceil(exact * growth**i - 1e-6) for i in range(1, side - exact)], jnp.int32)
    size = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    large = exact + (size[..., None] >= bounds[None, None]).sum(-1, dtype=size.dtype)
    first = jnp.where(distance > 0, side, 0) if bidirectional else 0
    return first + jnp.where(size < exact, size, large)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """T5X's dropout: drops features of x [B, L, E], each from all positions of a text."""
    return layers.dropout(x, rate, key, same_along=1)


def norm_of(config: T5Config) -> layers.RMSNorm:
    """Makes a norm of [..., E]."""
    return layers.RMSNorm(config.embed_dim, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


def _dense(
    config: T5Config, inputs: int, outputs: int, *axes: str, stddev: float, rngs: nnx.Rngs
) -> layers.Linear:
    return layers.Linear(
        inputs, outputs, axes=axes, use_bias=False, dtype=config.dtype, init=layers.normal(stddev), rngs=rngs
    )


class Mlp(nnx.Module):
    """The feed-forward layer."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        def dense_in() -> layers.Linear:
            return _dense(
                config,
                config.embed_dim,
                config.mlp_dim,
                "embed",
                "mlp",
                stddev=config.embed_dim**-0.5,
                rngs=rngs,
            )

        self.config = config
        self.wi_0 = dense_in()
        self.wi_1 = dense_in() if config.gated else None
        self.wo = _dense(
            config, config.mlp_dim, config.embed_dim, "mlp", "embed", stddev=config.mlp_dim**-0.5, rngs=rngs
        )

    def __call__(self, x: jax.Array, *, key: jax.Array | None) -> jax.Array:
        """Maps x [B, L, E] to as many."""
        hidden = activations.ACTIVATIONS[self.config.activation](self.wi_0(x))
        if self.wi_1 is not None:
            hidden *= self.wi_1(x)
        hidden = dropout(hidden, self.config.dropout_rate, key)
        return self.wo(constrain(hidden, ("batch", "length", "mlp")))


def attention_of(config: T5Config, *, rngs: nnx.Rngs) -> Attention:
    """Makes attention, to itself or to a memory of the same width."""
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


class _Block(nnx.Module):
    """Attention, then a feed-forward layer; each reads its normalised input and adds to it."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm, self.mlp_norm = norm_of(config), norm_of(config)
        self.attention = attention_of(config, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    @jaxtyped(typechecker=beartype)
    def __call__(
        self,
        x: Float[Array, "B L E"],
        mask: Bool[Array, "B L"],
        bias: Float[Array, "1 H L L"],
        *,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B L E"]:
        rate = self.config.dropout_rate
        weights_key, attention_key, units_key, mlp_key = layers.split_key(key, 4)
        y = self.attention(self.attention_norm(x), mask, bias=bias, key=weights_key)
        x = layers.constrain_activation(x + dropout(y, rate, attention_key))
        y = self.mlp(self.mlp_norm(x), key=units_key)
        return layers.constrain_activation(x + dropout(y, rate, mlp_key))

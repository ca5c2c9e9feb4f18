"""T5 encoders, versions 1.0 and 1.1 (Raffel et al. 2020).

Pre-norm blocks with RMS norms and no biases, no absolute positions: all blocks share one table of relative
position biases. Attention logits are not divided by sqrt(K): the initialisation is scaled instead.

Dropout is T5X's (t5x/examples/t5/layers.py, network.py): a feature is dropped from all positions of a text or
from none, and an attention weight for all queries or for none. A number is drawn for each text and feature
instead of one for each element, which by the TPU compiler's account would be the largest cost of a step.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from beartype import beartype
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, jaxtyped

from jaxir.errors import UserError, suggest
from jaxir.models import layers
from jaxir.partitioning import constrain
from jaxir.simple_types import Count, Positive, Rate, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class T5Config:
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
      remat: recompute each block in the backward pass instead of keeping its activations.
      scan_layers: stack the blocks' parameters and scan over them: compile time does not grow with depth.
    """

    vocab_size: Count = 32128
    embed_dim: Count = 768
    num_layers: Count = 12
    num_heads: Count = 12
    head_dim: Count = 64
    mlp_dim: Count = 2048
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu_tanh"
    gated: bool = True
    relative_buckets: Count = 32
    relative_max_distance: Count = 128
    layer_norm_epsilon: Positive = 1e-6
    dropout_rate: Rate = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    scan_layers: bool = False

    @property
    def summary(self) -> str:
        """What it is, in a few words."""
        return f"T5 encoder, {self.num_layers} layers x {self.embed_dim}"


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
    remat: bool = False,
    scan_layers: bool = False,
) -> T5Config:
    """Returns the config of a published T5 encoder.

    Args:
      name: "1.0-" and small, base, large, 3b or 11b, or "1.1-" and small, base, large, xl or xxl.
      dropout_rate: see T5Config, like the rest.
      dtype: type of matrix products.
      remat: whether to recompute blocks in the backward pass.
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


class T5Encoder(nnx.Module):
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
        self.norm = _norm(config)

    def __repr__(self) -> str:
        return f"T5Encoder({self.config.summary}, {layers.size_of(self)})"

    __str__ = __repr__  # nnx's own shows every array

    @jaxtyped(typechecker=beartype)
    def __call__(self, ids: Int[Array, "B L"], *, key: Key[Array, ""] | None = None) -> Float[Array, "B L E"]:
        """Encodes token ids.

        Args:
          ids: [B, L], 0 is padding, on the right.
          key: key of dropout; None turns it off.

        Returns:
          [B, L, E] in the config's dtype. What stands at padded positions has no meaning.
        """
        return self.together([ids], [key])[0]

    def together(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Encodes batches of token ids [B, L], each of a length of its own, as calls for each would.

        What a device does not hold of a weight it gathers once for all of them.
        """
        rate, remat = self.config.dropout_rate, self.config.remat
        split = [layers.split_key(key, 3) for key in keys]
        xs = [
            layers.constrain_activation(_dropout(x, rate, key))
            for x, (key, _, _) in zip(self.token.together(ids), split, strict=True)
        ]
        args = [(batch != 0, self.relative_bias(batch.shape[1])) for batch in ids]
        xs = layers.run_stack(self.layers, xs, args, remat=remat, keys=[key for _, key, _ in split])
        return [
            layers.constrain_activation(_dropout(self.norm(x), rate, key))
            for x, (_, _, key) in zip(xs, split, strict=True)
        ]


class RelativeBias(nnx.Module):
    """A learnt number for each head and bucket of distances, added to attention logits."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        init = layers.normal(config.embed_dim**-0.5)
        shape = (config.num_heads, config.relative_buckets)
        self.embedding = layers.param(init(rngs.params(), shape), "heads", "relpos_buckets")
        self.config = config

    def __call__(self, length: int) -> jax.Array:
        """Returns the biases [1, H, L, L], float32: row for the query's position, column for the key's."""
        positions = jnp.arange(length)
        buckets = relative_buckets(
            positions[None, :] - positions[:, None],
            num_buckets=self.config.relative_buckets,
            max_distance=self.config.relative_max_distance,
        )
        # A product with one-hot vectors: its gradient is one too; a lookup's adds H L L numbers to few rows.
        chosen = jax.nn.one_hot(buckets, self.config.relative_buckets, axis=0, dtype=jnp.float32)
        bias = jnp.einsum(
            "HN,NTS->HTS", layers.weight(self.embedding), chosen, precision=jax.lax.Precision.HIGHEST
        )
        return constrain(bias[None], (None, "heads", "length", "length"))


@jaxtyped(typechecker=beartype)
def relative_buckets(
    distance: Int[Array, "T S"], *, num_buckets: int, max_distance: int
) -> Int[Array, "T S"]:
    """Returns the bucket of each distance (key position - query position).

    Half of the buckets are for keys after the query. Of each half, the first half hold one distance each, the
    others ranges whose bounds grow geometrically up to `max_distance`; farther ones fall into the last.
    """
    half = num_buckets // 2
    exact = half // 2
    growth = (max_distance / exact) ** (1 / (half - exact))
    # Whole bounds: where one is a power of two the original formula's logarithm could round either way.
    bounds = jnp.array([math.ceil(exact * growth**i - 1e-6) for i in range(1, half - exact)], jnp.int32)
    size = jnp.abs(distance)
    large = exact + (size[..., None] >= bounds[None, None]).sum(-1, dtype=size.dtype)
    return jnp.where(distance > 0, half, 0) + jnp.where(size < exact, size, large)


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Drops features of x [B, L, E], each from all positions of a text."""
    return layers.dropout(x, rate, key, same_along=1)


def _norm(config: T5Config) -> layers.RMSNorm:
    return layers.RMSNorm(config.embed_dim, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


def _dense(
    config: T5Config, inputs: int, outputs: int, *axes: str, stddev: float, rngs: nnx.Rngs
) -> layers.Linear:
    return layers.Linear(
        inputs, outputs, axes=axes, use_bias=False, dtype=config.dtype, init=layers.normal(stddev), rngs=rngs
    )


class _Attention(nnx.Module):
    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        joined = config.num_heads * config.head_dim
        width = config.embed_dim

        def dense_in(stddev: float) -> layers.Linear:
            return _dense(config, width, joined, "embed", "joined_kv", stddev=stddev, rngs=rngs)

        self.config = config
        self.query = dense_in((width * config.head_dim) ** -0.5)
        self.key = dense_in(width**-0.5)
        self.value = dense_in(width**-0.5)
        self.out = _dense(config, joined, width, "joined_kv", "embed", stddev=joined**-0.5, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, bias: jax.Array, *, key: jax.Array | None) -> jax.Array:
        heads = (self.config.num_heads, self.config.head_dim)

        def split(y: jax.Array) -> jax.Array:
            return constrain(y.reshape(*y.shape[:2], *heads), ("batch", "length", "heads", "kv"))

        # A weight that is dropped for all queries is a value that is dropped: [B, L, H, 1] random numbers,
        # and nothing that fused kernels would have to know of.
        value = layers.dropout(split(self.value(x)), self.config.dropout_rate, key, same_along=-1)
        y = layers.attention(split(self.query(x)), split(self.key(x)), value, mask=mask, bias=bias, scale=1.0)
        return self.out(y.reshape(*x.shape[:2], heads[0] * heads[1]))


class _Mlp(nnx.Module):
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
        hidden = layers.ACTIVATIONS[self.config.activation](self.wi_0(x))
        if self.wi_1 is not None:
            hidden *= self.wi_1(x)
        hidden = _dropout(hidden, self.config.dropout_rate, key)
        return self.wo(constrain(hidden, ("batch", "length", "mlp")))


class _Block(nnx.Module):
    """Attention, then a feed-forward layer; each reads its normalised input and adds to it."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        self.attention = _Attention(config, rngs=rngs)
        self.mlp = _Mlp(config, rngs=rngs)

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
        y = self.attention(self.attention_norm(x), mask, bias, key=weights_key)
        x = layers.constrain_activation(x + _dropout(y, rate, attention_key))
        y = self.mlp(self.mlp_norm(x), key=units_key)
        return layers.constrain_activation(x + _dropout(y, rate, mlp_key))

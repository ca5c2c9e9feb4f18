"""Blocks that several encoders share: post-norm as in BERT, pre-norm as in T5, and feed-forward layers.

A block is given its attention; subclasses define, in `attend`, the arguments of attention.
"""

import functools
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from jaxir.core.shapes import checked_shapes
from jaxir.models import fused_dense, layers
from jaxir.models.activations import ACTIVATIONS
from jaxir.models.attention import Attention
from jaxir.runtime.partitioning import constrain, in_force


class FeedForward(nnx.Module):
    """W_o f(W_0 x), or gated: W_o (f(W_0 x) * W_1 x) (Shazeer 2020, arXiv:2002.05202, eq. 6).

    `biases` says whether W_0 and W_1 have biases, and whether W_o has one. `activation` is f, a name in
    `activations.ACTIVATIONS`. `stddevs` are the standard deviations of the initial kernels: one for W_0 and
    W_1, one for W_o. For `same_along` see `layers.dropout`.
    """

    def __init__(
        self,
        width: int,
        units: int,
        *,
        activation: str,
        gated: bool = True,
        biases: tuple[bool, bool] = (False, False),
        stddevs: tuple[float, float],
        dropout_rate: float = 0.0,
        same_along: int | None = None,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        def dense(inputs: int, outputs: int, *axes: str, which: int) -> layers.Linear:
            how = {"use_bias": biases[which], "dtype": dtype, "init": layers.normal(stddevs[which])}
            return layers.Linear(inputs, outputs, axes=axes, **how, rngs=rngs)

        self.wi_0 = dense(width, units, "embed", "mlp", which=0)
        self.wi_1 = dense(width, units, "embed", "mlp", which=0) if gated else None
        self.wo = dense(units, width, "mlp", "embed", which=1)
        self.activation, self.dropout_rate, self.same_along = activation, dropout_rate, same_along

    def __call__(self, x: jax.Array, *, key: jax.Array | None) -> jax.Array:
        hidden = ACTIVATIONS[self.activation](self.wi_0(x))
        if self.wi_1 is not None:
            hidden *= self.wi_1(x)
        hidden = layers.dropout(hidden, self.dropout_rate, key, same_along=self.same_along)
        return self.wo(constrain(hidden, ("batch", "length", "mlp")))


class PreNormBlock(nnx.Module):
    """Attention, then a feed-forward layer; each reads the normalised x, and its output is added to x.

    If the first of `norms` is None, attention reads x itself. `output_norms`, if not None, normalise the
    outputs of attention and of the feed-forward layer before they are added, as in Gemma. `dropout_rates` are
    for these outputs. For `same_along` see `layers.dropout`.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: FeedForward,
        *,
        norms: tuple[nnx.Module | None, nnx.Module],
        output_norms: tuple[nnx.Module | None, nnx.Module | None] = (None, None),
        dropout_rates: tuple[float, float],
        same_along: int | None = None,
    ):
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norms
        self.attention_output_norm, self.mlp_output_norm = output_norms
        self.dropout_rates, self.same_along = dropout_rates, same_along

    @checked_shapes
    def __call__(
        self, x: Float[Array, "B L E"], mask: Bool[Array, "B L"], *args: Any, key: Key[Array, ""] | None
    ) -> Float[Array, "B L E"]:
        weights_key, attention_key, units_key, mlp_key = layers.split_key(key, 4)
        added = self.attention_output_norm is None and (key is None or self.dropout_rates[0] == 0)
        y = self.attend(x, mask, *args, key=weights_key, norm=self.attention_norm, added=added)
        y = y if self.attention_output_norm is None else self.attention_output_norm(y)
        if added:
            x = layers.constrain_activation(y)
        else:
            x = self._added(x, y, self.dropout_rates[0], attention_key)
        drops = key is not None and max(self.mlp.dropout_rate, self.dropout_rates[1]) > 0
        if not drops and fused_dense.feeds(self.mlp, self.mlp_norm, x, in_force()):
            added = self.mlp_output_norm is None
            y = fused_dense.feed(self.mlp, self.mlp_norm, x, added=added, partitioner=in_force())
            return layers.constrain_activation(y if added else x + self.mlp_output_norm(y))
        y = self.mlp(self.mlp_norm(x), key=units_key)
        y = y if self.mlp_output_norm is None else self.mlp_output_norm(y)
        return self._added(x, y, self.dropout_rates[1], mlp_key)

    def attend(
        self, x: jax.Array, mask: jax.Array, *args: Any, key: jax.Array | None, **how: Any
    ) -> jax.Array:
        """Attends from x to itself at real tokens, true in `mask`; `how` is for `Attention`."""
        return self.attention(x, mask, *args, key=key, **how)

    def _added(self, x: jax.Array, y: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
        return layers.constrain_activation(x + layers.dropout(y, rate, key, same_along=self.same_along))


class PostNormBlock(nnx.Module):
    """Attention, then a feed-forward layer; each output has dropout, is added to its input and normalised.

    Reads `embed_dim`, `mlp_dim`, `activation`, `layer_norm_epsilon`, `dropout_rate` and `dtype` of `config`.
    Without `mlp` the feed-forward layer is BERT's. Weights start from N(0, 0.02^2).
    """

    def __init__(self, config: Any, attention: Attention, *, mlp: FeedForward | None = None, rngs: nnx.Rngs):
        width, units = config.embed_dim, config.mlp_dim
        how = {"dtype": config.dtype, "rngs": rngs}
        self.attention = attention
        self.mlp = mlp
        self.wi = layers.Linear(width, units, axes=("embed", "mlp"), **how) if mlp is None else None
        self.wo = layers.Linear(units, width, axes=("mlp", "embed"), **how) if mlp is None else None
        norm = functools.partial(
            layers.LayerNorm, width, epsilon=config.layer_norm_epsilon, dtype=config.dtype
        )
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.activation, self.dropout_rate = config.activation, config.dropout_rate

    @checked_shapes
    def __call__(
        self, x: Float[Array, "B L E"], mask: Bool[Array, "B *T L"], *args: Any, key: Key[Array, ""] | None
    ) -> Float[Array, "B L E"]:
        weights_key, attention_key, mlp_key = layers.split_key(key, 3)
        y = self.attend(x, mask, *args, key=weights_key)
        x = self._added(x, y, self.attention_norm, attention_key)
        if self.mlp is None:
            y = self.wo(constrain(ACTIVATIONS[self.activation](self.wi(x)), ("batch", "length", "mlp")))
        else:
            units_key, mlp_key = layers.split_key(mlp_key, 2)
            y = self.mlp(x, key=units_key)
        return self._added(x, y, self.mlp_norm, mlp_key)

    def attend(self, x: jax.Array, mask: jax.Array, *args: Any, key: jax.Array | None) -> jax.Array:
        return self.attention(x, mask, *args, key=key)

    def _added(self, x: jax.Array, y: jax.Array, norm: nnx.Module, key: jax.Array | None) -> jax.Array:
        return layers.constrain_activation(norm(x + layers.dropout(y, self.dropout_rate, key)))

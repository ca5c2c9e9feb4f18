"""The layers of encoders: dense layers, norms, dropout and the stack of blocks.

Parameters are float32 and have named axes. Computation is in `dtype`, norms and softmaxes in float32. Nothing
draws random numbers by itself: dropout takes a key, and is off without one.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxir.core.features import PADDING_TOKEN
from jaxir.core.shapes import checked_shapes
from jaxir.models import counter_random, quantized
from jaxir.models.operators import operator
from jaxir.models.outlines import drawn, filled
from jaxir.runtime import cpu
from jaxir.runtime.partitioning import GATHERED, Partitioner, constrain, gather_weight, in_force, look_up

M = TypeVar("M", bound=nnx.Module)
# The part of a block that the backward pass recomputes. False: nothing. "weights": all except matrix products
# and gathered weights. "products": all except matrix products. "kernels": all except inputs and results of
# TPU kernels that the backward pass reads. True: all. "auto": training chooses; until then nothing is
# recomputed.
Remat = bool | Literal["weights", "products", "kernels", "auto"]
# Name of the kernels' inputs and results for `jax.checkpoint`, which keeps them as it keeps matrix products.
# Therefore the forward pass of fused attention runs only once per step.
FUSED = "fused_attention"
# Name, for `jax.checkpoint`, of queries, keys and values that a kernel projects, which are kept, too.
PROJECTED = "projected"


def _products_and(*names: str) -> Callable[..., bool]:
    return jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*names),
    )


# Intermediate values that `jax.checkpoint` keeps of a block. Products of two activations (in attention) grow
# with the square of the length, and are not kept.
POLICIES: dict[Remat, Callable[..., bool]] = {
    "weights": _products_and(FUSED, PROJECTED, GATHERED),
    "products": _products_and(FUSED, PROJECTED),
    "kernels": jax.checkpoint_policies.save_only_these_names(FUSED),
    True: jax.checkpoint_policies.nothing_saveable,
}


def normal(stddev: float) -> nnx.Initializer:
    """Returns the initializer that draws float32 values from N(0, stddev^2)."""
    return nnx.initializers.normal(stddev, dtype=jnp.float32)


NORMAL = normal(0.02)  # the initializer of BERT


def param(value: jax.Array, *axes: str | None) -> nnx.Param:
    """Makes a parameter whose dimensions are named `axes`."""
    if value.ndim != len(axes):
        raise ValueError(f"parameter of shape {value.shape} needs {value.ndim} axis names, got {axes}")
    return nnx.Param(value, logical_axes=axes)


def size_of(module: nnx.Module) -> str:
    """Returns the number of parameters of a module as text: "22.7M parameters"."""
    count = sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param)))
    for unit, least in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= least:
            return f"{count / least:.1f}{unit} parameters"
    return f"{count} parameters"


class Summarised(nnx.Module):
    """A module with a `config`; its repr is the config's `summary` and the size, not every array."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.summary}, {size_of(self)})"

    __str__ = __repr__


def unexpected_array(module: nnx.Module, kind: type[nnx.Variable]) -> str | None:
    """Returns the first variable or array that is not a `kind`: "'scale' (a plain array)", or None."""
    for path, node in nnx.iter_graph(module):
        # nnx.state would not show plain arrays, which Flax treats as static during a trace.
        for name, x in {} if is_variable(node) else getattr(node, "__dict__", {}).items():
            if isinstance(x, jax.Array | np.ndarray) or (is_variable(x) and not isinstance(x, kind)):
                what = type(x).__name__ if is_variable(x) else "a plain array"
                return f"{'.'.join(map(str, (*path, name)))!r} ({what})"
    return None


def is_abstract(module: nnx.Module) -> bool:
    """Returns whether a module's parameters are only shapes, as in a plan."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


def copy_module(module: M) -> M:
    """Returns a module with its own copies of the arrays, on the same devices; mere shapes become zeros."""
    graphdef, state = nnx.split(module)
    if is_abstract(module):
        return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state))
    return nnx.merge(graphdef, jax.jit(lambda state: jax.tree.map(jnp.copy, state))(state))


def weight(p: nnx.Param, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the value of a parameter in `dtype`, gathered for computation; see `gather_weight`.

    While a stack is scanned, its parameters are those of one layer, without the axis "layers". The numbers of
    a quantised parameter can only be requested in their own type.
    """
    if quantized.is_quantized(p) and dtype != p.dtype:
        raise TypeError(f"a parameter is quantised to {p.dtype}: compute with `Linear` and `Embedding.whole`")
    gathered = _GATHERED.get()
    if gathered is not None and (id(p), dtype) in gathered:
        return gathered[id(p), dtype][1]
    value = p[...].astype(dtype)
    axes = p.get_metadata()["logical_axes"]
    value = gather_weight(value, axes[len(axes) - value.ndim :])
    if gathered is not None:
        gathered[id(p), dtype] = p, value
    return value


# Gathered weights, by id of the parameter and type. The value includes the parameter, so that its id is not
# reused. XLA does not merge the gathers of two towers: without this cache a step gathers almost double.
_GATHERED: contextvars.ContextVar[dict | None] = contextvars.ContextVar("gathered", default=None)


@contextlib.contextmanager
def gather_once() -> Iterator[None]:
    """Lets batches that run through the same block, such as two towers', share each gathered parameter."""
    token = _GATHERED.set({})
    try:
        yield
    finally:
        _GATHERED.reset(token)


def param_shardings(state: nnx.State, partitioner: Partitioner) -> nnx.State:
    """Returns `state` with each parameter's value replaced by the sharding that `partitioner` gives it.

    A dimension that its mesh axes do not divide (a vocabulary of 30,522 over 4 devices) is not split, nor is
    a parameter whose dimensions have no names (as flax.nnx.Linear makes them). The result has the structure
    of `state`, as `out_shardings` and `jax.device_put` need it.
    """

    def one(p: nnx.Variable) -> nnx.Variable:
        shape = p.get_value().shape
        axes = p.get_metadata().get("logical_axes", (None,) * len(shape))
        return p.replace(partitioner.sharding(axes, shape))

    return jax.tree.map(one, state, is_leaf=is_variable)


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns x W + b [N, O] in the type of x [N, I] and W [I, O]; b is [O] or None."""
    partitioner = in_force()
    if x.dtype == jnp.bfloat16 and partitioner and partitioner.on_cpu and cpu.has_quick_bfloat16():
        return cpu.bfloat16_affine(partitioner.mesh.size)(x, kernel, bias)
    y = jnp.dot(x, kernel)
    return y if bias is None else y + bias[None, :]


@operator
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns x W + b [..., O] in the type of x [..., I] and W [I, O]; b is [O] or None."""
    # One matrix product over all rows: CPUs compute [B * L, I] 3-6 % faster than [B, L, I].
    y = affine(x.reshape(-1, x.shape[-1]), kernel, bias)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def quantized_affine(
    x: jax.Array, numbers: jax.Array, scales: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Returns x W + b as `affine` does, for a quantised W and its float32 scales (see `quantized`)."""
    if numbers.dtype != jnp.int8:
        return affine(x, quantized.dequantize(numbers, scales, x.dtype), bias)
    # Scaling the outputs equals scaling the kernel, and is less work.
    y = affine(x, numbers.astype(x.dtype), None).astype(jnp.float32) * scales
    return (y if bias is None else y + bias.astype(jnp.float32)[None]).astype(x.dtype)


class Linear(nnx.Module):
    """A dense layer: x W + b over the last dimension, plus the addition of `adapter` (`models.adapters`).

    `axes` are the logical names of the dimensions of W [I, O]; `dtype` is the type of product and result. b
    starts at 0. `scales` are those of a quantised W (see `quantized`), else None.
    """

    adapter: Callable[[jax.Array], jax.Array] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str | None, str | None],
        use_bias: bool = True,
        dtype: str,
        init: nnx.Initializer = NORMAL,
        rngs: nnx.Rngs,
    ):
        self.kernel = param(drawn(init, rngs, (in_features, out_features)), *axes)
        self.scales = None
        self.bias = param(filled(0, (out_features,)), axes[1]) if use_bias else None
        self.dtype = dtype

    @checked_shapes
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        x = x.astype(self.dtype)
        bias = None if self.bias is None else weight(self.bias, self.dtype)
        if self.scales is None:
            y = linear(x, weight(self.kernel, self.dtype), bias)
        else:
            numbers, scales = weight(self.kernel, self.kernel.dtype), weight(self.scales)
            y = quantized_affine(x.reshape(-1, x.shape[-1]), numbers, scales, bias)
            y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if self.adapter is None else y + self.adapter(x)


@operator
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    """Normalises x [B, L, E] over its last dimension, times `scale` [E], plus `bias` [E]; all are float32."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon)
    y *= scale[None, None]
    return y if bias is None else y + bias[None, None]


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and optional bias (Ba et al. 2016), computed in float32."""

    def __init__(self, features: int, *, epsilon: float, dtype: str, use_bias: bool = True):
        self.scale = param(filled(1, (features,)), "embed")
        self.bias = param(filled(0, (features,)), "embed") if use_bias else None
        self.epsilon, self.dtype = epsilon, dtype

    @checked_shapes
    def __call__(self, x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
        bias = None if self.bias is None else weight(self.bias)
        y = layer_norm(x.astype(jnp.float32), weight(self.scale), bias, epsilon=self.epsilon)
        return y.astype(self.dtype)


def over_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Returns x / rms(x) over the last dimension, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


@operator
def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    """Returns x / rms(x) * scale of x [..., E] and `scale` [E], in float32."""
    return over_rms(x, epsilon) * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale in float32, without mean and bias (Zhang & Sennrich 2019).

    `axis` is the logical name of the last dimension. With `from_zero` the parameter starts from 0 and the
    scale is 1 + the parameter, as in Gemma. Without `scaled` there is no parameter.
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float,
        dtype: str,
        axis: str | None = "embed",
        from_zero: bool = False,
        scaled: bool = True,
    ):
        self.scale = param(filled(0 if from_zero else 1, (features,)), axis) if scaled else None
        self.features, self.epsilon, self.dtype, self.from_zero = features, epsilon, dtype, from_zero

    @checked_shapes
    def __call__(self, x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
        if self.scale is None:
            return over_rms(x, self.epsilon).astype(self.dtype)
        return rms_norm(x, self.multiplier(), epsilon=self.epsilon).astype(self.dtype)

    def multiplier(self) -> Float[Array, " E"]:
        """Returns the factor of each feature, in float32."""
        if self.scale is None:
            return jnp.ones((self.features,), jnp.float32)
        return weight(self.scale) + 1.0 if self.from_zero else weight(self.scale)


@operator
def rows_of(
    table: jax.Array, ids: jax.Array, *, axes: tuple[str | None, str | None], dtype: Any
) -> jax.Array:
    """Returns rows of a table [N, E] as `partitioning.look_up` does."""
    return look_up(table, ids, axes, dtype)


class Embedding(nnx.Module):
    """A table [N, E] of vectors looked up by id; `scales` are those of a quantised table, else None."""

    def __init__(
        self,
        num: int,
        features: int,
        *,
        axis: str | None,
        dtype: str,
        init: nnx.Initializer = NORMAL,
        rngs: nnx.Rngs,
    ):
        self.embedding = param(drawn(init, rngs, (num, features)), axis, "embed")
        self.scales = None
        self.dtype = dtype

    @checked_shapes
    def __call__(self, ids: Int[Array, "*shape"]) -> Float[Array, "*shape E"]:
        """Looks up ids [...]; an id outside the table gives NaN, so that the error is not hidden.

        In a table of tokens (axis "vocab") `features.PADDING_TOKEN` reads row 0.
        """
        axes = self.embedding.get_metadata()["logical_axes"]
        rows = table_rows(ids) if axes[0] == "vocab" else ids
        if self.scales is not None:
            numbers = weight(self.embedding, self.embedding.dtype)
            return quantized.look_up(numbers, weight(self.scales), rows, self.dtype)
        return rows_of(self.embedding[...], rows, axes=axes, dtype=self.dtype)

    def whole(self, dtype: Any) -> jax.Array:
        """Returns the whole table [N, E] in `dtype`, gathered for computation."""
        if self.scales is None:
            return weight(self.embedding, dtype)
        numbers = weight(self.embedding, self.embedding.dtype)
        return quantized.dequantize(numbers, weight(self.scales), dtype)

    def together(self, ids: Sequence[jax.Array]) -> list[jax.Array]:
        """Looks up several batches of ids [B, L]; their gradients are summed before devices exchange them."""
        if len(ids) == 1:  # exported programs have a symbolic number of rows
            return [self(ids[0])]
        rows = min(len(batch) for batch in ids)
        if any(len(batch) % rows for batch in ids):
            return [self(batch) for batch in ids]
        # Reshape [B N, L] to [B, N L], so that rows stay on their devices.
        wide = [batch.reshape(rows, -1) for batch in ids]
        ends = np.cumsum([batch.shape[1] for batch in wide])[:-1]
        found = jnp.split(self(jnp.concatenate(wide, axis=1)), ends, axis=1)
        return [x.reshape(*batch.shape, -1) for x, batch in zip(found, ids, strict=True)]


def table_rows(ids: jax.Array) -> jax.Array:
    """Returns the row of the token table for each of `ids` [...]: row 0 for `PADDING_TOKEN`."""
    return jnp.where(ids == PADDING_TOKEN, 0, ids)


def dropout(x: jax.Array, rate: float, key: jax.Array | None, *, same_along: int | None = None) -> jax.Array:
    """Zeroes each element of x with probability `rate` and divides the rest by 1 - rate; off without a key.

    `rate` is rounded to 2^-24. All elements along dimension `same_along` share one random number: with 1 a
    feature of x [B, L, E] is dropped from all positions of a text or from none.
    """
    if key is None or rate == 0.0:
        return x
    shape = list(x.shape)
    if same_along is not None:
        shape[same_along] = 1
    kept = jax.lax.shift_right_logical(counter_random.bits(key, shape), 8) >= round(rate * 2**24)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))


def split_key(key: jax.Array | None, num: int) -> Sequence[Any]:
    """Returns `num` independent keys, or `num` times None if dropout is off."""
    return [None] * num if key is None else jax.random.split(key, num)


def constrain_activation(x: jax.Array) -> jax.Array:
    """Keeps an activation [B, L, E] split by batch under the partitioner in force."""
    return constrain(x, ("batch", "length", "activation_embed"))

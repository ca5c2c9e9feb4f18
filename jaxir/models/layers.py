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
from beartype import beartype
from flax import nnx
from jaxtyping import Array, Float, Int, jaxtyped

from jaxir.core.features import PADDING_TOKEN
from jaxir.models import counter_random
from jaxir.runtime import cpu
from jaxir.runtime.partitioning import GATHERED, Partitioner, constrain, gather_weight, in_force, look_up

M = TypeVar("M", bound=nnx.Module)
# The part of a block that the backward pass recomputes: nothing (False), all except matrix products and
# gathered weights, all except matrix products, or all (True). With "auto" training chooses, and nothing is
# recomputed until then.
Remat = bool | Literal["weights", "products", "auto"]
# `jax.checkpoint`'s name of fused attention's results: kept like those of products, so that it runs once.
FUSED = "fused_attention"


def _products_and(*names: str) -> Callable[..., bool]:
    return jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*names),
    )


# Intermediate values that `jax.checkpoint` keeps of a block. Products of two activations (in attention) grow
# with the square of the length, and are not kept.
POLICIES: dict[Remat, Callable[..., bool]] = {
    "weights": _products_and(FUSED, GATHERED),
    "products": _products_and(FUSED),
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
    """Returns a module with its own copies of the arrays, on the same devices; shapes become zeros."""
    graphdef, state = nnx.split(module)
    if is_abstract(module):
        return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state))
    return nnx.merge(graphdef, jax.jit(lambda state: jax.tree.map(jnp.copy, state))(state))


def weight(p: nnx.Param, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the value of a parameter in `dtype`, gathered for computation; see `gather_weight`.

    While a stack is scanned, its parameters are those of one layer, without the axis "layers".
    """
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
    """Lets several batches (such as two towers') that run through a block share each gathered parameter."""
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


class Linear(nnx.Module):
    """x W + b over the last dimension.

    `axes` are the logical names of the dimensions of W [I, O]; `dtype` is the type of product and result. b
    starts at 0.
    """

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
        self.kernel = param(init(rngs.params(), (in_features, out_features)), *axes)
        self.bias = param(jnp.zeros((out_features,), jnp.float32), axes[1]) if use_bias else None
        self.dtype = dtype

    @jaxtyped(typechecker=beartype)
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        kernel = weight(self.kernel, self.dtype)
        # One matrix product over all rows: CPUs compute [B * L, I] 3-6 % faster than [B, L, I].
        x2d = x.astype(self.dtype).reshape(-1, x.shape[-1])
        y = affine(x2d, kernel, None if self.bias is None else weight(self.bias, self.dtype))
        return y.reshape(*x.shape[:-1], kernel.shape[1])


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and optional bias (Ba et al. 2016), computed in float32."""

    def __init__(self, features: int, *, epsilon: float, dtype: str, use_bias: bool = True):
        self.scale = param(jnp.ones((features,), jnp.float32), "embed")
        self.bias = param(jnp.zeros((features,), jnp.float32), "embed") if use_bias else None
        self.epsilon, self.dtype = epsilon, dtype

    @jaxtyped(typechecker=beartype)
    def __call__(self, x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        y *= weight(self.scale)[None, None]
        return (y if self.bias is None else y + weight(self.bias)[None, None]).astype(self.dtype)


class RMSNorm(nnx.Module):
    """T5's norm: x / rms(x) * scale in float32, without mean and bias (Zhang & Sennrich 2019)."""

    def __init__(self, features: int, *, epsilon: float, dtype: str):
        self.scale = param(jnp.ones((features,), jnp.float32), "embed")
        self.epsilon, self.dtype = epsilon, dtype

    @jaxtyped(typechecker=beartype)
    def __call__(self, x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (y * weight(self.scale)[None, None]).astype(self.dtype)


class Embedding(nnx.Module):
    """A table [N, E] of vectors looked up by id."""

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
        self.embedding = param(init(rngs.params(), (num, features)), axis, "embed")
        self.dtype = dtype

    @jaxtyped(typechecker=beartype)
    def __call__(self, ids: Int[Array, "*shape"]) -> Float[Array, "*shape E"]:
        """Looks up ids [...]; an id outside the table gives NaN, so that the error is not hidden.

        In a table of tokens (axis "vocab") `features.PADDING_TOKEN` reads row 0.
        """
        axes = self.embedding.get_metadata()["logical_axes"]
        rows = table_rows(ids) if axes[0] == "vocab" else ids
        return look_up(self.embedding[...], rows, axes, self.dtype)

    def together(self, ids: Sequence[jax.Array]) -> list[jax.Array]:
        """Looks up several batches of ids [B, L]; their gradients are summed before devices exchange them."""
        if len(ids) == 1:  # exported programs have a symbolic number of rows
            return [self(ids[0])]
        rows = min(len(batch) for batch in ids)
        if any(len(batch) % rows for batch in ids):
            return [self(batch) for batch in ids]
        # Reshaped from [B N, L] to [B, N L], so that rows stay on their devices.
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


def make_stack(make_block: Callable[[nnx.Rngs], nnx.Module], num: int, *, scan: bool, rngs: nnx.Rngs) -> Any:
    """Makes `num` equal blocks: a list, or with `scan` one block of parameters with a leading "layers" axis.

    Both forms have the same initial values for the same `rngs`.
    """
    keys = jax.random.split(rngs.params(), num)
    if not scan:
        return nnx.List([make_block(nnx.Rngs(key)) for key in keys])
    stacked = jax.vmap(lambda key: nnx.state(make_block(nnx.Rngs(key)), nnx.Param))(keys)
    for p in jax.tree.leaves(stacked, is_leaf=is_variable):
        p.set_metadata(logical_axes=("layers", *p.get_metadata()["logical_axes"]))
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(0))))
    return nnx.merge(graphdef, stacked)


def unstacked(blocks: Any) -> list[nnx.Module]:
    """Returns the blocks of `make_stack` as a list, also those of a scanned stack."""
    if isinstance(blocks, nnx.List):
        return list(blocks)
    graphdef, stacked = nnx.split(blocks)
    num = len(jax.tree.leaves(stacked)[0])
    return [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(num)]


def run_stack(
    blocks: Any,
    xs: Sequence[Float[Array, "B L E"]],
    args: Sequence[Sequence[Any]],
    *,
    remat: Remat,
    keys: Sequence[jax.Array | None],
    per_layer: Sequence[Any] = (),
    span: slice = slice(None),
) -> list[Float[Array, "B L E"]]:
    """Runs batches x [B, L, E] through the blocks that `make_stack` made.

    Each block is called as x = block(x, *args, *(a[layer] for a in per_layer), key=own key). All batches pass
    a block before any enters the next, so that the block's weights are gathered once.

    Args:
      blocks: a list, or one block of stacked parameters for `jax.lax.scan`, so that the program has one
        block.
      xs: inputs of the first block.
      args: for each batch, further arguments of every block.
      remat: what the backward pass recomputes (jax.checkpoint).
      keys: for each batch a dropout key, which is split into one key for each block; None turns dropout off.
      per_layer: arrays [layers, ...] of values that differ between blocks and are not trained, such as a
        window.
      span: the slice of blocks to run; each has the same dropout key as in a run of all blocks.
    """
    scan = not isinstance(blocks, nnx.List)
    num = len(jax.tree.leaves(nnx.state(blocks))[0]) if scan else len(blocks)
    split = tuple(None if key is None else jax.random.split(key, num) for key in keys)

    def apply(graphdef, state, xs, keys, own):
        block = nnx.merge(graphdef, state)
        with gather_once():
            return tuple(block(x, *a, *own, key=key) for x, a, key in zip(xs, args, keys, strict=True))

    if remat in POLICIES:
        apply = jax.checkpoint(apply, static_argnums=0, prevent_cse=not scan, policy=POLICIES[remat])
    xs, per_layer = tuple(xs), tuple(map(jnp.asarray, per_layer))
    if scan:
        graphdef, stacked = nnx.split(blocks)
        layers = jax.tree.map(lambda a: a[span], (stacked, split, per_layer))

        def step(xs, layer):
            state, keys, own = layer
            return apply(graphdef, state, xs, keys, own), None

        return list(jax.lax.scan(step, xs, layers)[0])
    for i, block in list(enumerate(blocks))[span]:
        graphdef, state = nnx.split(block)
        own_keys = tuple(None if k is None else k[i] for k in split)
        xs = apply(graphdef, state, xs, own_keys, tuple(a[i] for a in per_layer))
    return list(xs)


def constrain_activation(x: jax.Array) -> jax.Array:
    """Keeps an activation [B, L, E] split by batch under the partitioner in force."""
    return constrain(x, ("batch", "length", "activation_embed"))

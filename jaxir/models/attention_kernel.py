"""Pallas kernels of attention for TPUs: logits and weights [B, H, T, S] stay on the chip.

All logits of a head must fit into the chip's memory at once. (Flash attention, Dao et al. 2022, computes the
softmax in parts.) The forward pass keeps the log-sum-exp of each row. The backward pass recomputes the
weights, computes all gradients in one kernel, and sums a bias's gradient over the texts in place.

Logits are [S, T], keys before queries: maxima and sums then run over registers, and fewer operands need a
transpose. Heads that share the 128 lanes of a register are read together. In products of one head the lanes
of the other heads are 0, which costs nothing, because a matrix unit is no narrower.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxir.models.counter_random import kept, places, values_kept
from jaxir.models.head_kernel import KEY, QUERY, VALUE, HeadMap, Mapping

LANES = 128
# The logit of invisible positions; the sum of two such logits is still finite.
_UNSEEN = -1e30


@dataclasses.dataclass(frozen=True)
class Kind:
    """The static settings of a call; `interpret` runs a kernel on any machine, slowly, for tests.

    `shared` query heads read the same head of keys and values, and are read together. Heads can be shared
    or mapped (`mapping`) only if they fill whole registers (128 dimensions).
    """

    head_dim: int
    scale: float
    shared: int = 1
    mapping: Mapping = dataclasses.field(default_factory=Mapping)
    causal: bool = False
    windowed: bool = False
    dropout_rate: float = 0.0
    drop_for_all: bool = False
    interpret: bool = False

    @property
    def drops_values(self) -> bool:  # dropping a value drops its weight for all queries
        return self.dropout_rate > 0 and self.drop_for_all

    @property
    def drops_each(self) -> bool:
        return self.dropout_rate > 0 and not self.drop_for_all

    @property
    def near(self) -> bool:
        """Whether visibility depends on the distance."""
        return self.causal or self.windowed

    @property
    def group(self) -> int:
        """Number of heads that share a register."""
        return max(1, LANES // self.head_dim)

    @property
    def together(self) -> int:
        """Number of query heads that are read together."""
        return self.group * self.shared

    @property
    def folded(self) -> float:
        """The factor that multiplies queries: the scale if it is a power of two (no rounding), else 1."""
        return self.scale if math.frexp(self.scale)[0] == 0.5 else 1.0

    @property
    def rest(self) -> float:
        """The factor that multiplies logits: the scale divided by `folded`."""
        return self.scale / self.folded


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: jax.Array,
    numbers: jax.Array,
    kind: Kind,
    maps: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array]:
    """Attends on one device from query [B, L, H K] to key and value [B, L, H / shared K].

    The arrays have a type that the matrix unit supports. `bias` is float32 [H, S, T] or None. `lengths`,
    int32 [B], is the number of visible positions of each text, at least 1. `numbers`, int32 [5], holds both
    words of the dropout key, the global indices of the first text and head, and the window. `maps` are the
    arrays of a `head_kernel.HeadMap`. Returns [B, L, H K], and the log-sum-exp of each row, float32 [B, H /
    together, together, L].
    """
    shape = _Grid(query, kind)
    sums = jax.ShapeDtypeStruct((shape.batch, shape.groups, kind.together, shape.length), jnp.float32)
    return shape.call(
        _forward,
        "attention_forward",
        [
            (numbers, _SMEM),
            (lengths, _SMEM),
            *((x, shape.rows(x)) for x in (query, key, value)),
            *shape.whole(maps),
            *shape.bias(bias),
        ],
        [(query, shape.rows(query)), (sums, shape.sums())],
        products=2,
        operations=(
            6 + (bias is not None) + 9 * kind.drops_each,
            2 + kind.group + (kind.dropout_rate > 0) + 2 * kind.drops_values,
        ),
    )


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: jax.Array,
    numbers: jax.Array,
    sums: jax.Array,
    gradient: jax.Array,
    kind: Kind,
    maps: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:
    """Returns the gradients of query, key, value, the norms' scales (if any) and the bias [H, S, T] (if any).

    `sums` is the second result of `forward`, and `gradient` [B, L, H K] the gradient of the first result. The
    gradient of the scales is float32 [H / together, 3, K], for each group of heads.
    """
    shape = _Grid(query, kind)
    rows = [(x, shape.rows(x)) for x in (query, key, value, gradient)]
    before = [(numbers, _SMEM), (lengths, _SMEM), *rows, (sums, shape.sums())]
    return shape.call(
        _backward,
        "attention_backward",
        [*before, *shape.whole(maps), *shape.bias(bias)],
        [*rows[:3], *shape.scales(), *shape.bias(bias, buffers=2)],
        products=5,
        operations=(
            9 + 2 * (bias is not None) + 10 * kind.drops_each,
            6 + 4 * kind.group + 4 * kind.drops_values,
        ),
    )


_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)


class _Grid:
    """The grid of a kernel call: each program handles a group of heads and a block of texts, one by one."""

    def __init__(self, query: jax.Array, kind: Kind):
        self.batch, self.length, width = query.shape
        self.kind, self.heads = kind, width // kind.head_dim
        self.groups = self.heads // kind.together
        # Large blocks transfer fast; two blocks of each array must fit into a v4's on-chip memory of 16 MiB.
        registers = kind.together * kind.head_dim // LANES
        most = max(1, (2048 if self.length <= 256 else 512) // (self.length * registers))
        self.texts = max(n for n in range(1, min(most, self.batch) + 1) if self.batch % n == 0)

    def rows(self, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((self.texts, self.length, x.shape[2] // self.groups), lambda g, b: (b, 0, g))

    def sums(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.texts, None, self.kind.together, self.length), lambda g, b: (b, g, 0, 0))

    def whole(self, arrays: Sequence[jax.Array]) -> list[tuple[jax.Array, pl.BlockSpec]]:
        return [(x, pl.BlockSpec(x.shape, lambda g, b, n=x.ndim: (0,) * n)) for x in arrays]

    def scales(self) -> list[tuple[Any, pl.BlockSpec]]:
        shape = (self.groups, 3, self.kind.head_dim)
        spec = pl.BlockSpec((None, *shape[1:]), lambda g, b: (g, 0, 0))
        return [(jax.ShapeDtypeStruct(shape, jnp.float32), spec)] if any(self.kind.mapping.normed) else []

    def bias(self, bias: jax.Array | None, buffers: int = 1) -> list[tuple[jax.Array, pl.BlockSpec]]:
        # One buffer by default: all texts share the bias, so a second buffer would hide few reads.
        block = (self.kind.together, self.length, self.length)
        spec = pl.BlockSpec(block, lambda g, b: (g, 0, 0), pipeline_mode=pl.Buffered(buffers))
        return [] if bias is None else [(bias, spec)]

    def call(
        self,
        body: Callable[..., None],
        name: str,
        arguments: list[tuple[jax.Array, pl.BlockSpec]],
        results: list[tuple[Any, pl.BlockSpec]],
        *,
        products: int,
        operations: tuple[int, int],
    ) -> list[jax.Array]:
        """Runs a kernel, and describes its cost to the compiler and to plans.

        `products` counts matrix products between [L, K] and [L, L] for each head of a text. `operations` are
        elementwise operations, as `jaxir.costs` counts them, for each logit and for each number of a query.
        """
        kind, length = self.kind, self.length
        numbers = self.batch * length * self.heads * kind.head_dim
        logits = numbers // kind.head_dim * length
        for_each_logit, for_each_number = operations
        for_each_logit += kind.near + (kind.rest != 1.0)
        for_each_number += kind.mapping.operations(kind.shared, body is _backward)
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x, _ in (*arguments, *results))
        return pl.pallas_call(
            functools.partial(body, kind, len(arguments)),
            name=name,
            grid=(self.groups, self.batch // self.texts),
            in_specs=[spec for _, spec in arguments],
            out_specs=[spec for _, spec in results],
            out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array, _ in results],
            scratch_shapes=[pltpu.VMEM((length, length), jnp.float32)] if kind.near else [],
            interpret=kind.interpret,
            # Texts run in order, because a bias's gradient is summed over texts.
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * logits * kind.head_dim, transcendentals=logits, bytes_accessed=moved
            ),
            metadata={"elementwise": str(logits * for_each_logit + round(numbers * for_each_number))},
        )(*(array for array, _ in arguments))


def _forward(kind: Kind, inputs: int, *refs) -> None:
    numbers, lengths, query, key, value, *more = refs[:inputs]
    out, sums, *near = refs[inputs:]
    program = _Program(kind, numbers, lengths, query, more, near)

    def text(i: Any) -> None:
        q, k, turned = query[i], program.heads.forward(key[i], KEY), program.heads.forward(value[i], VALUE).T
        if kind.drops_values:
            turned *= program.values_kept(i).astype(turned.dtype)
        seen, mixed = program.seen(i), []
        for h in range(kind.together):
            logits = program.logits(k, program.query(q, h), h, seen)
            most = logits.max(axis=0, keepdims=True)
            weights = jnp.exp(logits - most)
            total = weights.sum(axis=0, keepdims=True)
            sums[i, h : h + 1] = most + jnp.log(total)
            if kind.drops_each:
                weights = jnp.where(program.kept(i, h), weights, 0.0)
            of_head = turned[program.dimensions(h)]
            mixed.append(_dot(of_head, weights.astype(of_head.dtype)) / total)
        mixed = jnp.concatenate(mixed, axis=0).T
        out[i] = (mixed * program.spared if kind.dropout_rate else mixed).astype(out.dtype)

    program.each(text)


def _backward(kind: Kind, inputs: int, *refs) -> None:
    numbers, lengths, query, key, value, gradient, sums, *more = refs[:inputs]
    of_query, of_key, of_value, *refs = refs[inputs:]
    of_scales = refs.pop(0) if any(kind.mapping.normed) else None
    of_bias = refs.pop(0) if len(more) > kind.mapping.inputs else None
    program = _Program(kind, numbers, lengths, query, more, refs)
    for summed in (of_scales, of_bias):
        if summed is not None:

            @pl.when(program.first)
            def _(summed=summed):
                summed[...] = jnp.zeros_like(summed)

    def mapped_back(x: jax.Array, part: int, gradient: jax.Array) -> jax.Array:
        gradient, of_scale = program.heads.backward(x, part, gradient)
        if of_scale is not None:
            of_scales[part : part + 1] += of_scale
        return gradient.astype(x.dtype)

    def text(i: Any) -> None:
        q, g = query[i], gradient[i]
        k, v = program.heads.forward(key[i], KEY), program.heads.forward(value[i], VALUE)
        seen, turned = program.seen(i), k.T
        if kind.drops_values:
            values_kept = program.values_kept(i).T
            v *= values_kept.astype(v.dtype)
        d_query, d_key, d_value = [], 0.0, 0.0
        for h in range(kind.together):
            own, own_g = program.query(q, h), program.own(g, h)
            weights = jnp.exp(program.logits(k, own, h, seen) - sums[i, h : h + 1])
            d_weights, used = _dot(v, own_g, turned=True), weights
            if kind.drops_each:
                kept = program.kept(i, h)
                d_weights, used = jnp.where(kept, d_weights, 0.0), jnp.where(kept, weights, 0.0)
            d_value += _dot(used.astype(v.dtype), own_g)
            d_logits = weights * (d_weights - (weights * d_weights).sum(axis=0, keepdims=True))
            if of_bias is not None:
                of_bias[h] += d_logits
            d_logits = d_logits.astype(q.dtype)
            d_key += _dot(d_logits, own)
            d_query.append(_dot(turned[program.dimensions(h)], d_logits))
        if kind.group == 1:
            for h, of_head in enumerate(d_query):
                lanes = slice(h * kind.head_dim, (h + 1) * kind.head_dim)
                d_own = of_head.T * (program.spared * kind.scale)
                of_query[i, :, lanes] = mapped_back(q[:, lanes], QUERY, d_own)
        else:
            of_query[i] = (jnp.concatenate(d_query, axis=0).T * (program.spared * kind.scale)).astype(q.dtype)
        of_key[i] = mapped_back(key[i], KEY, d_key * (program.spared * kind.rest))
        d_value *= program.spared
        d_value = d_value * values_kept if kind.drops_values else d_value
        of_value[i] = mapped_back(value[i], VALUE, d_value)

    program.each(text)


class _Program:
    """The texts and heads of one program, for the forward and the backward kernel."""

    def __init__(self, kind: Kind, numbers, lengths, query, more, near):
        self.kind, self.numbers, self.lengths, self.near = kind, numbers, lengths, near
        maps = kind.mapping.inputs
        self.heads, self.bias = HeadMap(kind.mapping, more[:maps]), more[maps] if len(more) > maps else None
        self.texts, self.length, self.width = query.shape
        self.first_head, self.first_text = pl.program_id(0) * kind.together, pl.program_id(1) * self.texts
        self.first = pl.program_id(1) == 0
        self.spared = 1.0 / (1.0 - kind.dropout_rate)
        if kind.near:
            pl.when(self.first)(self._write_near)

    def each(self, text: Callable[[Any], None]) -> None:
        """Calls `text` for every text, several short texts per iteration to keep the units busy."""
        at_once = max(n for n in (1, 2, 4) if self.texts % n == 0 and (n == 1 or n * self.length <= 256))

        def turn(i: jax.Array, _: None) -> None:
            for j in range(at_once):
                text(i * at_once + j)

        jax.lax.fori_loop(0, self.texts // at_once, turn, None)

    def dimensions(self, head: int) -> slice:
        """Returns the rows of keys or values [group K, S] that belong to a query head."""
        first = head % self.kind.group * self.kind.head_dim
        return slice(first, first + self.kind.head_dim)

    def query(self, x: jax.Array, head: int) -> jax.Array:
        """Returns the mapped query of a head, times `folded`."""
        if self.kind.group > 1:
            return self.own(x, head, self.kind.folded)
        x = self.heads.forward(self.own(x, head), QUERY)
        return x if self.kind.folded == 1.0 else x * jnp.asarray(self.kind.folded, x.dtype)

    def own(self, x: jax.Array, head: int, factor: float = 1.0) -> jax.Array:
        """Returns the part of x [L, together K] of one head, or all of x with 0 in other heads' lanes."""
        if self.kind.group == 1:
            return x[:, head * self.kind.head_dim : (head + 1) * self.kind.head_dim]
        lane = places((1, self.width), 1)
        first = head * self.kind.head_dim
        inside = (lane >= first) & (lane < first + self.kind.head_dim)
        return x * jnp.where(inside, factor, 0.0).astype(x.dtype)

    def seen(self, i: Any) -> jax.Array:
        """Returns [S, 1]: 0 at visible positions, a large negative number at the others."""
        return jnp.where(places((self.length, 1), 0) < self.lengths[self.first_text + i], 0.0, _UNSEEN)

    def logits(self, key: jax.Array, query: jax.Array, head: int, seen: jax.Array) -> jax.Array:
        logits = _dot(key, query, turned=True)
        if self.kind.rest != 1.0:
            logits *= self.kind.rest
        if self.bias is not None:
            logits += self.bias[head]
        if self.kind.near:
            logits += self.near[0][...]
        return logits + seen

    def _write_near(self) -> None:
        shape = (self.length, self.length)
        distance = places(shape, 1) - places(shape, 0)
        near = distance >= 0 if self.kind.causal else None
        if self.kind.windowed:
            inside = jnp.abs(distance) <= self.numbers[4]
            near = inside if near is None else near & inside
        self.near[0][...] = jnp.where(near, 0.0, _UNSEEN)

    def kept(self, i: Any, head: int) -> jax.Array:
        """Returns a mask [S, T] of the weights that dropout keeps; any mesh and both passes have the same."""
        return kept(*self._dropout_words(i, head), self.length, self.kind.dropout_rate)

    def values_kept(self, i: Any) -> jax.Array:
        """Returns [group K, S]: 1 for values that dropout keeps, else 0."""
        rows = []
        for head in range(self.kind.group):
            row = values_kept(*self._dropout_words(i, head), self.length, self.kind.dropout_rate)
            rows.append(jnp.broadcast_to(jnp.where(row, 1.0, 0.0), (self.kind.head_dim, self.length)))
        return jnp.concatenate(rows, axis=0)

    def _dropout_words(self, i: Any, head: int) -> tuple[jax.Array, ...]:
        text, of = self.numbers[2] + self.first_text + i, self.numbers[3] + self.first_head + head
        return self.numbers[0], self.numbers[1], text, of


def _dot(left: jax.Array, right: jax.Array, *, turned: bool = False) -> jax.Array:
    """Returns the product in float32, with the right operand transposed if `turned`."""
    contracted = ((1,), (1 if turned else 0,))
    return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=jnp.float32)

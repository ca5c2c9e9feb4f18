"""Folds all tiles of a matrix of logits into totals, on one device or on a ring of devices.

On a mesh rows stay on their device. Shards of columns and their totals go round a ring of the devices that
split the batch, so that a device never holds more than a few shards.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxir.losses import _rows
from jaxir.losses._ring import Ring


class Sum(NamedTuple):
    """A sum of exponentials, exp(top) * total; -inf and 0 for an empty sum.

    `top` and `total` are stored separately, because float32 rounds a log-sum-exp near 100 to 4e-6. The
    gradient of a nearly learnt pair is the difference of its softmax from 1, so it would have the same error.
    """

    top: jax.Array
    total: jax.Array

    def join(self, other: "Sum") -> "Sum":
        top = jnp.maximum(self.top, other.top)
        base = finite(top)
        return Sum(top, self.total * jnp.exp(self.top - base) + other.total * jnp.exp(other.top - base))

    def log(self) -> jax.Array:
        some = self.total > 0
        return jnp.where(some, jnp.log(jnp.where(some, self.total, 1.0)) + self.top, -jnp.inf)


def finite(top: jax.Array) -> jax.Array:
    """Returns `top` with 0 for -inf, so that x - top is never NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


# The totals that a sweep accumulates, the initial value of each, and how two parts of a total are merged.
Totals = dict[str, Any]
ROW_TOTALS = {
    "pairs": ("sum", "hardest", "positive"),
    "tower": ("sum",),
    "negatives": ("sum", "hardest"),
}
_EMPTY = {"sum": Sum(-math.inf, 0.0), "hardest": -math.inf, "positive": 0.0, "gradient": 0.0}
_JOIN = {"sum": Sum.join, "hardest": jnp.maximum, "positive": jnp.add, "gradient": jnp.add}

# JAX's names of precisions: TPUs compute a float32 product as six, three or one bfloat16 products.
GradientPrecision = Literal["highest", "high", "default"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The pass over one group of columns of a softmax.

    In kind "pairs" column i is row i's own and always kept. In "tower" rows and columns are the same vectors,
    a row skips itself, and a tile also serves as its transpose. In "negatives" no column is a row's own. With
    `both`, columns get log-sum-exps too. `gradient_precision` applies to products of slopes with vectors;
    logits always have the highest precision.
    """

    kind: Literal["pairs", "tower", "negatives"]
    temperature: float
    block_size: int
    both: bool
    ring: Ring | None
    gradient_precision: GradientPrecision = "highest"


class Side(NamedTuple):
    """The rows or the columns: one device's shard, or a block of it.

    Attributes:
      vectors: [L, D], the embeddings.
      keys: arrays [L, 2]; a row and a column with equal keys are masked.
      extra: arrays [L] that the tile function needs, by name.
      guide: [L, G], the guide's vectors; None without a guide.
      limit: [L], the largest similarity, by the guide, to a column (or row) that is kept; None without a
        guide, and for hard negatives.
      number: [L], int32, positions in the whole batch; None for a whole shard.
      fresh: [L], False for rows that are also in the previous block; None if blocks do not overlap.
    """

    vectors: jax.Array
    keys: tuple[jax.Array, ...] | None
    extra: dict[str, jax.Array] | None = None
    guide: jax.Array | None = None
    limit: jax.Array | None = None
    number: jax.Array | None = None
    fresh: jax.Array | None = None


class Masks(NamedTuple):
    """Masks of a tile, [b, c].

    Attributes:
      of_rows: which columns a row's sum includes.
      of_columns: which rows a column's sum includes; differs from `of_rows` only by a guide.
      own: which columns are a row's own; None: none.
    """

    of_rows: jax.Array
    of_columns: jax.Array
    own: jax.Array | None


Tile = Callable[[Side, Side, Masks], tuple[Totals, Totals]]


def fold(
    sweep: Sweep,
    rows: Side,
    columns: Side,
    row_names: tuple[str, ...],
    column_names: tuple[str, ...],
    tile: Tile,
) -> tuple[Totals, Totals]:
    """Folds all tiles into totals, on each device of the ring for its own rows."""

    def start(side: Side, names: tuple[str, ...]) -> Totals:
        def full(name: str, value: float) -> jax.Array:
            return jnp.full_like(side.vectors if name == "gradient" else side.vectors[:, 0], value)

        return {n: jax.tree.map(functools.partial(full, n), _EMPTY[n]) for n in names}

    def on_device(rows: Side, columns: Side) -> tuple[Totals, Totals]:
        start_rows, start_columns = start(rows, row_names), start(columns, column_names)
        if sweep.ring is None:
            return _fold_shard(sweep, 0, 0, rows, columns, start_rows, start_columns, tile)
        return _ring_sweep(sweep, sweep.ring, rows, columns, start_rows, start_columns, tile)

    if sweep.ring is None:
        return on_device(rows, columns)
    split = PartitionSpec(sweep.ring.axes)
    return jax.shard_map(on_device, mesh=sweep.ring.mesh, in_specs=split, out_specs=split)(rows, columns)


def _ring_sweep(
    sweep: Sweep, ring: Ring, rows: Side, columns: Side, row_totals: Totals, empty: Totals, tile: Tile
) -> tuple[Totals, Totals]:
    """Passes every shard of columns, then its totals, round the ring; the totals end on their own device.

    At step k device d has the columns of device d + k. The data that a step sends do not depend on its
    tiles, so transfers and arithmetic overlap.
    """
    me = jax.lax.axis_index(ring.axes)
    # Two shards of one tower need to meet only once, so half of the ring is enough.
    steps = ring.size // 2 + 1 if sweep.kind == "tower" else ring.size

    def step(k: jax.Array, carry: tuple[Side, Totals, Totals]) -> tuple[Side, Totals, Totals]:
        shard, row_totals, column_totals = carry
        following = ring.pass_on(shard, -1)
        column_totals = ring.pass_on(column_totals, -1)
        row_totals, part = _fold_shard(sweep, k, me, rows, shard, row_totals, empty, tile)
        return following, row_totals, _join(column_totals, part)

    _, row_totals, column_totals = jax.lax.fori_loop(0, steps, step, (columns, row_totals, empty))
    return row_totals, ring.pass_on(column_totals, steps - 1)


def _fold_shard(
    sweep: Sweep,
    step: jax.Array | int,
    me: jax.Array | int,
    rows: Side,
    columns: Side,
    row_totals: Totals,
    column_totals: Totals,
    tile: Tile,
) -> tuple[Totals, Totals]:
    """Folds the tiles of one device's rows and one shard of columns into totals."""
    shards = 1 if sweep.ring is None else sweep.ring.size
    row_size, row_blocks = _block_size(len(rows.vectors), sweep.block_size)
    column_size, column_blocks = _block_size(len(columns.vectors), sweep.block_size)
    first_row = me * len(rows.vectors)
    first_column = (me + step) % shards * len(columns.vectors)
    # For a tower, a shard visits its tiles with itself from the diagonal on. Two shards half a ring apart
    # visit each other in the same step: one takes the tiles from the diagonal on, the other the tiles below.
    opposite = 2 * step == shards
    skip = jnp.where(opposite & (2 * me >= shards), 1, 0)
    triangular = (step == 0) | opposite

    def row_block(a: jax.Array, carry: tuple[Totals, Totals]) -> tuple[Totals, Totals]:
        row_totals, column_totals = carry
        row = _block(rows, a, row_size, first_row)

        def column_block(b: jax.Array, carry: tuple[Totals, Totals]) -> tuple[Totals, Totals]:
            of_rows, column_totals = carry
            column = _block(columns, b, column_size, first_column)
            row_part, column_part = tile(row, column, _masks(sweep, row, column, step))
            total = _join(_slice(column_totals, b, column_size), column_part)
            return _join(of_rows, row_part), _write(column_totals, total, b, column_size)

        begin = jnp.where(triangular, a + skip, 0) if sweep.kind == "tower" else 0
        of_rows, column_totals = jax.lax.fori_loop(
            begin, column_blocks, column_block, (_slice(row_totals, a, row_size), column_totals)
        )
        return _write(row_totals, of_rows, a, row_size), column_totals

    return jax.lax.fori_loop(0, row_blocks, row_block, (row_totals, column_totals))


def _masks(sweep: Sweep, row: Side, column: Side, step: jax.Array | int) -> Masks:
    fresh = jnp.ones((len(row.vectors), len(column.vectors)), bool)
    if row.fresh is not None:
        fresh &= row.fresh[:, None]
    if column.fresh is not None:
        fresh &= column.fresh[None, :]
    keep = fresh
    for a, b in zip(row.keys, column.keys, strict=True):
        keep &= ~_rows.equal(a, b)
    own = None
    if sweep.kind == "tower":
        keep &= (row.number[:, None] < column.number[None, :]) | (step != 0)
    elif sweep.kind == "pairs":
        own = fresh & (row.number[:, None] == column.number[None, :])
        keep |= own
    if row.guide is None:
        return Masks(keep, keep, own)
    similarity = _rows.logits(row.guide, column.guide, 1.0)
    of_rows, of_columns = keep & (similarity <= row.limit[:, None]), keep
    if sweep.both:
        of_columns = keep & (similarity <= column.limit[None, :])
    if own is not None:
        of_rows, of_columns = of_rows | own, of_columns | own
    return Masks(of_rows, of_columns, own)


def _block_size(length: int, most: int) -> tuple[int, int]:
    """Returns (size, number) of the equal blocks, of at most `most` rows, that cover `length` rows."""
    number = -(-length // most)
    return -(-length // number), number


def _block(side: Side, index: jax.Array, size: int, first: jax.Array | int) -> Side:
    """Returns a block of a shard whose row 0 is row `first` of the batch."""
    length = len(side.vectors)
    block = _slice(side, index, size)
    at = _at(length, index, size) + jnp.arange(size, dtype=jnp.int32)
    return block._replace(number=first + at, fresh=None if length % size == 0 else at >= index * size)


def _at(length: int, index: jax.Array, size: int) -> jax.Array:
    """Returns where a block begins. The last block ends with the array and may overlap the previous block."""
    return jnp.minimum(index * size, length - size)


def _slice(tree: Any, index: jax.Array, size: int) -> Any:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, _at(len(x), index, size), size, axis=0), tree
    )


def _write(tree: Any, block: Any, index: jax.Array, size: int) -> Any:
    return jax.tree.map(
        lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, _at(len(x), index, size), axis=0),
        tree,
        block,
    )


def _join(a: Totals, b: Totals) -> Totals:
    return {name: _JOIN[name](a[name], b[name]) for name in a}

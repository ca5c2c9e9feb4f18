"""Log-sum-exps of all rows against all columns, tile by tile: no [B, B] array exists, forward or backward.

The forward sweep folds each tile of logits into totals, one number per row and column (online softmax; Cheng
et al. 2024, arXiv 2410.17243). The backward sweep recomputes the tiles and folds them into gradients [B, D].
"""

import functools

import jax
import jax.numpy as jnp

from jaxir.losses import _rows
from jaxir.losses._tiles import ROW_TOTALS, Masks, Side, Sum, Sweep, Totals, finite, fold


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_sums(sweep: Sweep, rows: Side, columns: Side) -> tuple[Totals, Totals]:
    """Returns the totals of rows [B] and of columns [C] for whole sides, with vectors [B, D] and [C, D].

    Rows have `log_sum`, the log of the sum over columns of exp(row . column / temperature), -inf without any
    column. Except for the kind "tower", rows have `hardest`, the largest logit with another row's column,
    without gradient. "pairs" also have `positive`, the logit with the row's own column. Columns have
    `log_sum` if `both` is set, except for "tower". A row masks columns whose key equals its own, and those
    that the guide finds too similar (see `Guide`). Only the vectors have a gradient.
    """
    return _forward(sweep, rows, columns)[0]


# Compiled once for each kind of sweep, even if the loss is called without jit.
@functools.partial(jax.jit, static_argnums=0)
def _forward(sweep: Sweep, rows: Side, columns: Side):
    def tile(row: Side, column: Side, masks: Masks) -> tuple[Totals, Totals]:
        x, own = _rows.logits(row.vectors, column.vectors, sweep.temperature), masks.own
        of_rows: Totals = {"sum": _sum(x, masks.of_rows, axis=1)}
        if sweep.kind != "tower":
            others = masks.of_rows if own is None else masks.of_rows & ~own
            of_rows["hardest"] = jnp.max(jnp.where(others, x, -jnp.inf), axis=1)
        if own is not None:
            of_rows["positive"] = jnp.sum(jnp.where(own, x, 0.0), axis=1)
        return of_rows, {"sum": _sum(x, masks.of_columns, axis=0)} if sweep.both else {}

    of_rows, of_columns = fold(
        sweep,
        rows,
        columns,
        ROW_TOTALS[sweep.kind],
        ("sum",) if sweep.both else (),
        tile,
    )
    row_sum, column_sum = of_rows.pop("sum"), of_columns.pop("sum", None)
    if sweep.kind == "tower":
        row_sum = column_sum = row_sum.join(column_sum)
    elif column_sum is not None:
        of_columns["log_sum"] = column_sum.log()
    of_rows["log_sum"] = row_sum.log()
    saved = rows, columns, row_sum, column_sum, of_rows.get("positive")
    return (of_rows, of_columns), saved


@functools.partial(jax.jit, static_argnums=0)
def _backward(sweep: Sweep, saved, cotangents: tuple[Totals, Totals]):
    rows, columns, row_sum, column_sum, positive = saved
    of_rows, of_columns = cotangents
    row_extra = _softmax_extra(row_sum, of_rows["log_sum"])
    if sweep.kind == "pairs":
        row_extra |= {"positive": positive, "positive_gradient": of_rows["positive"]}
    column_extra = {}
    if sweep.both:
        of_sum = of_rows if sweep.kind == "tower" else of_columns
        column_extra = _softmax_extra(column_sum, of_sum["log_sum"])

    def tile(row: Side, column: Side, masks: Masks) -> tuple[Totals, Totals]:
        x, own = _rows.logits(row.vectors, column.vectors, sweep.temperature), masks.own
        slope = jnp.zeros_like(x)
        if own is not None:
            # Add the positives before the product: if the softmax is near 1 the terms nearly cancel, and
            # the rounding errors of two products would dominate the difference.
            x = jnp.where(own, row.extra["positive"][:, None], x)
            slope = jnp.where(own, row.extra["positive_gradient"][:, None], 0.0)
        softmax = jnp.exp(x - row.extra["top"][:, None]) * row.extra["gradient"][:, None]
        softmax = jnp.where(masks.of_rows, softmax, 0.0)
        if sweep.both:
            of_column = jnp.exp(x - column.extra["top"][None, :]) * column.extra["gradient"][None, :]
            softmax += jnp.where(masks.of_columns, of_column, 0.0)
        slope += softmax
        # `gradient_precision` is by default "highest", as for the gradient without a block_size.
        product = functools.partial(jnp.matmul, precision=sweep.gradient_precision)
        return {"gradient": product(slope, column.vectors)}, {"gradient": product(slope.T, row.vectors)}

    of_rows, of_columns = fold(
        sweep,
        rows._replace(extra=row_extra),
        columns._replace(extra=column_extra),
        ("gradient",),
        ("gradient",),
        tile,
    )
    gradients = (of_side["gradient"] / sweep.temperature for of_side in (of_rows, of_columns))
    return tuple(Side(gradient, None, None) for gradient in gradients)


log_sums.defvjp(_forward, _backward)


def _sum(x: jax.Array, keep: jax.Array, *, axis: int) -> Sum:
    x = jnp.where(keep, x, -jnp.inf)
    top = jnp.max(x, axis=axis)
    return Sum(top, jnp.sum(jnp.exp(x - jnp.expand_dims(finite(top), axis)), axis=axis))


def _softmax_extra(sum_: Sum, gradient: jax.Array) -> dict[str, jax.Array]:
    """Returns `top` and `gradient`, so that exp(x - top) * gradient is the gradient of logit x."""
    some = sum_.total > 0
    scaled = jnp.where(some, gradient / jnp.where(some, sum_.total, 1.0), 0.0)
    return {"top": jnp.where(some, sum_.top, jnp.inf), "gradient": scaled}

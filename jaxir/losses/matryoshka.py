"""Matryoshka representation learning: a vector's first dimensions can be used as a shorter vector."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, NotNegativeNumber
from jaxir.losses._types import Metrics, Negatives, Scalar, Vectors
from jaxir.losses.in_batch import in_batch_softmax

SMALLEST = 8  # the fewest dimensions in the paper


@checked_shapes
def matryoshka(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None = None,
    *,
    loss: Callable[..., tuple[Scalar, Metrics]] = in_batch_softmax,
    dimensions: Sequence[Count] | None = None,
    weights: Sequence[NotNegativeNumber] | None = None,
    normalize: bool = True,
    **others: Any,
) -> tuple[Scalar, Metrics]:
    """A weighted sum of a loss over the first d dimensions (Kusupati et al. 2022, arXiv:2205.13147, eq. 1).

        sum_d c_d loss(q[:d] / |q[:d]|, p[:d] / |p[:d]|)

    Args:
      loss: any loss of this package, with its settings bound.
      dimensions: the numbers of dimensions d; None: D, D / 2, D / 4, ... down to 8, as in the paper.
      weights: the weight c_d of each of the `dimensions`; None: 1, as in the paper.
      normalize: whether shortened vectors are normalised to length 1, as cosine needs it; False for inner
        products. Vectors of full length are never changed.
      **others: further arguments of the loss: keys of texts, a teacher's scores.

    Returns:
      The sum, and metrics: the loss's metrics for the most dimensions under their own names, `loss_at_d`, and
        `accuracy_at_d` if the loss has an accuracy.
    """
    width = query.shape[-1]
    if dimensions is None:
        dimensions = [width >> n for n in range(width.bit_length()) if not n or width >> n >= SMALLEST]
    _check(dimensions, width, weights)
    total, metrics = jnp.float32(0), {}
    for number, dimension in enumerate(dimensions):
        cut = [x if x is None else _first(x, dimension, normalize) for x in (query, passage, negatives)]
        value, found = loss(*cut, **others)
        total += value * (1.0 if weights is None else weights[number])
        metrics |= found if dimension == max(dimensions) else {}
        metrics[f"loss_at_{dimension}"] = value
        if "accuracy" in found:
            metrics[f"accuracy_at_{dimension}"] = found["accuracy"]
    return total, metrics


def _first(x: Float32[Array, "*B D"], dimension: int, normalize: bool) -> Float32[Array, "*B d"]:
    if dimension == x.shape[-1]:
        return x
    x = x[..., :dimension]
    if not normalize:
        return x
    # A row of zeros stays zero and has a finite gradient.
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-24))


def _check(dimensions: Sequence[int], width: int, weights: Sequence[float] | None) -> None:
    for dimension in dimensions:
        if not 1 <= dimension <= width:
            raise UserError(
                f"dimensions must lie between 1 and {width}, the vectors' length, not {dimension}"
            )
    if not dimensions:
        raise UserError("dimensions is empty: give at least one, such as [64, 128]")
    if len(set(dimensions)) < len(dimensions):
        raise UserError(f"dimensions has a number twice: give each once, not {list(dimensions)}")
    if weights is not None and len(weights) != len(dimensions):
        raise UserError(f"weights must have {len(dimensions)} numbers, like dimensions, not {len(weights)}")
    if weights is not None and not any(weights):
        raise UserError("all weights are 0, so the loss would be 0; give at least one positive weight")

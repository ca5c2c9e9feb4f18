"""What a step keeps for its backward pass, by arithmetic on its shapes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from jaxir.planning.program import Step


class Kept(NamedTuple):
    """Bytes on each device.

    Attributes:
      gradients: of the parameters, as these are sharded.
      activations: what the forward pass leaves for the backward pass.
      largest: the largest single array among those.
    """

    gradients: int
    activations: int
    largest: int


def kept(step: Step) -> Kept:
    """Returns what differentiating the loss stores, as JAX writes it; a compiler may keep less.

    An array with the batch in it is taken to be split as the batch is. Parameters that are kept are not
    counted again.
    """
    batch_size = next(iter(step.batch.values())).shape[0]
    split = step.partitioner.batch_divisor()
    shapes = {leaf.shape for leaf in jax.tree.leaves((step.state.params, step.state.auxiliary))}

    def backward(trained: Any, state: Any, batch: Any) -> Any:
        return jax.vjp(lambda t: step.forward(t, state, batch)[0], trained)[1]

    with step.partitioner():
        residuals = jax.tree.leaves(jax.eval_shape(backward, step.trained, step.state, step.batch))
    sizes = [0]
    for leaf in residuals:
        if leaf.shape in shapes:
            continue
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        holds_batch = any(n and n % batch_size == 0 for n in leaf.shape)
        sizes.append(size // split if holds_batch else size)
    gradients = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(step.trained)
    )
    return Kept(gradients, sum(sizes), max(sizes))

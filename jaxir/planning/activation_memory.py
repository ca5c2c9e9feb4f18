"""Memory that a step keeps for its backward pass, computed from shapes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from jaxir.planning.program import Step, bytes_of


class Kept(NamedTuple):
    """Bytes on each device."""

    gradients: int  # of the sharded parameters
    activations: int  # kept by the forward pass for the backward pass
    largest: int  # the largest single array of the activations


def kept(step: Step) -> Kept:
    """Returns what differentiating the loss stores, as JAX traces it; a compiler may keep less.

    Arrays with a batch dimension count as split like the batch. Parameters do not count.
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
    return Kept(bytes_of(step.trained), sum(sizes), max(sizes))

"""Layers between a vector and its training loss, which are discarded after training (Chen et al. 2020)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32

from jaxir.core.shapes import checked_shapes
from jaxir.models import layers


class BatchNormProjector(nnx.Module):
    """Linear to 2 D, BatchNorm, ReLU, linear to D, BatchNorm without scale and bias (Chuang 2024, app. A.1).

    Mean and variance are those of the whole batch, over all devices. Evaluation uses their running averages
    (momentum 0.9). Kernels start from N(0, 0.02^2).
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        how = {"use_bias": False, "dtype": "float32", "rngs": rngs}
        self.inner = layers.Linear(width, 2 * width, axes=("embed", "mlp"), **how)
        self.outer = layers.Linear(2 * width, width, axes=("mlp", "embed"), **how)
        of_batch = {"momentum": 0.9, "epsilon": 1e-5, "use_fast_variance": False, "rngs": rngs}
        self.inner_norm = nnx.BatchNorm(2 * width, **of_batch)
        self.outer_norm = nnx.BatchNorm(width, use_bias=False, use_scale=False, **of_batch)

    @checked_shapes
    def __call__(self, x: Float32[Array, "*rows D"], *, training: bool) -> Float32[Array, "*rows D"]:
        how = {"use_running_average": not training}
        hidden = jax.nn.relu(self.inner_norm(self.inner(x), **how))
        return self.outer_norm(self.outer(hidden), **how)


class TanhProjector(nnx.Module):
    """BERT's pooler, as in SimCSE: one dense layer and tanh, D -> D. The kernel starts from N(0, 0.02^2)."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.dense = layers.Linear(width, width, axes=("embed", None), dtype="float32", rngs=rngs)

    @checked_shapes
    def __call__(self, x: Float32[Array, "*rows D"], *, training: bool) -> Float32[Array, "*rows D"]:
        return jnp.tanh(self.dense(x))

"""Gated feed-forward layers by the kernels of `mlp_kernel.py`: differentiable, on a mesh that splits texts.

The kernels are imported in functions, because Pallas takes 0.2 s to import and few machines have a TPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jaxir.models import layers
from jaxir.runtime.partitioning import Partitioner

# `Device.device_kind` of TPUs whose chips have 128 MiB of memory of their own.
_CHIPS = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e", "cpu")
_ACTIVATIONS = ("gelu_tanh", "silu")


def takes(mlp: Any, norm: Any, x: jax.Array, partitioner: Partitioner | None) -> bool:
    """Returns whether the kernels support a `blocks.FeedForward` of the normalised x [B, L, E]."""
    if partitioner is None or not partitioner.fused_attention or not partitioner.on_tpu:
        return False
    if not isinstance(norm, layers.RMSNorm) or mlp.wi_1 is None or x.dtype != jnp.bfloat16:
        return False
    from jaxir.models import mlp_kernel

    dense = (mlp.wi_0, mlp.wi_1, mlp.wo)
    ranks = [d.adapter.down.shape[-1] for d in dense if d.adapter is not None]
    width, units = mlp.wi_0.kernel.shape
    rows = x.shape[0] * x.shape[1] // partitioner.batch_divisor()
    return (
        partitioner.mesh.devices.flat[0].device_kind in _CHIPS
        and partitioner.mesh.shape["tensor"] == 1
        and x.shape[0] % partitioner.batch_divisor() == 0
        and mlp.activation in _ACTIVATIONS
        and all(d.bias is None and d.scales is None for d in dense)
        and width % 128 == units % 128 == 0
        and mlp_kernel.fits((rows, width), units, max(ranks, default=0))
    )


def run(mlp: Any, norm: Any, x: jax.Array, *, added: bool, partitioner: Partitioner) -> jax.Array:
    """Returns mlp(norm(x)) for x [B, L, E], plus x if `added`, if `takes` is True."""
    from jaxir.models.mlp_kernel import Dense, Kind

    dense, factors = [], []
    for layer in (mlp.wi_0, mlp.wi_1, mlp.wo):
        adapter = layer.adapter
        more = () if adapter is None else (layers.weight(p, layer.dtype) for p in (adapter.down, adapter.up))
        dense.append(Dense(layers.weight(layer.kernel, layer.dtype), *more))
        factors.append(None if adapter is None else adapter.factor)
    kind = Kind(mlp.activation, norm.epsilon, added, tuple(factors), interpret=partitioner.on_cpu)
    x = checkpoint_name(x, layers.FUSED)
    return _run(kind, partitioner, x, norm.multiplier()[None], dense)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(kind, partitioner, x, scale, dense):
    def run(x, scale, dense):
        from jaxir.models import mlp_kernel

        return mlp_kernel.forward(x.reshape(-1, x.shape[2]), scale, dense, kind).reshape(x.shape)

    return _sharded(partitioner, run, (True, False, False), True)(x, scale, dense)


def _forward(kind, partitioner, x, scale, dense):
    given = jax.tree.map(lambda x: x.value, (x, scale, dense), is_leaf=lambda x: hasattr(x, "perturbed"))
    # An empty tuple says that kernels are trained: residuals can hold no static values.
    trained = () if any(layer.kernel.perturbed for layer in dense) else None
    return _run(kind, partitioner, *given), (*given, trained)


def _backward(kind, partitioner, kept, gradient):
    *given, trained = kept
    kind = dataclasses.replace(kind, trained=trained is not None)
    if isinstance(gradient, SymbolicZero):
        gradient = jnp.zeros(gradient.shape, gradient.dtype)
    axes = tuple(name for name in partitioner.mesh.axis_names if partitioner.mesh.shape[name] > 1)

    def run(x, scale, dense, gradient):
        from jaxir.models import mlp_kernel

        x2d, gradient = (a.reshape(-1, a.shape[2]) for a in (x, gradient))
        of_x, of_scale, of_dense = mlp_kernel.backward(x2d, scale, dense, gradient, kind)
        # Devices exchange gradients of weights in the weights' type, as those of other layers.
        sums = of_scale, jax.tree.map(lambda of: of.astype(x.dtype), of_dense)
        return of_x.reshape(x.shape), *(jax.lax.psum(sums, axes) if axes else sums)

    split = (True, False, False, True)
    # An untrained kernel has no gradient (None).
    return _sharded(partitioner, run, split, (True, False, False))(*given, gradient)


_run.defvjp(_forward, _backward, symbolic_zeros=True)


def _sharded(partitioner: Partitioner, run: Any, ins: Any, outs: Any) -> Any:
    """Maps `run` over the devices; True stands for arrays [B, L, E], False for arrays that are not split."""
    of_rows = partitioner.spec(("batch", "length", "activation_embed"))
    specs = jax.tree.map(lambda split: of_rows if split else PartitionSpec(), (ins, outs))
    return jax.shard_map(run, mesh=partitioner.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

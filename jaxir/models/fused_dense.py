"""Dense layers by the kernels of `dense_kernel.py`: differentiable, on a mesh that splits texts.

The kernels are imported in functions, because Pallas takes 0.2 s to import and few machines have a TPU.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jaxir.models import layers
from jaxir.runtime.partitioning import Partitioner, in_force

# `Device.device_kind` of TPUs whose chips have 128 MiB of memory of their own.
_CHIPS = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e", "cpu")


def feeds(mlp: Any, norm: Any, x: jax.Array, partitioner: Partitioner | None) -> bool:
    """Returns whether a kernel supports a `blocks.FeedForward` of the normalised x [B, L, E]."""
    if mlp.wi_1 is None or not isinstance(norm, layers.RMSNorm):
        return False
    return _takes((mlp.wi_0, mlp.wi_1, mlp.wo), x, partitioner, mlp.activation)


def feed(mlp: Any, norm: layers.RMSNorm, x: jax.Array, *, added: bool, partitioner: Partitioner) -> jax.Array:
    """Returns mlp(norm(x)) of x [B, L, E], plus x if `added`; only to be called where `feeds` is True."""
    x = checkpoint_name(x, layers.FUSED)
    how = {"activation": mlp.activation, "added": added, "partitioner": partitioner}
    (y,) = _apply([x], norm, (mlp.wi_0, mlp.wi_1, mlp.wo), **how)
    # Without x, the result is the input of another norm, whose backward pass reads it again: keep the result.
    return y if added else checkpoint_name(y, layers.FUSED)


def projects(
    dense: Sequence[layers.Linear], norm: Any, x: jax.Array, partitioner: Partitioner | None
) -> bool:
    """Returns whether a kernel is of use for layers of the same x [B, L, I], and supports them.

    Without adapters a kernel is of no use, because XLA computes the layers as fast.
    """
    if any(layer.adapter is None for layer in dense) or not isinstance(norm, layers.RMSNorm | None):
        return False
    return _takes(dense, x, partitioner)


def project(
    dense: Sequence[layers.Linear],
    norm: layers.RMSNorm | None,
    x: jax.Array,
    *,
    added: jax.Array | None = None,
    passed: bool = False,
    partitioner: Partitioner,
) -> list[jax.Array]:
    """Returns the results [B, L, O] of layers of norm(x); to be called only if `projects` is True.

    `added` [B, L, O] is added to the first result. With `passed` the last result is x itself, for a residual:
    the kernel adds the residual's gradient to the layers' gradient of x.
    """
    rows = [x] if added is None else [x, added]
    how = {"activation": None, "added": added is not None, "passed": passed, "partitioner": partitioner}
    return _apply(rows, norm, dense, **how)


def apply(layer: layers.Linear, x: jax.Array, added: jax.Array | None = None) -> jax.Array:
    """Returns layer(x) for x [B, L, I], plus `added` if given, by a kernel if one is of use."""
    if projects([layer], None, x, partitioner := in_force()):
        (y,) = project([layer], None, x, added=added, partitioner=partitioner)
        return y if added is not None else checkpoint_name(y, layers.FUSED)
    return layer(x) if added is None else added + layer(x)


def _takes(
    dense: Sequence[layers.Linear],
    x: jax.Array,
    partitioner: Partitioner | None,
    activation: str | None = None,
) -> bool:
    if partitioner is None or not partitioner.fused_attention or not partitioner.on_tpu:
        return False
    from jaxir.models import dense_kernel

    shapes = [layer.kernel.shape for layer in dense]
    ranks = [layer.adapter.down.shape[-1] for layer in dense if layer.adapter is not None]
    split = partitioner.batch_divisor()
    return (
        x.dtype == jnp.bfloat16
        and (activation is None or activation in dense_kernel.UNIT)
        and partitioner.mesh.devices.flat[0].device_kind in _CHIPS
        and partitioner.mesh.shape["tensor"] == 1
        and x.shape[0] % split == 0
        and all(layer.bias is None and layer.scales is None for layer in dense)
        and all(size % 128 == 0 for shape in shapes for size in shape)
        and dense_kernel.fits(x.shape[0] * x.shape[1] // split, shapes, max(ranks, default=0))
    )


def _apply(rows, norm, linears, *, partitioner, **how) -> list[jax.Array]:
    from jaxir.models.dense_kernel import Dense, Kind

    dense, factors = [], []
    for layer in linears:
        adapter = layer.adapter
        more = () if adapter is None else (layers.weight(p, layer.dtype) for p in (adapter.down, adapter.up))
        dense.append(Dense(layers.weight(layer.kernel, layer.dtype), *more))
        factors.append(None if adapter is None else adapter.factor)
    epsilon, scale = (None, None) if norm is None else (norm.epsilon, norm.multiplier()[None])
    kind = Kind(epsilon=epsilon, factors=tuple(factors), interpret=partitioner.on_cpu, **how)
    return _run(kind, partitioner, rows, scale, dense)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(kind, partitioner, rows, scale, dense):
    def run(rows, scale, dense):
        from jaxir.models import dense_kernel

        found = dense_kernel.forward([_flat(x) for x in rows], scale, dense, kind)
        return [y.reshape(*rows[0].shape[:2], -1) for y in found]

    found = _sharded(partitioner, run, (True, False, False), True)(rows, scale, dense)
    return [*found, rows[0]] if kind.passed else found


def _forward(kind, partitioner, rows, scale, dense):
    given = jax.tree.map(lambda x: x.value, (rows, scale, dense), is_leaf=lambda x: hasattr(x, "perturbed"))
    # An empty tuple means that kernels are trained, None that they are not: residuals cannot hold a bool.
    trained = () if any(layer.kernel.perturbed for layer in dense) else None
    rows, scale, dense = given
    return _run(kind, partitioner, rows, scale, dense), (rows[0], scale, dense, trained)


def _backward(kind, partitioner, kept, gradients):
    *given, trained = kept
    kind = dataclasses.replace(kind, trained=trained is not None)
    gradients = [jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g for g in gradients]
    axes = tuple(name for name in partitioner.mesh.axis_names if partitioner.mesh.shape[name] > 1)

    def run(x, scale, dense, gradients):
        from jaxir.models import dense_kernel

        found = dense_kernel.backward(_flat(x), scale, dense, [_flat(g) for g in gradients], kind)
        of_x, of_scale, of_dense = found
        # Devices exchange gradients of weights in the weights' type, as for other layers.
        sums = of_scale, jax.tree.map(lambda of: of.astype(x.dtype), of_dense)
        return of_x.reshape(x.shape), *(jax.lax.psum(sums, axes) if axes else sums)

    split = (True, False, False, True)
    of_x, of_scale, of_dense = _sharded(partitioner, run, split, (True, False, False))(*given, gradients)
    is_second = kind.added and kind.activation is None
    # An untrained kernel has no gradient (None).
    return [of_x, *gradients[:1]] if is_second else [of_x], of_scale, of_dense


_run.defvjp(_forward, _backward, symbolic_zeros=True)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[2])


def _sharded(partitioner: Partitioner, run: Any, ins: Any, outs: Any) -> Any:
    """Maps `run` over the devices; `ins` and `outs` are True for arrays [B, L, E], False for unsplit ones."""
    of_rows = partitioner.spec(("batch", "length", "activation_embed"))
    specs = jax.tree.map(lambda split: of_rows if split else PartitionSpec(), (ins, outs))
    return jax.shard_map(run, mesh=partitioner.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

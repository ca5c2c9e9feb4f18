"""Attention by the kernels of `attention_kernel.py`: differentiable, and split over a mesh.

The kernels are imported in functions, because Pallas takes 0.2 s to import and few machines have a TPU.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxir.models import layers
from jaxir.runtime.partitioning import Partitioner

# Maximum number of tokens per text: a chip's memory must hold several float32 copies of a head's logits.
_LONGEST = 512
# Maximum of L x K x (number of query heads that share a head of keys and are read together): they must also
# fit into a chip's memory.
_LARGEST = 2**19


class _Layout(NamedTuple):
    """The mesh, and the mesh axes that split the batch and the heads."""

    mesh: Mesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    def size(self, axes: tuple[str, ...]) -> int:
        return int(np.prod([self.mesh.shape[axis] for axis in axes], dtype=int))


def takes(query: jax.Array, key: jax.Array, partitioner: Partitioner | None) -> bool:
    """Returns whether the kernels support self-attention of query [B, L, H, K] to key [B, L, G, K]."""
    if partitioner is None or not partitioner.fused_attention or not partitioner.on_tpu:
        return False
    from jaxir.models.attention_kernel import LANES

    _, length, heads, head_dim = query.shape
    layout = _layout(partitioner, query.shape)
    together = max(1, LANES // head_dim)
    shared = _shared(query.shape, key.shape, layout)
    return (
        query.dtype == jnp.bfloat16
        and (*key.shape[:2], key.shape[3]) == (*query.shape[:2], head_dim)
        and heads % key.shape[2] == 0
        and length % 16 == 0
        and length <= _LONGEST
        and length * head_dim * shared <= _LARGEST
        and (head_dim * together) % LANES == 0
        and heads // layout.size(layout.heads) % together == 0
    )


def maps_heads(query: jax.Array) -> bool:
    """Returns whether the kernels normalise and rotate heads [B, L, H, K] of this size."""
    from jaxir.models.attention_kernel import LANES

    return query.shape[3] % LANES == 0


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array,
    bias: jax.Array | None,
    scale: float,
    causal: bool,
    window: int | jax.Array | None,
    dropout_rate: float,
    drop_for_all: bool,
    dropout_key: jax.Array | None,
    partitioner: Partitioner,
    norms: Sequence[layers.RMSNorm | None] = (None, None, None),
    frequencies: jax.Array | None = None,
) -> jax.Array:
    """Computes `attention.attention`, with its arguments; to be called only if `takes` returns True.

    The bias is [1, H, L, L]. If `maps_heads` is True, `norms` are applied to the heads of queries, keys and
    values, then RoPE with `frequencies` [K / 2] to queries and keys. Gradients of a bias and of the norms'
    scales are summed in float32 over the texts of a device, then over all devices.
    """
    from jaxir.models.attention_kernel import Kind
    from jaxir.models.head_kernel import Mapping, rope_table

    shape, layout = query.shape, _layout(partitioner, query.shape)
    shared = 1 if drop_for_all else _shared(shape, key.shape, layout)
    if (heads := shared * key.shape[2]) != shape[2]:
        key, value = (jnp.repeat(x, shape[2] // heads, axis=2) for x in (key, value))
    if window is not None and isinstance(window, int) and window >= shape[1] - 1:
        window = None
    epsilons = {norm.epsilon for norm in norms if norm is not None}
    mapping = Mapping(tuple(norm is not None for norm in norms), *epsilons, rotated=frequencies is not None)
    maps = [] if frequencies is None else [rope_table(frequencies, shape[1])]
    if epsilons:
        scales = [jnp.ones(shape[3:]) if norm is None else norm.multiplier() for norm in norms]
        maps.append(jnp.stack(scales))
    kind = Kind(
        head_dim=shape[3],
        scale=scale,
        shared=shared,
        mapping=mapping,
        causal=causal,
        windowed=window is not None,
        dropout_rate=dropout_rate if dropout_key is not None else 0.0,
        drop_for_all=drop_for_all,
        interpret=partitioner.on_cpu,
    )
    words = jnp.zeros((2,), jnp.int32)
    if kind.dropout_rate:
        words = jax.lax.bitcast_convert_type(jax.random.bits(dropout_key, (2,)), jnp.int32)
    numbers = jnp.concatenate([words, jnp.asarray(0 if window is None else window, jnp.int32)[None]])
    lengths = jnp.maximum(mask.sum(-1, dtype=jnp.int32), 1)
    turned = None if bias is None else bias[0].astype(jnp.float32).swapaxes(1, 2)
    flat = (x.reshape(*shape[:2], -1) for x in (query, key, value))
    return _attend(kind, layout, *flat, turned, lengths, numbers, maps).reshape(shape)


def _shared(query: tuple[int, ...], key: tuple[int, ...], layout: _Layout) -> int:
    """Returns how many query heads share a head of keys in the kernel; 1 if keys must be repeated instead."""
    from jaxir.models.attention_kernel import LANES

    split = key[2] % layout.size(layout.heads) == 0
    return query[2] // key[2] if query[3] % LANES == 0 and split else 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kind, layout, query, key, value, bias, lengths, numbers, maps):
    return _forward(kind, layout, query, key, value, bias, lengths, numbers, maps)[0]


def _forward(kind, layout, query, key, value, bias, lengths, numbers, maps):
    def run(query, key, value, bias, lengths, numbers, maps):
        from jaxir.models import attention_kernel

        numbers = _kernel_numbers(layout, kind, query, numbers)
        return attention_kernel.forward(query, key, value, bias, lengths, numbers, kind, maps)

    rows, of_bias, texts, sums = _specs(layout)
    specs = (rows, rows, rows, of_bias, texts, PartitionSpec(), PartitionSpec())
    out, sums = _sharded(layout, run, specs, (rows, sums))(query, key, value, bias, lengths, numbers, maps)
    out, sums = checkpoint_name(out, layers.FUSED), checkpoint_name(sums, layers.FUSED)
    return out, (query, key, value, bias, lengths, numbers, maps, sums)


def _backward(kind, layout, kept, gradient):
    *_, maps, _ = kept
    has_bias, is_normed = kept[3] is not None, any(kind.mapping.normed)

    def run(query, key, value, bias, lengths, numbers, maps, sums, gradient):
        from jaxir.models import attention_kernel

        numbers = _kernel_numbers(layout, kind, query, numbers)
        given = (query, key, value, bias, lengths, numbers, sums, gradient, kind, maps)
        found = list(attention_kernel.backward(*given))
        of_scales = _summed(found.pop(3).sum(axis=0), layout.batch + layout.heads) if is_normed else None
        of_bias = _summed(found.pop(3) / (1.0 - kind.dropout_rate), layout.batch) if has_bias else None
        return *found, of_bias, of_scales

    rows, of_bias, texts, sums = _specs(layout)
    one = PartitionSpec()
    specs = (rows, rows, rows, of_bias, texts, one, one, sums, rows)
    *found, of_scales = _sharded(layout, run, specs, (rows, rows, rows, of_bias, one))(*kept, gradient)
    of_maps = [jnp.zeros_like(x) for x in maps]
    if is_normed:
        of_maps[-1] = of_scales
    return *found, None, None, of_maps


def _summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


_attend.defvjp(_forward, _backward)


def _layout(partitioner: Partitioner, shape: tuple[int, ...]) -> _Layout:
    spec = partitioner.spec(("batch", "length", "heads", "kv"), shape)
    batch, heads = (
        tuple(n for n in ((part,) if isinstance(part, str) else part or ()) if partitioner.mesh.shape[n] > 1)
        for part in (spec[0], spec[2])
    )
    return _Layout(partitioner.mesh, batch, heads)


def _specs(layout: _Layout) -> tuple[PartitionSpec, ...]:
    """Returns the partition specs of [B, L, H K], of a bias [H, S, T], of [B], and of sums [B, H / together,
    together, L]."""
    batch, heads = layout.batch or None, layout.heads or None
    return (
        PartitionSpec(batch, None, heads),
        PartitionSpec(heads, None, None),
        PartitionSpec(batch),
        PartitionSpec(batch, heads, None, None),
    )


def _sharded(layout: _Layout, run: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    return jax.shard_map(run, mesh=layout.mesh, in_specs=ins, out_specs=outs, check_vma=False)


def _kernel_numbers(layout: _Layout, kind: Any, query: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns a kernel's numbers: words of the key, indices of this device's first text and head, window."""
    first_text = jax.lax.axis_index(layout.batch) * query.shape[0] if layout.batch else 0
    heads = query.shape[2] // kind.head_dim
    first_head = jax.lax.axis_index(layout.heads) * heads if layout.heads else 0
    places = jnp.stack([jnp.asarray(first_text, jnp.int32), jnp.asarray(first_head, jnp.int32)])
    return jnp.concatenate([numbers[:2], places, numbers[2:]])

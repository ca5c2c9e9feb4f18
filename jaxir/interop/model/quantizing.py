"""Quantises a model's kernels and tables while they are read, so that no whole float32 model is needed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.interop.weights.lazy import Index, LazyArray, aligned, loaded
from jaxir.models import layers
from jaxir.models.backbones import Encoder
from jaxir.models.quantized import How, Scheme, dequantize, quantize

Path = tuple[str, ...]
Ends = tuple[tuple[int, int], ...]  # (start, stop) of a part along each axis
_AT_ONCE = 1 << 23  # float32 numbers that are quantised at a time: 32 MiB


def outline(
    graphdef: nnx.GraphDef, state: nnx.State, scheme: Scheme
) -> tuple[nnx.GraphDef, nnx.State, dict[Path, How]]:
    """Quantises the encoders of an abstract model: every kernel, and the tables of tokens.

    Norms, biases, other tables, and the layers after the pooling keep float32.

    Returns:
      The abstract model, and how each parameter (by its path) is quantised. Its scales are beside it.
    """
    model, found = nnx.merge(graphdef, state), {}
    for path, encoder in list(nnx.iter_modules(model)):
        if not isinstance(encoder, Encoder):
            continue
        for inner, module in list(nnx.iter_modules(encoder)):
            name = _quantized_in(module)
            if name is None:
                continue
            p: nnx.Param = getattr(module, name)
            shape, axes = p.get_value().shape, p.get_metadata()["logical_axes"]
            how = How("int8", -1, shape[1]) if name == "embedding" else How.of_kernel(shape[-2], scheme)
            setattr(
                module, name, nnx.Param(jax.ShapeDtypeStruct(how.kept(shape), how.dtype), logical_axes=axes)
            )
            scales = jax.ShapeDtypeStruct(how.blocks(shape), jnp.float32)
            module.scales = nnx.data(nnx.Param(scales, logical_axes=axes))
            found[*map(str, (*path, *inner)), name] = how
    return *nnx.split(model), found


def _quantized_in(module: nnx.Module) -> str | None:
    if isinstance(module, layers.Linear):
        return "kernel"
    is_table = isinstance(module, layers.Embedding)
    return "embedding" if is_table and "vocab" in module.embedding.get_metadata()["logical_axes"] else None


def quantized(value: Any, how: How) -> tuple[Part, Part]:
    """Quantises `value` [..., M, N], which may be lazy; returns quantised numbers and scales, both lazy."""
    both = functools.cache(functools.partial(_quantized, value, how))
    axis = len(value.shape) + how.axis

    def read(number: int, ends: Ends) -> np.ndarray:
        along = tuple(slice(*pair) if i == axis else slice(None) for i, pair in enumerate(ends))
        own = tuple((0, value.shape[i]) if i == axis else pair for i, pair in enumerate(ends))
        return both(own)[number][along]

    shapes = how.kept(value.shape), how.blocks(value.shape)
    numbers, scales = (Part(shape, functools.partial(read, i)) for i, shape in enumerate(shapes))
    return numbers, scales


def rounded(value: Any, how: How) -> LazyArray:
    """Returns `value` [..., M, N] quantised and converted back to float32, as a lazy array."""
    axis = len(value.shape) + how.axis

    def read(index: Index) -> np.ndarray:
        own = [
            (0, n) if i == axis else s.indices(n)[:2]
            for i, (s, n) in enumerate(zip(index, value.shape, strict=True))
        ]
        whole = np.asarray(dequantize(*map(jnp.asarray, _quantized(value, how, tuple(own))), np.float32))
        return whole[tuple(s if i == axis else slice(None) for i, s in enumerate(index))]

    return LazyArray(value.shape, read)


class Part:
    """An array that is computed when it is indexed by slices."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[Ends], np.ndarray]):
        self.shape, self._read = shape, read

    def __getitem__(self, index: Index) -> np.ndarray:
        whole = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        return self._read(tuple(s.indices(n)[:2] for s, n in zip(whole, self.shape, strict=True)))


def _quantized(value: Any, how: How, ends: Ends) -> tuple[np.ndarray, np.ndarray]:
    """Quantises, in pieces, the part of `value` between `ends`, which must not cut a block with one scale."""
    starts, shape = [start for start, _ in ends], [stop - start for start, stop in ends]
    numbers, scales = aligned(how.kept(shape), how.dtype), aligned(how.blocks(shape), np.float32)
    other = len(shape) + (-1 if how.axis == -2 else -2)
    step = max(1, _AT_ONCE // shape[how.axis])
    for *stacked, start in itertools.product(*map(range, shape[:-2]), range(0, shape[other], step)):
        piece = [slice(i, i + 1) for i in stacked] + [slice(0, n) for n in shape[-2:]]
        piece[other] = slice(start, min(start + step, shape[other]))
        there = tuple(slice(s.start + at, s.stop + at) for s, at in zip(piece, starts, strict=True))
        found = quantize(jnp.asarray(loaded(value, np.float32, there)), how)
        along = tuple(slice(None) if i == len(shape) + how.axis else s for i, s in enumerate(piece))
        numbers[along], scales[along] = map(np.asarray, found)
    return numbers, scales

"""Stores the token vectors of passages: a centroid and a residual of few bits, or float16.

As in ColBERTv2 (Santhanam et al. 2021, arXiv 2112.01488), a token is stored as the number of its nearest
centroid and the difference from this centroid (the residual), with 2 or 4 bits for each component. Here the
levels of a component are those with the least error for normally distributed values (Max 1960), and each
token has its own scale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxir.core.progress import progress
from jaxir.runtime.cpu import has_quick_bfloat16
from jaxir.storage.npy import read_npy, write_npy

Bits = Literal[2, 4, 16]  # bits of each component of a residual; 16: vectors in float16, no residuals
# The positive levels for a standard deviation of 1; the others are their negatives (Max 1960, table 1).
LEVELS = {2: (0.4528, 1.51), 4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733)}
ROUNDS = 4  # rounds of k-means
PER_CENTROID = 16  # number of sampled tokens for each centroid
# Number of tokens that are compared with the centroids at once. On a CPU, larger results would be new pages.
BLOCK, CPU_BLOCK = 1024, 128
_READ = 65_536  # number of tokens that are coded at once
_AT_ONCE = 2048  # number of tokens that are compared with a query at once, few enough for the cache


class TokenCodes(NamedTuple):
    """T coded token vectors. A vector is w0 * centroid + w1 * levels[codes].

    Attributes:
      centroids: float32 [C, D].
      nearest: the number of each token's centroid, uint16 or int32 [T].
      codes: uint8 [T, W], W = D * bits / 8; the lowest bits of the bytes are the first W components. For 16
        bits the vectors, float16 [T, D].
      weights: float16 [T, 2], w0 and w1; [0, 2] for 16 bits.
      bits: 2, 4 or 16.
      levels: float32 [2 ** bits], the number that each code stands for; [0] for 16 bits.
    """

    centroids: np.ndarray
    nearest: np.ndarray
    codes: np.ndarray
    weights: np.ndarray
    bits: Bits
    levels: np.ndarray

    def products(self, tokens: np.ndarray, query: np.ndarray, of_centroids: np.ndarray) -> np.ndarray:
        """Returns the products [t, Lq] of passage tokens with a query's tokens.

        Args:
          tokens: [t] numbers of tokens.
          query: float32 [Lq, D].
          of_centroids: [C, Lq], the products of the centroids with the query's tokens.
        """
        if self.bits == 16:
            return self.codes[tokens].astype(np.float32) @ query.T
        parts, width = 8 // self.bits, self.codes.shape[1]
        query = np.pad(query, [(0, 0), (0, parts * width - query.shape[1])])
        # The order of components that `of_bytes` gives.
        query = query.reshape(len(query), parts, width).transpose(2, 1, 0).reshape(parts * width, -1)
        found = np.empty((len(tokens), query.shape[1]), np.float32)
        decoded = np.empty((min(_AT_ONCE, len(tokens)), parts * width), np.float32)
        of_bytes = self._of_bytes()
        for at in range(0, len(tokens), _AT_ONCE):
            some, of_some = tokens[at : at + _AT_ONCE], found[at : at + _AT_ONCE]
            given = decoded[: len(some)]
            codes = np.take(self.codes, some, axis=0)
            np.take(of_bytes, codes, out=given.view(of_bytes.dtype), mode="clip")
            np.matmul(given, query, out=of_some)
            weights = np.take(self.weights, some, axis=0).astype(np.float32)
            of_some *= weights[:, 1:]
            of_some += weights[:, :1] * np.take(of_centroids, self.nearest[some], axis=0)
        return found

    def _of_bytes(self) -> np.ndarray:
        """Returns the 2 or 4 levels of each byte as one number [256], because one look-up is quicker."""
        parts = [self.levels[np.arange(256) >> shift & 2**self.bits - 1] for shift in range(0, 8, self.bits)]
        return np.stack(parts, axis=1).view({4: np.float64, 2: np.complex128}[self.bits])[:, 0]

    def decode(self, tokens: np.ndarray | slice) -> np.ndarray:
        """Returns the float32 vectors [t, D] of tokens."""
        if self.bits == 16:
            return self.codes[tokens].astype(np.float32)
        shifts = np.arange(8 // self.bits, dtype=np.uint8)[:, None] * np.uint8(self.bits)
        codes = self.codes[tokens][:, None] >> shifts & np.uint8(2**self.bits - 1)
        dimension, weights = self.centroids.shape[1], self.weights[tokens].astype(np.float32)
        found = self.levels[codes.reshape(len(codes), -1)[:, :dimension]]
        return weights[:, 1:] * found + weights[:, :1] * self.centroids[self.nearest[tokens]]

    def save(self, directory: Path) -> None:
        for name in ("centroids", "nearest", "codes", "weights", "levels"):
            with (directory / f"{name}.npy").open("wb") as file:
                write_npy(file, [getattr(self, name)])

    @classmethod
    def load(cls, directory: Path, *, bits: Bits, tokens: int, dimension: int) -> TokenCodes:
        """Opens saved codes, memory-mapped except for centroids. Raises a UserError for unexpected shapes."""
        centroids, (width, dtype) = num_centroids(tokens), _row(dimension, bits)
        count, levels = 0 if bits == 16 else 2**bits, directory / "levels.npy"
        return cls(
            np.array(read_npy(directory / "centroids.npy", np.float32, (centroids, dimension))),
            read_npy(directory / "nearest.npy", _number_type(centroids), (tokens,)),
            read_npy(directory / "codes.npy", dtype, (tokens, width)),
            read_npy(directory / "weights.npy", np.float16, (0 if bits == 16 else tokens, 2)),
            bits,
            # Levels were equally spaced when they were not stored.
            read_npy(levels, np.float32, (count,)) if levels.exists() else _spaced(count),
        )


def encode(shards: Sequence[np.ndarray], bits: Bits, *, seed: int = 0) -> TokenCodes:
    """Codes token vectors, shards [t, D] of any float type; the same vectors give the same codes."""
    total, dimension = sum(map(len, shards)), shards[0].shape[1]
    count = num_centroids(total)
    centroids = _k_means(_sample(shards, min(total, PER_CENTROID * count), seed), count)
    nearest = np.empty(total, _number_type(count))
    width, dtype = _row(dimension, bits)
    codes = np.empty((total, width), dtype)
    weights = np.empty((0 if bits == 16 else total, 2), np.float16)
    with progress(total=total, what="coding", unit="tokens") as bar:
        for at, vectors in _blocks(shards):
            rows = slice(at, at + len(vectors))
            nearest[rows] = _nearest(centroids, vectors)
            if bits == 16:
                codes[rows] = vectors
            else:
                codes[rows], weights[rows] = _coded(vectors, centroids[nearest[rows]], bits)
            bar.update(len(vectors))
    return TokenCodes(centroids, nearest, codes, weights, bits, _levels(bits))


def num_centroids(tokens: int) -> int:
    """Returns C, the power of two below 16 times the root of the number of tokens, as in ColBERTv2."""
    return min(tokens, 1 << max(0, int(16 * tokens**0.5).bit_length() - 1))


def _sample(shards: Sequence[np.ndarray], count: int, seed: int) -> np.ndarray:
    """Returns float32 vectors of `count` random tokens in random order."""
    ends = np.cumsum([0, *map(len, shards)])
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(ends[-1], count, replace=False))
    of_shard = np.searchsorted(ends, rows, side="right") - 1
    parts = [shard[rows[of_shard == n] - ends[n]] for n, shard in enumerate(shards)]
    return random.permutation(np.concatenate(parts).astype(np.float32))


def _k_means(sample: np.ndarray, count: int) -> np.ndarray:
    """Returns centroids [C, D] by Lloyd's algorithm, which starts from the first sampled vectors."""
    centroids = sample[:count].copy()
    for _ in range(ROUNDS if count < len(sample) else 0):
        nearest = _nearest(centroids, sample)
        order = np.argsort(nearest, kind="stable")
        members, starts = np.unique(nearest[order], return_index=True)
        sums = np.add.reduceat(sample[order], starts, axis=0)
        centroids[members] = sums / np.diff([*starts, len(order)])[:, None]
    return centroids


def _nearest(centroids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Returns the number of the nearest centroid of each vector, int32 [t]."""
    # |x - c|^2 is least where x.c - |c|^2 / 2 is largest.
    half = np.einsum("cd,cd->c", centroids, centroids) / 2
    placed = jax.device_put((centroids, half))
    on_cpu = jax.default_backend() == "cpu"
    size = CPU_BLOCK if on_cpu else BLOCK
    program = _program(on_cpu, on_cpu and has_quick_bfloat16())
    found = np.empty(len(vectors), np.int32)
    for at in range(0, len(vectors), size):
        block = vectors[at : at + size]
        given = np.pad(block, [(0, size - len(block)), (0, 0)])
        result = np.asarray(program(*placed, given))[: len(block)]
        found[at : at + size] = result.argmax(1) if on_cpu else result
    return found


@functools.cache
def _program(on_cpu: bool, rounded: bool):
    """Returns a program that compares vectors with centroids; on CPUs, NumPy's argmax follows instead."""

    def compared(centroids: jax.Array, half: jax.Array, vectors: jax.Array) -> jax.Array:
        if rounded:
            centroids, vectors = centroids.astype(jnp.bfloat16), vectors.astype(jnp.bfloat16)
        found = jnp.einsum("td,cd->tc", vectors, centroids, preferred_element_type=jnp.float32) - half[None]
        return found if on_cpu else found.argmax(1)

    return jax.jit(compared)


def _coded(vectors: np.ndarray, centroids: np.ndarray, bits: Bits) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes uint8 [t, D * bits / 8] and weights [t, 2] of vectors [t, D] at centroids [t, D]."""
    residuals, levels = vectors - centroids, _levels(bits)
    scales = np.sqrt(np.mean(residuals**2, axis=1, keepdims=True)) + 1e-30
    found = np.searchsorted((levels[1:] + levels[:-1]) / 2, residuals / scales)
    grid = levels[found]
    # `step` preserves the product of the residual and its code; then `length` preserves the vector's length.
    squares, products = (np.einsum("td,td->t", residuals, x) for x in (residuals, grid))
    step = squares / (products + 1e-30)
    decoded = np.linalg.norm(centroids + step[:, None] * grid, axis=1)
    length = np.linalg.norm(vectors, axis=1) / (decoded + 1e-30)
    numbers = np.pad(found.astype(np.uint8), [(0, 0), (0, -found.shape[1] % (8 // bits))])
    parts = np.split(numbers, 8 // bits, axis=1)
    codes = functools.reduce(np.bitwise_or, (part << np.uint8(n * bits) for n, part in enumerate(parts)))
    return codes, np.stack([length, length * step], axis=1)


def _levels(bits: Bits) -> np.ndarray:
    positive = np.array(LEVELS.get(bits, ()), np.float32)
    return np.concatenate([-positive[::-1], positive])


def _spaced(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32) - np.float32((count - 1) / 2)


def _blocks(shards: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the shards in blocks: (number of the block's first token, float32 vectors [t, D])."""
    start = 0
    for shard in shards:
        for at in range(0, len(shard), _READ):
            yield start + at, np.asarray(shard[at : at + _READ], np.float32)
        start += len(shard)


def _row(dimension: int, bits: Bits) -> tuple[int, type[np.number]]:
    """Returns how many numbers store a token, and their type."""
    return (dimension, np.float16) if bits == 16 else (-(-dimension * bits // 8), np.uint8)


def _number_type(centroids: int) -> type[np.integer]:
    return np.uint16 if centroids <= 1 << 16 else np.int32

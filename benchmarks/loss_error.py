"""Measures the error of a blockwise loss's gradients if matrix products are below float32 precision.

The reference is float64; the loss is in-batch softmax in both directions. A CPU multiplies float32 in one
precision only, so the script imitates a TPU's precisions. It splits each operand into bfloat16 parts.
"default" multiplies only the first parts; "high" multiplies all pairs of the first two parts, except that of
both second parts. Products are added up in float32.

    python benchmarks/loss_error.py [--size=4096] [--dimension=768] [--block_size=1024] [--temperature=0.01]
"""

from __future__ import annotations

import argparse
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxir.losses.in_batch import in_batch_softmax

# (weight of the part that a pair shares, weight of the part that all vectors share), relative to a vector's
# own random part. In the last case all cosines are about 0.8, and gradients cancel in products.
CASES = {"beginning": (1 / 3, 0.0), "nearly learnt": (1 / 2, 0.0), "much alike": (1 / 3, 2.0)}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--size", type=int, default=4096, help="pairs (default: 4096)")
    parser.add_argument("--dimension", type=int, default=768, help="of the embeddings (default: 768)")
    parser.add_argument("--block_size", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--temperature", type=float, default=0.01, help="(default: 0.01)")
    flags = parser.parse_args()
    print("| pairs | gradient_precision | largest error / largest gradient | mean error of a row |")
    print("|---|---|---|---|")
    for name, (shared, common) in CASES.items():
        query, passage = pairs(flags.size, flags.dimension, shared, common)
        exact = in_float64(query, passage, flags.temperature)
        for precision in ("highest", "high", "default"):
            found = gradients(query, passage, precision, flags)
            largest = np.abs(found - exact).max() / np.abs(exact).max()
            of_rows = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
            print(f"| {name} | {precision} | {largest:.1e} | {of_rows.mean():.1e} |", flush=True)


def pairs(size: int, dimension: int, shared: float, common: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the unit vectors of queries and passages, float32 [B, D] each."""
    rng = np.random.default_rng(0)
    both = shared * rng.normal(size=(size, dimension)) + common * rng.normal(size=(1, dimension))

    def unit() -> np.ndarray:
        x = both + rng.normal(size=both.shape)
        return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)

    return unit(), unit()


def in_float64(query: np.ndarray, passage: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the gradients of queries and passages by the equation, [2 B, D]."""
    query, passage = query.astype(float), passage.astype(float)
    x = query @ passage.T / temperature
    x = np.exp(x - x.max())  # logits differ by less than 100, so no term underflows in float64
    slope = x / x.sum(axis=1, keepdims=True) + x / x.sum(axis=0, keepdims=True) - 2 * np.eye(len(x))
    slope /= len(x) * temperature
    return np.concatenate([slope @ passage, slope.T @ query])


def gradients(
    query: np.ndarray, passage: np.ndarray, precision: str, flags: argparse.Namespace
) -> np.ndarray:
    """Returns the gradients of the blockwise loss, [2 B, D], with products as TPUs make them."""
    multiply = jnp.matmul

    def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return high, jax.lax.reduce_precision(x - high, exponent_bits=8, mantissa_bits=7)

    def as_on_tpus(a: jax.Array, b: jax.Array, *, precision: object) -> jax.Array:
        if precision not in ("high", "default"):
            return multiply(a, b, precision=precision)
        (a, rest_a), (b, rest_b) = split(a), split(b)
        product = multiply(a, b)
        return product if precision == "default" else product + (multiply(a, rest_b) + multiply(rest_a, b))

    def loss(embeddings: tuple[jax.Array, jax.Array]) -> jax.Array:
        how = {"temperature": flags.temperature, "block_size": flags.block_size}
        return in_batch_softmax(*embeddings, **how, gradient_precision=precision)[0]

    with mock.patch.object(jnp, "matmul", as_on_tpus):
        found = jax.jit(jax.grad(loss))((jnp.asarray(query), jnp.asarray(passage)))
    return np.concatenate([np.asarray(x) for x in found]).astype(float)


if __name__ == "__main__":
    main()

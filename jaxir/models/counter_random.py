"""Random numbers that are hashes of places, so that any part of an array of them can be made anywhere.

Ten operations a number, where threefry, JAX's own generator, takes more than a hundred: good enough to drop
things by, and for nothing else.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Multiplied by it, places that differ by a width or a power of two differ in as many bits as any others: odd,
# so one to one, and of the golden ratio.
SPREAD = 0x9E3779B1 - 2**32


def bits(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns int32 numbers of all 32 bits, which follow from the key and from each one's place in `shape`.

    A mesh may split them at will. Places count modulo 2^32.
    """
    words = jax.lax.bitcast_convert_type(jax.random.bits(key, (2,)), jnp.int32)
    place, stride = jnp.zeros(tuple(shape), jnp.int32), 1
    for dimension in reversed(range(len(shape))):
        if shape[dimension] > 1:
            step = (stride * SPREAD + 2**31) % 2**32 - 2**31  # as int32 wraps
            place += jax.lax.broadcasted_iota(jnp.int32, tuple(shape), dimension) * jnp.int32(step)
        stride *= shape[dimension]
    one = mixed(words[0])
    return mixed(place ^ one, mixed(words[1] ^ one))


def mixed(x: jax.Array, other: jax.Array | int = 0) -> jax.Array:
    """Hashes int32 numbers, so that all bits depend on all of x's (Wellons's lowbias32 where other is 0)."""
    x ^= jax.lax.shift_right_logical(x, 16)
    x *= 0x7FEB352D
    x ^= jax.lax.shift_right_logical(x, 15)
    x = (x + other) * (0x846CA68B - 2**32)
    return x ^ jax.lax.shift_right_logical(x, 16)


def kept(
    key0: jax.Array, key1: jax.Array, text: jax.Array, head: jax.Array, length: int, rate: float
) -> jax.Array:
    """Returns whether weights [S, T] of a head of a text are kept, each with probability 1 - rate.

    By sixteen bits for each weight, to which `rate` is rounded. JAX's own generator would take longer than
    all else in a kernel of attention.

    Args:
      key0: int32 [], of the key.
      key1: likewise.
      text: int32 [], place of the text in the batch.
      head: int32 [].
      length: S = T, even.
      rate: probability of the others.
    """
    shape = (length // 2, length)
    bits = _bits(key0, key1, text, head, places(shape, 0) * length + places(shape, 1))
    halves = jnp.concatenate([bits & 0xFFFF, jax.lax.shift_right_logical(bits, 16)], axis=0)
    return halves >= round(rate * 2**16)


def values_kept(
    key0: jax.Array, key1: jax.Array, text: jax.Array, head: jax.Array, length: int, rate: float
) -> jax.Array:
    """Returns whether the values [1, S] of a head of a text are kept; see `kept`."""
    bits = _bits(key0, key1, text, head, places((1, length), 1))
    return (bits & 0xFFFF) >= round(rate * 2**16)


def _bits(key0: jax.Array, key1: jax.Array, text: jax.Array, head: jax.Array, place: jax.Array) -> jax.Array:
    one = mixed(mixed(mixed(text ^ key0) ^ key1) + head)
    return mixed(place * SPREAD ^ one, mixed(one ^ key1))


def places(shape: tuple[int, int], dimension: int) -> jax.Array:
    """Returns int32 of a shape: each element's place along a dimension."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, dimension)

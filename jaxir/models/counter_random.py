"""Random numbers that are hashes of positions, so that any part of an array can be computed anywhere.

A number takes ten operations, where JAX's threefry takes more than a hundred. The quality suffices for
dropout only.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

# An odd number derived from the golden ratio, as int32. Positions are multiplied by it, so that two positions
# differ in many bits even if they are a row's width or a power of two apart.
SPREAD = 0x9E3779B1 - 2**32


def bits(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns int32 numbers of 32 random bits each, determined by the key and the position in `shape`.

    A mesh may split the array in any way. Positions are taken modulo 2^32.
    """
    words = jax.lax.bitcast_convert_type(jax.random.bits(key, (2,)), jnp.int32)
    place, stride = jnp.zeros(tuple(shape), jnp.int32), 1
    for dimension in reversed(range(len(shape))):
        if shape[dimension] > 1:
            step = (stride * SPREAD + 2**31) % 2**32 - 2**31  # wrapped to int32
            place += jax.lax.broadcasted_iota(jnp.int32, tuple(shape), dimension) * jnp.int32(step)
        stride *= shape[dimension]
    one = mixed(words[0])
    return mixed(place ^ one, mixed(words[1] ^ one))


def mixed(x: jax.Array, other: jax.Array | int = 0) -> jax.Array:
    """Hashes int32 numbers; all bits depend on all bits of x (Wellons's lowbias32 if `other` is 0)."""
    x ^= jax.lax.shift_right_logical(x, 16)
    x *= 0x7FEB352D
    x ^= jax.lax.shift_right_logical(x, 15)
    x = (x + other) * (0x846CA68B - 2**32)
    return x ^ jax.lax.shift_right_logical(x, 16)


def kept(
    key0: jax.Array, key1: jax.Array, text: jax.Array, head: jax.Array, length: int, rate: float
) -> jax.Array:
    """Returns a mask [S, T] of a head's attention weights: true, with probability 1 - rate, if kept.

    Each weight uses 16 bits, to which `rate` is rounded. `key0` and `key1` are the words of the key, `text`
    and `head` are indices (all int32 []). `length` is S = T, and even.
    """
    shape = (length // 2, length)
    bits = _bits(key0, key1, text, head, places(shape, 0) * length + places(shape, 1))
    halves = jnp.concatenate([bits & 0xFFFF, jax.lax.shift_right_logical(bits, 16)], axis=0)
    return halves >= round(rate * 2**16)


def values_kept(
    key0: jax.Array, key1: jax.Array, text: jax.Array, head: jax.Array, length: int, rate: float
) -> jax.Array:
    """Returns a mask [1, S] of a head's values: true if kept. For the arguments see `kept`."""
    bits = _bits(key0, key1, text, head, places((1, length), 1))
    return (bits & 0xFFFF) >= round(rate * 2**16)


def _bits(key0: jax.Array, key1: jax.Array, text: jax.Array, head: jax.Array, place: jax.Array) -> jax.Array:
    one = mixed(mixed(mixed(text ^ key0) ^ key1) + head)
    return mixed(place * SPREAD ^ one, mixed(one ^ key1))


def places(shape: tuple[int, int], dimension: int) -> jax.Array:
    """Returns an int32 array of this shape with each element's index along a dimension."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, dimension)

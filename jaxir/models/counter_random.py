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

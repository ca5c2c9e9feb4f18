"""T5's relative position biases (Raffel et al. 2020)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxir.core.shapes import checked_shapes
from jaxir.models import layers, outlines
from jaxir.runtime.partitioning import constrain


class RelativeBias(nnx.Module):
    """A trained number for each head and bucket of distances, added to attention logits.

    All distances of at least `max_distance` tokens share the last bucket. If `bidirectional`, half of the
    buckets are for keys after the query, otherwise none.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int,
        max_distance: int,
        bidirectional: bool = True,
        stddev: float,
        rngs: nnx.Rngs,
    ):
        table = outlines.drawn(layers.normal(stddev), rngs, (num_heads, num_buckets))
        self.embedding = layers.param(table, "heads", "relpos_buckets")
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def __call__(self, length: int) -> jax.Array:
        """Returns the biases [1, H, L, L], float32: rows are query positions, columns key positions."""
        positions = jnp.arange(length)
        return self.between(positions, positions)

    def between(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the biases [1, H, T, S], float32, of queries and keys at positions [T] and [S]."""
        num_buckets = self.embedding.shape[1]
        buckets = relative_buckets(
            keys[None, :] - queries[:, None],
            num_buckets=num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        # Multiply by one-hot vectors: the gradient of a lookup would slowly add H L L numbers to few rows.
        chosen = jax.nn.one_hot(buckets, num_buckets, axis=0, dtype=jnp.float32)
        bias = jnp.einsum(
            "HN,NTS->HTS", layers.weight(self.embedding), chosen, precision=jax.lax.Precision.HIGHEST
        )
        return constrain(bias[None], (None, "heads", "length", "length"))


@checked_shapes
def relative_buckets(
    distance: Int[Array, "T S"], *, num_buckets: int, max_distance: int, bidirectional: bool = True
) -> Int[Array, "T S"]:
    """Returns the bucket of each distance (key position - query position).

    If `bidirectional`, half of the buckets are for keys after the query; otherwise such keys share bucket 0.
    On each side the first half of the buckets hold one distance each. The others hold ranges that grow
    geometrically up to `max_distance`. Larger distances share the last bucket.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    growth = (max_distance / exact) ** (1 / (side - exact))
    # Integer bounds, because the logarithm of the original formula could round either way at powers of two.
    bounds = jnp.array([math.ceil(exact * growth**i - 1e-6) for i in range(1, side - exact)], jnp.int32)
    size = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    large = exact + (size[..., None] >= bounds[None, None]).sum(-1, dtype=size.dtype)
    first = jnp.where(distance > 0, side, 0) if bidirectional else 0
    return first + jnp.where(size < exact, size, large)

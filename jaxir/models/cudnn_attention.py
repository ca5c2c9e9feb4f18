"""Attention by the flash attention of cuDNN, on GPUs."""

import jax
import jax.numpy as jnp


def allows(query: jax.Array, key: jax.Array, bias: jax.Array | None) -> bool:
    """Returns whether cuDNN's flash attention supports these inputs in both passes on every supported GPU."""
    _, length, _, head_dim = query.shape
    return (
        jax.default_backend() == "gpu"
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and key.shape == query.shape
        and head_dim % 8 == 0
        and head_dim <= 128
        and (bias is None or length % 2 == 0)
    )


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    bias: jax.Array | None,
    scale: float,
    reads_at_padding: bool,
) -> jax.Array:
    """Computes `attention.attention`, with its arguments; to be called only if `allows` returns True.

    The kernel returns zeros at padding unless `reads_at_padding`.
    """
    # A text without tokens attends to its first position, because a softmax over nothing would give NaN.
    lengths = jnp.maximum(mask.sum(-1, dtype=jnp.int32), 1)
    of_queries = jnp.full_like(lengths, query.shape[1]) if reads_at_padding else lengths
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=None if bias is None else bias.astype(query.dtype),
        scale=scale,
        query_seq_lengths=of_queries,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )

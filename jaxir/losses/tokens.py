"""Losses of predicted tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, Float32, Int32, jaxtyped


@jaxtyped(typechecker=beartype)
def token_cross_entropy(
    hidden: Float[Array, "B T E"],
    table: Float[Array, "V E"],
    targets: Int32[Array, "B T"],
    kept: Bool[Array, "B T"],
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """The mean of -log softmax(h W^T)[target] over the tokens that are kept, in float32.

    The logits [B, T, V] are computed anew in the backward pass, not kept for it.

    Args:
      hidden: [B, T, E], h.
      table: [V, E], W, a vector for each token.
      targets: [B, T], the token that is right at each place.
      kept: [B, T], false where nothing is predicted.

    Returns:
      The loss and `token_accuracy`, the share of tokens that are right; float32 [].
    """

    @jax.checkpoint
    def of_tokens(hidden: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("BTE,VE->BTV", hidden, table, preferred_element_type=jnp.float32)
        right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - right, logits.argmax(-1) == targets

    losses, hits = of_tokens(hidden, table)
    count = jnp.maximum(kept.sum(dtype=jnp.float32), 1.0)
    accuracy = (hits & kept).sum(dtype=jnp.float32) / count
    return jnp.where(kept, losses, 0.0).sum() / count, {"token_accuracy": accuracy}

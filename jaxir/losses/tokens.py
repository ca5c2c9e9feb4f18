"""Losses of predicted tokens."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxir.core.features import PADDING_TOKEN
from jaxir.core.shapes import checked_shapes
from jaxir.losses._types import Metrics, Scalar


@checked_shapes
def token_cross_entropy(
    hidden: Float[Array, "B T E"],
    table: Float[Array, "V E"],
    targets: Int32[Array, "B T"],
    kept: Bool[Array, "B T"],
    *,
    mean_over: Literal["tokens", "texts"] = "tokens",
    bias: Float[Array, " V"] | None = None,
) -> tuple[Scalar, Metrics]:
    """The mean of -log softmax(h W^T + b)[target] over the kept tokens, in float32.

    h is `hidden` [B, T, E], W the `table` of token vectors [V, E], b the `bias` [V].

    Args:
      kept: [B, T], false where nothing is predicted.
      mean_over: "texts" sums over the tokens of each text and takes the mean over the B texts.

    Returns:
      The loss and the metric `token_accuracy`, the share of kept tokens that are predicted correctly.
    """
    losses, hits = token_losses(hidden, table, targets, bias=bias)
    return over_tokens(losses, hits, kept, mean_over=mean_over)


@checked_shapes
def over_tokens(
    losses: Float32[Array, "B T"],
    hits: Bool[Array, "B T"],
    kept: Bool[Array, "B T"],
    *,
    mean_over: Literal["tokens", "texts"] = "tokens",
) -> tuple[Scalar, Metrics]:
    """Reduces the results of `token_losses`, [B, T], to the results of `token_cross_entropy`."""
    count = jnp.maximum(kept.sum(dtype=jnp.float32), 1.0)
    accuracy = (hits & kept).sum(dtype=jnp.float32) / count
    over = count if mean_over == "tokens" else jnp.float32(len(losses))
    return jnp.where(kept, losses, 0.0).sum() / over, {"token_accuracy": accuracy}


@checked_shapes
def token_losses(
    hidden: Float[Array, "B T E"],
    table: Float[Array, "V E"],
    targets: Int32[Array, "B T"],
    *,
    bias: Float[Array, " V"] | None = None,
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """Returns -log softmax(h W^T + b)[target] of each token, and whether the target is the most likely token.

    The backward pass recomputes the logits [B, T, V]. A target `features.PADDING_TOKEN` is token 0. The
    arguments are those of `token_cross_entropy`.
    """
    targets = jnp.where(targets == PADDING_TOKEN, 0, targets)

    @jax.checkpoint
    def of_tokens(hidden: jax.Array, table: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("BTE,VE->BTV", hidden, table, preferred_element_type=jnp.float32)
        if bias is not None:
            logits += bias.astype(jnp.float32)[None, None]
        right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - right, logits.argmax(-1) == targets

    return of_tokens(hidden, table, bias)

"""DiffCSE's discriminator: an encoder that reads a changed text and the vector of the original text."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.losses.tokens import token_losses
from jaxir.models import layers
from jaxir.models.backbones import Encoder
from jaxir.models.masked_lm import MaskedLMHead
from jaxir.objectives.objective import RandomKey

Task = Literal["replaced", "mlm", "corrective"]


class Discriminator(nnx.Module):
    """An encoder, a linear layer that judges each token, and optionally a head over the vocabulary.

    Args of the constructor: `width` is the encoder's hidden size E, and `vector_dim` is the size D of text
    vectors. `kinds` is the number of kinds of change; the linear layer has an output for each.
    """

    def __init__(
        self,
        encoder: Encoder,
        width: int,
        vector_dim: int,
        kinds: int,
        head: MaskedLMHead | None,
        *,
        rngs: nnx.Rngs,
    ):
        self.encoder, self.head = encoder, head
        how = {"dtype": "float32", "init": layers.normal(0.02), "rngs": rngs}
        self.verdict = (
            layers.Linear(width, kinds, axes=("embed", None), use_bias=True, **how) if kinds else None
        )
        # Text vectors have the encoder's width unless the dual encoder projects its vectors.
        how |= {"axes": ("embed", None), "use_bias": False}
        self.project = layers.Linear(vector_dim, width, **how) if vector_dim != width else None

    def losses(
        self,
        ids: jax.Array,
        original: jax.Array,
        vector: jax.Array,
        *,
        task: Task,
        kind: int,
        key: RandomKey,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the loss at each position, and whether the prediction is right: float32 and bool [B, M].

        Args:
          ids: [B, M], the changed text; `vector` replaces the embedding of its first token.
          original: [B, M], the tokens before the change.
          vector: [B, D], the vector of the original text.
          task: "replaced": detect whether the token is the original one (Chuang 2024, eq. 2.3); "mlm":
            predict the original token; "corrective": predict it by a mixture of copying and predicting.
          kind: the index of the kind of change, which selects the output of the linear layer.
          key: for dropout; None turns it off.
        """
        own = vector if self.project is None else self.project(vector)

        def conditioned(x: jax.Array) -> jax.Array:
            return jnp.concatenate([own.astype(x.dtype)[:, None], x[:, 1:]], axis=1)

        hidden = self.encoder(ids, key=key, edit=conditioned)
        same = ids == original
        if task == "mlm":
            return self._guessed(hidden, original)
        logits = self.verdict(hidden)[..., kind]  # the logits that a token is the original one, [B, M]
        if task == "replaced":
            return jax.nn.softplus(jnp.where(same, -logits, logits)), (logits > 0) == same
        # The loss of COCO-LM: -log(1[x''_t = x_t] c + (1 - c) P(x_t)), where c is sigmoid(logits).
        guessed, right = self._guessed(hidden, original)
        copied = jnp.where(same, jax.nn.log_sigmoid(logits), -jnp.inf)
        return -jnp.logaddexp(copied, jax.nn.log_sigmoid(-logits) - guessed), jnp.where(
            logits > 0, same, right
        )

    def _guessed(self, hidden: jax.Array, original: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns -log P(x_t) of each original token x_t, and whether x_t is the likeliest token: [B, M]."""
        x = self.head(hidden)
        table = self.encoder.token_table.whole(x.dtype)
        return token_losses(x, table, original, bias=layers.weight(self.head.bias))

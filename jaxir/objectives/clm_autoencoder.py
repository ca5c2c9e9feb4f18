"""The causal-language-model (CLM) autoencoder: a decoder predicts a text from its vector (Wang 2022)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32, Key

from jaxir.core.features import TextFormat
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Rate, checked
from jaxir.losses.tokens import over_tokens, token_losses
from jaxir.models import layers
from jaxir.models.backbones import Encoder
from jaxir.models.decoder import VectorDecoder
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masking import choose_tokens, close_gaps, is_word
from jaxir.objectives.objective import Batch, DecoderObjective, Metrics, RandomKey


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CLMAutoencoder(DecoderObjective):
    """A causal language model that reads the text's vector (Wang 2022, section 3.2.1).

    The passage tower encodes the text as f(x). A decoder predicts each token from the tokens before it and,
    by cross-attention, f(x) (eq. 3.4). The decoder's input and output embeddings are the encoder's.

        loss = -1 / B sum_i sum_t log P(token t of x_i | its tokens before t, f(x_i))

    In evaluation (no key) nothing is deleted.

    Attributes:
      deletion: the share of tokens, chosen at random, that are deleted from the encoder's input (TSDAE).
      mean_over: "texts": the loss is a sum over the tokens of a text, averaged over texts (the equation);
        "tokens": it is the mean over the tokens of all texts.
    """

    deletion: Rate = 0.0
    mean_over: Literal["texts", "tokens"] = "texts"
    reads_with = "encode"

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> VectorDecoder:
        return self.decoder(model, rngs=rngs)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: VectorDecoder, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        ids = batch["text_ids"]
        deleting, encoding, decoding = layers.split_key(key, 3)
        left, more = ids, {}
        if self.deletion:
            left = ids if deleting is None else delete_tokens(ids, deleting, share=self.deletion)
            more = {"tokens_left": (left != 0).sum(1, dtype=jnp.float32).mean()}

        def read(part: Batch, keys: tuple[RandomKey, ...]) -> tuple[jax.Array, jax.Array]:
            vector = model.unnormalized().encode(part["left"], tower="passage", key=keys[0])
            encoder = model.encoder_of("passage")
            return next_token_losses(auxiliary, encoder, part["ids"], vector, key=keys[1])

        parts, keys = {"ids": ids, "left": left}, (encoding, decoding)
        of_tokens = embed_in_chunks(read, parts, keys, chunks=self.chunks)
        loss, metrics = over_tokens(*of_tokens, ids[:, 1:] != 0, mean_over=self.mean_over)
        return loss, metrics | more


def next_token_losses(
    decoder: VectorDecoder, encoder: Encoder, ids: jax.Array, vector: jax.Array, *, key: RandomKey
) -> tuple[jax.Array, jax.Array]:
    """Returns -log P(token | the tokens before it, the text's vector), and whether that token is likeliest.

    Both are [B, L - 1], float32 and bool: one value for each token of `ids` [B, L] except the first.
    """
    table, read = encoder.token_table, ids[:, :-1]
    hidden = decoder(table(read), read != 0, vector, key=key)
    return token_losses(hidden, table.whole(hidden.dtype), ids[:, 1:])


@checked_shapes
def delete_tokens(
    ids: Int32[Array, "B L"], key: Key[Array, ""], *, share: float | int
) -> Int32[Array, "B L"]:
    """Deletes each word of the texts [B, L] with probability `share`, but not all; the rest moves left."""
    kept = (ids != 0) & (~is_word(ids) | choose_tokens(ids, key, share=1 - share))
    return close_gaps(ids, kept)

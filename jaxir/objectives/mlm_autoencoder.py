"""The MLM autoencoder: predicts masked tokens from the text's vector and other tokens (Wang 2022)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.features import TextFormat
from jaxir.core.values import Portion, checked
from jaxir.losses.tokens import over_tokens, token_losses
from jaxir.models import layers
from jaxir.models.decoder import VectorDecoder
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masking import choose_tokens
from jaxir.objectives.objective import Batch, DecoderObjective, Metrics, RandomKey


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MLMAutoencoder(DecoderObjective):
    """A masked language model that reads the text's vector (Wang 2022, section 3.2.2).

    The passage tower encodes the text without masks as f(x). A decoder reads the text with most of its tokens
    masked, and predicts the masked tokens (eq. 3.5; M_i are the masked positions of text x_i):

        loss = -1 / B sum_i sum over m in M_i of log P(token m of x_i | f(x_i), the tokens outside M_i)

    In evaluation (no key) the same share is masked, always at the same positions.

    Attributes:
      masking: the share of tokens that are masked.
      vector: how the decoder reads the vector: "first", in place of the embedding of the first token ([CLS]);
        "attention", by cross-attention as in the CLM autoencoder, which Wang 2022 proposes as future work.
      mean_over: "texts": the loss is a sum over a text's masked tokens, averaged over texts (the equation);
        "tokens": it is the mean over the masked tokens of all texts.
    """

    masking: Portion = 0.8
    vector: Literal["first", "attention"] = "first"
    mean_over: Literal["texts", "tokens"] = "texts"
    reads_with = "encode"

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> MaskedDecoder:
        decoder = self.decoder(model, causal=False, attends=self.vector == "attention", rngs=rngs)
        widths = (model.config.dimension, model.config.backbone.embed_dim)
        return MaskedDecoder(decoder, form.need_mask(), *widths, first=self.vector == "first", rngs=rngs)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: MaskedDecoder, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        ids = batch["text_ids"]
        masking, encoding, decoding = layers.split_key(key, 3)
        chosen = choose_tokens(ids, jax.random.key(0) if masking is None else masking, share=self.masking)

        def read(part: Batch, keys: tuple[RandomKey, ...]) -> tuple[jax.Array, jax.Array]:
            ids, table = part["ids"], model.encoder_of("passage").token_table
            vector = model.unnormalized().encode(ids, tower="passage", key=keys[0])
            x = table(jnp.where(part["chosen"], auxiliary.mask_id, ids))
            hidden = auxiliary(x, ids != 0, vector, key=keys[1])
            return token_losses(hidden, table.whole(hidden.dtype), ids)

        parts, keys = {"ids": ids, "chosen": chosen}, (encoding, decoding)
        of_tokens = embed_in_chunks(read, parts, keys, chunks=self.chunks)
        loss, metrics = over_tokens(*of_tokens, chosen, mean_over=self.mean_over)
        return loss, metrics | {"tokens_masked": chosen.sum(1, dtype=jnp.float32).mean()}


class MaskedDecoder(nnx.Module):
    """A decoder, a projection of text vectors to the decoder's width, and the mask token's id."""

    def __init__(
        self,
        decoder: VectorDecoder,
        mask_id: int,
        vector_dim: int,
        embed_dim: int,
        *,
        first: bool,
        rngs: nnx.Rngs,
    ):
        self.decoder, self.mask_id, self.first = decoder, mask_id, first
        # Text vectors have the encoder's width unless the dual encoder projects its vectors.
        init = layers.normal(vector_dim**-0.5)
        how = {"axes": ("embed", None), "use_bias": False, "dtype": "float32", "init": init, "rngs": rngs}
        projected = first and vector_dim != embed_dim
        self.project = layers.Linear(vector_dim, embed_dim, **how) if projected else None

    def __call__(self, x: jax.Array, mask: jax.Array, vector: jax.Array, *, key: RandomKey) -> jax.Array:
        """Decodes token embeddings [B, L, E] of masked texts with the texts' vectors [B, D]: [B, L, E]."""
        if self.first:
            own = vector if self.project is None else self.project(vector)
            x = jnp.concatenate([own.astype(x.dtype)[:, None], x[:, 1:]], axis=1)
        return self.decoder(x, mask, vector, key=key)

"""SEED: predicts a text from its vector by a decoder with a very short context (Lu et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxir.core.features import TextFormat
from jaxir.core.values import Count, Layers, checked
from jaxir.losses.tokens import over_tokens
from jaxir.models import layers
from jaxir.objectives.clm_autoencoder import next_token_losses
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masked_lm import MaskedLMModule, MaskedTextObjective
from jaxir.objectives.objective import Batch, DecoderObjective, Metrics, RandomKey


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Seed(MaskedTextObjective, DecoderObjective):
    """SEED-Encoder (Lu et al. 2021, arXiv:2102.09206): a weak autoregressive decoder, and BERT's objective.

    The passage tower reads the text with tokens masked, once for both. The decoder's attention reaches the
    text's vector h and the last `span` tokens:

        loss = - mean over masked places m of log P(token m | the masked text)
               - mean over tokens t of log P(token t | the `span` tokens before t, h)

    The attention of each layer has this span, so several layers reach (span - 1) layers + 1 tokens. The
    decoder's token vectors, in and out, are the encoder's. In evaluation (no key) the same tokens are masked
    each time.

    Attributes:
      span: the number of tokens that the decoder's attention reaches.
    """

    span: Count = 2
    decoder_layers: Layers = 3
    reads_with = "encode_with_tokens"

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> SeedModules:
        return SeedModules(self, model, form, rngs=rngs)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: SeedModules, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        ids = batch["text_ids"]
        *masking, encoding, decoding = layers.split_key(key, 4)
        masked, chosen = auxiliary.masked_lm.mask(ids, masking, share=self.masking)

        def read(part: Batch, keys: tuple[RandomKey, ...]) -> tuple[Any, Any]:
            encoder, ids = model.encoder_of("passage"), part["ids"]
            texts = [(part["masked"], "passage", keys[0])]
            ((vector, hidden),) = model.unnormalized().encode_with_tokens(texts)
            of_masked = auxiliary.masked_lm.losses(encoder, hidden, ids, part["chosen"], share=self.masking)
            return of_masked, next_token_losses(auxiliary.decoder, encoder, ids, vector, key=keys[1])

        parts = {"ids": ids, "masked": masked, "chosen": chosen}
        of_masked, of_next = embed_in_chunks(read, parts, (encoding, decoding), chunks=self.chunks)
        of_masked, metrics = over_tokens(*of_masked)
        of_decoder, found = over_tokens(*of_next, ids[:, 1:] != 0)
        return of_masked + of_decoder, metrics | {
            "masked_lm_loss": of_masked,
            "decoder_loss": of_decoder,
            "decoder_accuracy": found["token_accuracy"],
        }


class SeedModules(nnx.Module):
    """The decoder, and the head of the masked language model."""

    def __init__(self, objective: Seed, model: Any, form: TextFormat, *, rngs: nnx.Rngs):
        self.decoder = objective.decoder(model, span=objective.span, rngs=rngs)
        self.masked_lm = MaskedLMModule(model, objective.head, form=form, rngs=rngs)

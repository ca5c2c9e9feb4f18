"""SEED: a decoder with a very short attention span predicts a text from its vector (Lu et al. 2021)."""

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

    The passage tower reads the text with some tokens masked, once for both losses. The decoder attends to
    the text's vector h and the last `span` tokens:

        loss = - mean over masked positions m of log P(token m | the masked text)
               - mean over tokens t of log P(token t | the `span` tokens before t, h)

    The span holds for each layer, so n layers together see the last (span - 1) n + 1 tokens. The decoder's
    input and output embeddings are the encoder's. In evaluation (no key) the same tokens are masked each
    time.

    Attributes:
      span: the number of previous tokens to which each layer of the decoder attends.
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
    """SEED's decoder and masked-language-model head."""

    def __init__(self, objective: Seed, model: Any, form: TextFormat, *, rngs: nnx.Rngs):
        self.decoder = objective.decoder(model, span=objective.span, rngs=rngs)
        self.masked_lm = MaskedLMModule(model, objective.head, form=form, rngs=rngs)

"""SEED: a decoder that sees next to nothing else writes a text again from its vector (Lu et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxir.core.features import TextFormat
from jaxir.core.values import Count, Layers, Portion, checked
from jaxir.losses.tokens import over_tokens
from jaxir.models import layers
from jaxir.objectives.clm_autoencoder import next_token_losses
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masked_lm import MaskedWords
from jaxir.objectives.objective import Batch, DecoderObjective, Metrics
from jaxir.objectives.pretrained_heads import MaskedLMSource


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Seed(DecoderObjective):
    """SEED-Encoder (Lu et al. 2021, arXiv:2102.09206): a weak autoregressive decoder, and BERT's objective.

    The passage tower reads the text with tokens masked, once for both. The decoder's attention reaches the
    text's vector h and the last `span` tokens:

        loss = - mean over masked places m of log P(token m | the masked text)
               - mean over tokens t of log P(token t | the `span` tokens before t, h)

    The attention of each of its layers reaches as far, so of several layers each token hears, by way of
    others, of (span - 1) layers + 1. Its token vectors, in and out, are the encoder's. Without a key, in
    evaluation, the same tokens are masked each time.

    Attributes:
      masking: share of the tokens that are predicted by the masked language model.
      head: `PretrainedMaskedLM(...)` of jaxir.interop.build, whose head the masked language model begins
        with; None: at random.
      span: how many tokens the decoder's attention sees.
    """

    masking: Portion = 0.15
    head: MaskedLMSource | None = None
    span: Count = 2
    decoder_layers: Layers = 3
    reads_with = "encode_with_tokens"

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> WeakDecoder:
        """Returns the decoder and the head of the masked language model.

        Raises:
          UserError: the tokenizer has no mask token, or heads of this size do not divide the encoder's width.
        """
        return WeakDecoder(self, model, form, rngs=rngs)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: WeakDecoder,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        ids = batch["text_ids"]
        *masking, encoding, decoding = layers.split_key(key, 4)
        masked, chosen = auxiliary.masked_lm.mask(ids, masking, share=self.masking)

        def read(part: Batch, keys: tuple[jax.Array | None, ...]) -> tuple[Any, Any]:
            encoding, decoding = keys
            encoder, ids = model.encoder_of("passage"), part["ids"]
            texts = [(part["masked"], "passage", encoding)]
            ((vector, hidden),) = model.unnormalized().encode_with_tokens(texts)
            how = {"share": self.masking}
            of_masked = auxiliary.masked_lm.losses(encoder, hidden, ids, part["chosen"], **how)
            return of_masked, next_token_losses(auxiliary.decoder, encoder, ids, vector, key=decoding)

        parts = {"ids": ids, "masked": masked, "chosen": chosen}
        of_masked, of_next = embed_in_chunks(read, parts, (encoding, decoding), chunks=self.chunks)
        of_masked, metrics = over_tokens(*of_masked)
        of_decoder, found = over_tokens(*of_next, ids[:, 1:] != 0)
        return of_masked + of_decoder, metrics | {
            "masked_lm_loss": of_masked,
            "decoder_loss": of_decoder,
            "decoder_accuracy": found["token_accuracy"],
        }


class WeakDecoder(nnx.Module):
    """The decoder, and the head of the masked language model."""

    def __init__(self, objective: Seed, model: Any, form: TextFormat, *, rngs: nnx.Rngs):
        self.decoder = objective.decoder(model, span=objective.span, rngs=rngs)
        self.masked_lm = MaskedWords(model, objective.head, form=form, rngs=rngs)

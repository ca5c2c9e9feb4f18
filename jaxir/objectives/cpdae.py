"""CPDAE: a text's vector predicts its words, alike for two maskings of the text (Ma et al. 2022)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.features import Features, Key, TextFormat
from jaxir.core.values import NotNegative, PositiveNumber, checked
from jaxir.losses.samtone import samtone
from jaxir.losses.tokens import over_tokens
from jaxir.losses.word_distributions import bag_of_words, js_softmax, log_normalised_sigmoid
from jaxir.models import layers
from jaxir.models.decoder import WordDecoder
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masked_lm import MaskedLMModule, MaskedTextObjective
from jaxir.objectives.masking import is_word
from jaxir.objectives.objective import Batch, Corpus, Metrics, RandomKey
from jaxir.runtime.partitioning import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CPDAE(MaskedTextObjective):
    """Contrastive pre-training of a discriminative autoencoder (Ma et al. 2022, doi 10.1145/3511808.3557527).

    Each text is masked twice, as BERT masks. The passage tower encodes each of the 2 B masked texts as a
    vector h, and a decoder of two layers computes a logit z for each word of the vocabulary. With y the words
    of the original text:

        L_REC = - sum_j ( y_j log sigmoid(z_j) + (1 - y_j) log(1 - sigmoid(z_j)) )               (eq. 4)
        L_CL  = - sum_i log( exp -JS(p'_i, p''_i) / sum_{k != i} exp -JS(p'_i, p_k) )            (eq. 5)
        loss  = L_REC + L_MLM + weight L_CL                                                      (eq. 6)

    p are the sigmoids divided by their sum, and k runs over the other 2 B - 1 masked texts. L_REC is the mean
    over the masked texts, L_MLM the mean over their masked tokens. L_CL is the sum over the B texts, as
    printed, so its part of the loss grows with the batch. The special first and last token ([CLS], [SEP]) are
    not words. A text that occurs twice in a batch is no negative of itself. In evaluation (no key) both
    maskings are always the same.

    Attributes:
      contrast: what is contrasted: "words": the word distributions; "vectors" (the paper's CPDAE_R): the
        vectors, whose similarity replaces -JS; None: nothing.
      weight: lambda, of the contrastive loss.
      temperature: divides -JS or the similarity; the paper has none, which is 1.
      idf: whether each word of L_REC is weighted by log((1 + N) / (1 + n)), where n of the corpus's N texts
        have it.
      chunks: as in `Contrastive`; the word distributions are those of the whole batch.
    """

    contrast: Literal["words", "vectors"] | None = "words"
    weight: NotNegative = 0.1
    temperature: PositiveNumber = 1.0
    idf: bool = False
    reads_with = "encode_with_tokens"

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: text_ids [L], text_key [2]."""
        return super().features(form) | {"text_key": Key("text")}

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> CPDAEModules:
        return CPDAEModules(model, form, head=self.head, idf=self.idf, rngs=rngs)

    def read_corpus(self, auxiliary: CPDAEModules, data: Corpus) -> None:
        """Sets the words' weights."""
        if self.idf:
            counts = data.token_counts("text", len(auxiliary.idf[...]))
            rarity = jnp.asarray((1 + counts.texts) / (1.0 + counts.texts_with), jnp.float32)
            auxiliary.idf[...] = jnp.log(rarity)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: CPDAEModules, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        ids, head = batch["text_ids"], auxiliary.masked_lm
        keys = layers.split_key(key, 6)
        masked, chosen = zip(
            *(head.mask(ids, keys[2 * n : 2 * n + 2], share=self.masking, fixed=n) for n in range(2)),
            strict=True,
        )

        def read(part: Batch, keys: tuple[RandomKey, ...]) -> tuple[Any, Any]:
            texts = [(part["first"], "passage", keys[0]), (part["second"], "passage", keys[1])]
            vectors, hidden = zip(*model.unnormalized().encode_with_tokens(texts), strict=True)
            encoder, places = model.encoder_of("passage"), (part["first_chosen"], part["second_chosen"])
            return vectors, [
                head.losses(encoder, x, part["ids"], chosen, share=self.masking)
                for x, chosen in zip(hidden, places, strict=True)
            ]

        parts = {"ids": ids, "first": masked[0], "second": masked[1]}
        parts |= {"first_chosen": chosen[0], "second_chosen": chosen[1]}
        vectors, found = embed_in_chunks(read, parts, tuple(keys[4:]), chunks=self.chunks)
        # Joined along the places, so a text's places stay on its device.
        of_tokens, metrics = over_tokens(*(jnp.concatenate(x, axis=1) for x in zip(*found, strict=True)))
        logits = [auxiliary.decoder(vector) for vector in vectors]
        words = words_of(ids, logits[0].shape[1])
        weights = None if auxiliary.idf is None else auxiliary.idf[...]
        found = [bag_of_words(z, words, weights=weights) for z in logits]
        reconstruction, more = jax.tree.map(lambda one, other: (one + other) / 2, *found)
        loss = reconstruction + of_tokens
        metrics |= more | {"reconstruction_loss": reconstruction, "masked_lm_loss": of_tokens}
        if self.contrast is not None:
            compared = tuple(map(model.compared, vectors))
            contrastive, more = self._contrast(compared, logits, batch.get("text_key"))
            loss += self.weight * contrastive
            more.pop("rows_without_negatives")  # the training loop would report that their loss is 0
            metrics |= more | {"contrastive_loss": contrastive}
        return loss, metrics

    def _contrast(
        self, vectors: tuple[jax.Array, ...], logits: list[jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        """Returns the sum of equation 5 and its metrics."""
        if self.contrast == "words":
            first, second = map(log_normalised_sigmoid, logits)
            mean, metrics = js_softmax(first, second, key=key, temperature=self.temperature)
        else:
            how = {"temperature": self.temperature, "bidirectional": False}
            mean, metrics = samtone(*vectors, None, query_key=key, passage_key=key, **how)
        return mean * len(vectors[0]), metrics


class CPDAEModules(nnx.Module):
    """The word decoder, the head of the masked language model, and the words' weights [V] or None."""

    def __init__(self, model: Any, form: TextFormat, *, head: Any, idf: bool, rngs: nnx.Rngs):
        words = model.config.backbone.vocab_size
        self.decoder = WordDecoder(model.config.dimension, words, rngs=rngs)
        self.masked_lm = MaskedLMModule(model, head, form=form, rngs=rngs)
        self.idf = nnx.Variable(jnp.ones((words,), jnp.float32)) if idf else None


def words_of(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Returns which words texts [B, L] contain, without the special first and last token: bool [B, V]."""
    places = jnp.where(is_word(ids), layers.table_rows(ids), vocab_size)  # beyond the last row: dropped
    none = jnp.zeros((vocab_size,), bool)
    found = jax.vmap(lambda row: none.at[row].set(True, mode="drop"))(places)
    return constrain(found, ("batch", "vocab"))

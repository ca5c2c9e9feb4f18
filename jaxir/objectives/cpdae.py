"""CPDAE: the vector of a masked text predicts its words, similarly for two maskings (Ma et al. 2022)."""

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

    Each text is masked twice, as in BERT. The passage tower encodes each of the 2 B masked texts as a vector
    h, and a decoder of two layers computes a logit z_j for each word j of the vocabulary. y_j is 1 if the
    original text contains word j, else 0:

        L_REC = - sum_j ( y_j log sigmoid(z_j) + (1 - y_j) log(1 - sigmoid(z_j)) )               (eq. 4)
        L_CL  = - sum_i log( exp -JS(p'_i, p''_i) / sum_{k != i} exp -JS(p'_i, p_k) )            (eq. 5)
        loss  = L_REC + L_MLM + weight L_CL                                                      (eq. 6)

    p is the vector of sigmoids of z, divided by their sum. k runs over the other 2 B - 1 masked texts. L_REC
    is the mean over the masked texts, and L_MLM is the mean over their masked tokens. L_CL is the sum over
    the B texts, as in the paper, so its part of the loss grows with the batch. The special first and last
    token ([CLS], [SEP]) are not words. A text that occurs twice in a batch is not a negative of itself. In
    evaluation (no key) every call masks the same tokens.

    Attributes:
      contrast: what L_CL compares: "words": the word distributions; "vectors" (the paper's CPDAE_R): the
        vectors, whose similarity replaces -JS; None: there is no L_CL.
      weight: the weight of L_CL, the paper's lambda.
      temperature: divides -JS or the similarity. The paper has no temperature, which equals 1.
      idf: whether each word of L_REC is weighted by log((1 + N) / (1 + n)), where N is the number of texts in
        the corpus, and n is the number of texts that contain the word.
      chunks: the number of parts for gradient caching, see `Contrastive`. The word distributions are not cut.
    """

    contrast: Literal["words", "vectors"] | None = "words"
    weight: NotNegative = 0.1
    temperature: PositiveNumber = 1.0
    idf: bool = False
    reads_with = "encode_with_tokens"

    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: text_ids [L] and text_key [2], a hash of each text's id."""
        return super().features(form) | {"text_key": Key("text")}

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> CPDAEModules:
        return CPDAEModules(model, form, head=self.head, idf=self.idf, rngs=rngs)

    def read_corpus(self, auxiliary: CPDAEModules, data: Corpus) -> None:
        """Sets the inverse document frequency of each word, if `idf` is set."""
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
        # Concatenate along the token axis, so that a text's tokens stay on its device.
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
            # Remove this metric: the training loop stops if no row has negatives, but this objective has
            # other losses, too.
            more.pop("rows_without_negatives")
            metrics |= more | {"contrastive_loss": contrastive}
        return loss, metrics

    def _contrast(
        self, vectors: tuple[jax.Array, ...], logits: list[jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        """Returns the contrastive loss, summed over the texts (Ma et al. 2022, eq. 5), and its metrics."""
        if self.contrast == "words":
            first, second = map(log_normalised_sigmoid, logits)
            mean, metrics = js_softmax(first, second, key=key, temperature=self.temperature)
        else:
            how = {"temperature": self.temperature, "bidirectional": False}
            mean, metrics = samtone(*vectors, None, query_key=key, passage_key=key, **how)
        return mean * len(vectors[0]), metrics


class CPDAEModules(nnx.Module):
    """CPDAE's word decoder, masked-language-model head, and weights of words [V] (None if all are 1)."""

    def __init__(self, model: Any, form: TextFormat, *, head: Any, idf: bool, rngs: nnx.Rngs):
        words = model.config.backbone.vocab_size
        self.decoder = WordDecoder(model.config.dimension, words, rngs=rngs)
        self.masked_lm = MaskedLMModule(model, head, form=form, rngs=rngs)
        self.idf = nnx.Variable(jnp.ones((words,), jnp.float32)) if idf else None


def words_of(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Returns a mask, bool [B, V], of the words in texts [B, L], without special first and last tokens."""
    # The row of a token that is not a word is `vocab_size`, so mode="drop" ignores it.
    places = jnp.where(is_word(ids), layers.table_rows(ids), vocab_size)
    none = jnp.zeros((vocab_size,), bool)
    found = jax.vmap(lambda row: none.at[row].set(True, mode="drop"))(places)
    return constrain(found, ("batch", "vocab"))

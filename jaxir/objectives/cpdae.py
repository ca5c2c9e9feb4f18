"""CPDAE: a text's vector predicts its words, and two maskings of it the same ones (Ma et al. 2022)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.features import Features, Key, TextFormat
from jaxir.core.values import NotNegative, Portion, PositiveNumber, checked
from jaxir.losses.samtone import samtone
from jaxir.losses.tokens import over_tokens
from jaxir.losses.word_distributions import bag_of_words, js_softmax, log_normalised_sigmoid
from jaxir.models import layers
from jaxir.models.decoder import WordDecoder
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masked_lm import MaskedWords
from jaxir.objectives.masking import is_word
from jaxir.objectives.objective import Batch, Corpus, Metrics, TextObjective
from jaxir.objectives.pretrained_heads import MaskedLMSource
from jaxir.runtime.partitioning import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CPDAE(TextObjective):
    """Contrastive pre-training of a discriminative autoencoder (Ma et al. 2022, doi 10.1145/3511808.3557527).

    Each text is masked twice, as BERT masks. The passage tower makes a vector h of each of the 2 B masked
    texts, a decoder of two layers a logit z for each word of the vocabulary, and with y the words of the
    text that was masked

        L_REC = - sum_j ( y_j log sigmoid(z_j) + (1 - y_j) log(1 - sigmoid(z_j)) )               (eq. 4)
        L_CL  = - sum_i log( exp -JS(p'_i, p''_i) / sum_{k != i} exp -JS(p'_i, p_k) )            (eq. 5)
        loss  = L_REC + L_MLM + weight L_CL                                                      (eq. 6)

    where p are the sigmoids divided by their sum, and k goes over the other 2 B - 1 masked texts. L_REC is
    the mean over the masked texts, L_MLM the mean over their masked tokens, L_CL the sum over the B texts, as
    printed: its part of the loss grows with the batch. What stands at both ends of a text ([CLS], [SEP]) is
    no word of it. Texts that come twice in a batch are no negatives of each other.

    Without a key, in evaluation, both maskings are always the same ones.

    Attributes:
      masking: share of the tokens that are predicted by the masked language model: of these 80 % are masked,
        10 % become another token.
      head: `PretrainedMaskedLM(...)` of jaxir.interop.build, whose head the masked language model begins
        with; None: at random.
      contrast: what is contrasted: "words", the word distributions; "vectors" (the paper's CPDAE_R): -JS is
        then the similarity of the vectors; None: nothing.
      weight: lambda, of the contrastive loss.
      temperature: divides -JS or the similarity; the paper has none, which is 1.
      idf: weighs each word of L_REC by log((1 + N) / (1 + n)), where n of the N texts of the corpus have it.
      chunks: as in `Contrastive`; the word distributions are those of the whole batch.
    """

    masking: Portion = 0.15
    head: MaskedLMSource | None = None
    contrast: Literal["words", "vectors"] | None = "words"
    weight: NotNegative = 0.1
    temperature: PositiveNumber = 1.0
    idf: bool = False
    reads_with = "encode_with_tokens"

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: text_ids [L], text_key [2]."""
        return super().features(form) | {"text_key": Key("text")}

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> WordsAndTokens:
        """Returns the decoder, the head of the masked language model and the words' weights.

        Raises:
          UserError: the tokenizer has no mask token, or the head is of another vocabulary or width.
        """
        return WordsAndTokens(model, form, head=self.head, idf=self.idf, rngs=rngs)

    def read_corpus(self, auxiliary: WordsAndTokens, data: Corpus) -> None:
        """Sets the words' weights."""
        if self.idf:
            counts = data.token_counts("text", len(auxiliary.idf[...]))
            rarity = jnp.asarray((1 + counts.texts) / (1.0 + counts.texts_with), jnp.float32)
            auxiliary.idf[...] = jnp.log(rarity)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: WordsAndTokens,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        ids, head = batch["text_ids"], auxiliary.masked_lm
        keys = layers.split_key(key, 6)
        masked, chosen = zip(
            *(head.mask(ids, keys[2 * n : 2 * n + 2], share=self.masking, fixed=n) for n in range(2)),
            strict=True,
        )

        def read(part: Batch, keys: tuple[jax.Array | None, ...]) -> tuple[Any, Any]:
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
        # Side by side: a text's places stay on its device.
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
            more.pop("rows_without_negatives")  # of which the loop says that the loss is 0
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


class WordsAndTokens(nnx.Module):
    """The decoder to words, the head of the masked language model, and the words' weights [V] or None."""

    def __init__(self, model: Any, form: TextFormat, *, head: Any, idf: bool, rngs: nnx.Rngs):
        words = model.config.backbone.vocab_size
        self.decoder = WordDecoder(model.config.dimension, words, rngs=rngs)
        self.masked_lm = MaskedWords(model, head, form=form, rngs=rngs)
        self.idf = nnx.Variable(jnp.ones((words,), jnp.float32)) if idf else None


def words_of(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Returns bool [B, V]: which words texts [B, L] have, but for what stands at both ends."""
    places = jnp.where(is_word(ids), layers.table_rows(ids), vocab_size)  # beyond the last: dropped
    none = jnp.zeros((vocab_size,), bool)
    found = jax.vmap(lambda row: none.at[row].set(True, mode="drop"))(places)
    return constrain(found, ("batch", "vocab"))

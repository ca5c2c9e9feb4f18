"""PROP: the model learns which of two word sets represents a document better (Ma et al. 2021)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN, TextFormat
from jaxir.core.values import Count, Positive, PositiveNumber, checked
from jaxir.losses.tokens import over_tokens
from jaxir.models import layers
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masked_lm import MaskedLMModule, MaskedTextObjective
from jaxir.objectives.masking import is_word
from jaxir.objectives.objective import Batch, Corpus, Metrics, RandomKey


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PROP(MaskedTextObjective):
    """Pre-training with representative words prediction (Ma et al. 2021, arXiv:2010.10137).

    A document D has a unigram language model, Dirichlet-smoothed by the corpus C. With c(w, D) the count of
    word w in D:

        P(w | D) = (c(w, D) + mu P(w | C)) / (|D| + mu)

    Two word sets of equal size are drawn from this language model, each word independently. The set with the
    higher probability (the product over its words), S+, should be nearer to the document than the other, S-:

        loss = mean of max(0, margin - s(S+, D) + s(S-, D)) + L_MLM

    The mean is over pairs of sets that are not equally probable. s is the similarity of the model's vectors:
    PROP with two towers, as in Ma et al. 2022 (the original encodes set and document together). The query
    tower encodes the sets, and the passage tower encodes the document with some tokens masked. L_MLM is
    BERT's loss of these tokens. Words are the tokenizer's tokens except the special first and last token. In
    evaluation (no key) sets and masks are always the same.

    Attributes:
      margin: the margin of the hinge loss.
      mean_words: the mean of the Poisson distribution of a set's size, truncated to 1 ... `most_words`.
      most_words: the maximum number of words per set.
      mu: the Dirichlet smoothing; None: the mean number of words per text of the corpus.
      subsampling: a frequency t, used instead of a list of stop words. Words with a frequency f above t are
        drawn less often, by the factor sqrt(t / f) + t / f. None: no factor.
    """

    margin: PositiveNumber = 1.0
    mean_words: PositiveNumber = 3.0
    most_words: Count = 10
    mu: PositiveNumber | None = None
    subsampling: Positive | None = 1e-4
    reads_with = "encode_with_tokens"

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> PROPModules:
        limit = model.config.backbone.max_positions
        if limit is not None and self.most_words + 2 > limit:
            raise UserError(
                f"word sets have up to {self.most_words + 2} tokens, and the model reads {limit}: reduce"
                " PROP's most_words"
            )
        return PROPModules(MaskedLMModule(model, self.head, form=form, rngs=rngs))

    def read_corpus(self, auxiliary: PROPModules, data: Corpus) -> None:
        """Sets each word's probability in the corpus, its factor by `subsampling`, and the smoothing mu."""
        counts = data.token_counts("text", len(auxiliary.p[...]))
        total = max(int(counts.occurrences.sum()), 1)
        p = counts.occurrences / total
        kept = np.ones_like(p)
        if self.subsampling is not None:
            ratio = self.subsampling / np.maximum(p, 1e-30)
            kept = np.minimum(1.0, np.sqrt(ratio) + ratio)
        auxiliary.p[...] = jnp.asarray(p, jnp.float32)
        auxiliary.kept[...] = jnp.asarray(kept, jnp.float32)
        mu = total / max(counts.texts, 1) if self.mu is None else self.mu
        auxiliary.mu[...] = jnp.float32(mu)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: PROPModules, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        ids, masked_lm = batch["text_ids"], auxiliary.masked_lm
        drawing, *masking, of_sets, of_documents = layers.split_key(key, 5)
        sets = self.draw(ids, auxiliary, jax.random.key(0) if drawing is None else drawing)
        masked, chosen = masked_lm.mask(ids, masking, share=self.masking)

        def read(part: Batch, keys: tuple[RandomKey, ...]) -> tuple[Any, Any]:
            sets = part["sets"].reshape(2 * len(part["sets"]), -1)
            texts = [(sets, "query", keys[0]), (part["masked"], "passage", keys[1])]
            (vectors, _), (document, hidden) = model.encode_with_tokens(texts)
            near = jnp.einsum("BSD,BD->BS", vectors.reshape(len(document), 2, -1), document)
            encoder = model.encoder_of("passage")
            of_tokens = masked_lm.losses(encoder, hidden, part["ids"], part["chosen"], share=self.masking)
            return near, of_tokens

        parts = {"ids": ids, "masked": masked, "chosen": chosen, "sets": sets.ids}
        near, of_tokens = embed_in_chunks(read, parts, (of_sets, of_documents), chunks=self.chunks)
        of_masked, metrics = over_tokens(*of_tokens)
        better = jnp.sign(sets.log_p[:, 0] - sets.log_p[:, 1])
        ahead = better * (near[:, 0] - near[:, 1])
        differ = better != 0
        count = jnp.maximum(differ.sum(dtype=jnp.float32), 1.0)
        hinge = jnp.where(differ, jax.nn.relu(self.margin - ahead), 0.0).sum() / count
        return hinge + of_masked, metrics | {
            "masked_lm_loss": of_masked,
            "word_sets_loss": hinge,
            "word_sets_accuracy": (differ & (ahead > 0)).sum(dtype=jnp.float32) / count,
        }

    def draw(self, ids: jax.Array, corpus: PROPModules, key: jax.Array) -> WordSets:
        """Draws two word sets for each document of `ids` [B, L]."""
        rows, length = ids.shape
        of_size, of_place, of_corpus = jax.random.split(key, 3)
        own = is_word(ids)
        p, kept, mu = map(jax.lax.stop_gradient, (corpus.p[...], corpus.kept[...], corpus.mu[...]))
        sizes = np.arange(1, self.most_words + 1)
        log_sizes = [n * math.log(self.mean_words) - math.lgamma(n + 1) for n in sizes.tolist()]
        size = 1 + jax.random.categorical(of_size, jnp.asarray(log_sizes, jnp.float32), shape=(rows,))

        # Draw a position of the document or, with weight mu, a word of the corpus.
        cumulative = jnp.cumsum(p * kept)
        weights = jnp.where(own, kept[layers.table_rows(ids)], 0.0)
        weights = jnp.concatenate([weights, jnp.broadcast_to(mu * cumulative[-1], (rows, 1))], axis=1)
        shape = (rows, 2, self.most_words)
        place = jax.random.categorical(of_place, jnp.log(weights)[:, None, None], shape=shape)
        below = jnp.nextafter(cumulative[-1], jnp.float32(0))  # uniform * total may round up to the total
        levels = jnp.minimum(jax.random.uniform(of_corpus, shape) * cumulative[-1], below)
        any_word = jnp.searchsorted(cumulative, levels, side="right").astype(jnp.int32)
        own_word = jnp.take_along_axis(ids[:, None], jnp.minimum(place, length - 1).astype(jnp.int32), axis=2)
        any_word = jnp.where(any_word == 0, PADDING_TOKEN, any_word)
        words = jnp.where(place == length, any_word, own_word)

        count = ((words[..., None] == ids[:, None, None]) & own[:, None, None]).sum(-1, dtype=jnp.float32)
        of_document = own.sum(1, dtype=jnp.float32)[:, None, None]
        log_p = jnp.log((count + mu * p[layers.table_rows(words)]) / (of_document + mu))
        inside = jnp.arange(self.most_words)[None] < size[:, None]
        total = jnp.where(inside[:, None], log_p, 0.0).sum(-1)

        first = jnp.broadcast_to(ids[:, :1, None], (rows, 2, 1))
        last = jnp.take_along_axis(ids, (ids != 0).sum(1, dtype=jnp.int32)[:, None] - 1, axis=1)
        places = jnp.arange(self.most_words + 2)[None, None]
        text = jnp.concatenate([first, words, first], axis=2)
        end = 1 + size[:, None, None]
        text = jnp.where(places < end, text, jnp.where(places == end, last[..., None], 0))
        return WordSets(text, total)


class WordSets(NamedTuple):
    """Two word sets of each of B documents."""

    ids: jax.Array  # int32 [B, 2, most_words + 2], each between the special first and last token
    log_p: jax.Array  # float32 [B, 2], the logarithm of each set's probability


class PROPModules(nnx.Module):
    """PROP's masked-language-model head, and statistics of the corpus C.

    Attributes:
      p: [V], P(w | C), each word's relative frequency in the corpus.
      kept: [V], the factor by which each word is drawn less often (`PROP.subsampling`).
      mu: [], the Dirichlet smoothing.
    """

    def __init__(self, masked_lm: MaskedLMModule):
        self.masked_lm = masked_lm
        words = masked_lm.head.bias[...].shape[0]
        uniform = jnp.full((words,), 1 / words, jnp.float32)
        self.p, self.kept = nnx.Variable(uniform), nnx.Variable(jnp.ones((words,), jnp.float32))
        self.mu = nnx.Variable(jnp.float32(1.0))

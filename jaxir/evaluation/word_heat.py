"""Computes the probability of each word of a text, given its vector, by CPDAE's decoder (Ma et al. 2022)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.evaluation.text_tables import format_table
from jaxir.interop.model import stored_arrays
from jaxir.models.decoder import WordDecoder
from jaxir.retrieval.encoding.text_encoder import DualEncoder

Words = list[tuple[str, float]]

_WORD = re.compile(r"\s?(\w+|[^\w\s])")  # a word with the space before it, which some tokenizers need
SHOWN = 5  # number of most probable words shown per text


def word_probabilities(run: str, texts: Sequence[str]) -> list[Words]:
    """Returns each text's words with the probability that the word decoder gives them from its vector.

    `run` is a training run of CPDAE, whose word decoder is read. The distribution is that of
    `losses.word_distributions.log_normalised_sigmoid`, which sums to 1 over the vocabulary. A word's
    probability is the sum over its subwords, as in Ma et al. 2022, table 4.
    """
    encoder, decoder = DualEncoder.load(run), read_decoder(run)
    logits = np.asarray(decoder(jnp.asarray(encoder.encode_passages(list(texts)))), np.float64)
    likely = np.exp(-np.logaddexp(0.0, -logits))  # sigmoid(logits), without overflow
    return [score_words(text, p / p.sum(), encoder.tokenizer) for text, p in zip(texts, likely, strict=True)]


def score_words(text: str, p: np.ndarray, tokenizer: Tokenizer) -> Words:
    """Returns the words of a text, each with the sum of its subwords' probabilities `p` [V]."""
    found = list(_WORD.finditer(text))
    rows = tokenizer.encode_batch([word[0] for word in found], max_length=64)
    return [(word[1], float(p[ids[1:-1]].sum())) for word, ids in zip(found, rows, strict=True)]


def read_decoder(run: str) -> WordDecoder:
    """Returns the word decoder that was trained in a run of CPDAE, or of a sum of objectives with CPDAE."""
    arrays = stored_arrays.read_auxiliary(run)
    ends = ("dense.kernel", "dense.bias", "norm.scale", "norm.bias", "out.kernel", "out.bias")
    prefixes = [name.removesuffix(ends[0]) for name in arrays if name.endswith(ends[0])]
    prefixes = [p for p in prefixes if all(f"{p}{end}" in arrays for end in ends)]
    if not prefixes:
        raise UserError(f"{run}: its objective has no word decoder: give a run of jaxir.train with CPDAE")
    decoder = WordDecoder(*arrays[f"{prefixes[0]}out.kernel"].shape, rngs=nnx.Rngs(0))
    for layer, name in (end.split(".") for end in ends):
        part = getattr(getattr(decoder, layer), name)
        part[...] = np.asarray(arrays[f"{prefixes[0]}{layer}.{name}"])
    return decoder


def table(models: Mapping[str, Sequence[Words]]) -> str:
    """Returns a table of each text's most probable words, a row for each model and text."""
    rows = [
        [name, number, ", ".join(f"{word} {share:.4f}" for word, share in _most_probable(words))]
        for name, texts in models.items()
        for number, words in enumerate(texts, 1)
    ]
    header = ["model", "text", "most probable of its words"]
    return f"Table 4: word distributions\n\n{format_table(header, rows, digits=3)}"


def _most_probable(words: Words) -> Words:
    return sorted(dict(words).items(), key=lambda item: -item[1])[:SHOWN]

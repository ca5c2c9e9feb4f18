"""Reads files of word vectors (word2vec's text and binary formats, GloVe's text format) as models.

A text's words are its runs of letters, digits and underscores, and its runs of other characters except white
space. They are lower-cased if no word of the file has a capital letter. Words that are not in the file become
padding, which is ignored: the vector of a text is the mean of its known words' vectors, as in gensim's
`get_mean_vector` without normalisation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from jaxir.core.errors import BadInputError
from jaxir.data.formats.lines import raw_lines
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.word_vectors import WordVectorsConfig
from jaxir.storage.temporary_outputs import temporary_directory

_PADDING = "[PAD]"  # never a word of a text, because brackets are separate words
_LENGTH = 512  # maximum number of words per text

# Yields (number, word, vector). The number, from 1 on, counts lines of a text file or words of a binary file.
Rows = Iterator[tuple[int, bytes, np.ndarray]]


def read(path: str) -> StoredModel:
    """Reads a file of word vectors, possibly gzipped; the first vector of a repeated word is used."""
    ids: dict[str, int] = {_PADDING: 0}
    vectors: list[np.ndarray] = []
    for number, name, vector in _rows(path):
        if not np.isfinite(vector).all():
            raise BadInputError(path, number, "the vector has a number that is not finite; remove the word")
        if ids.setdefault(name.decode("utf-8", "replace"), len(ids)) == len(vectors) + 1:
            vectors.append(vector)
    if not vectors:
        raise BadInputError(path, None, "no word vector in it; copy the file again")
    table = np.stack([np.zeros_like(vectors[0]), *vectors])
    backbone = WordVectorsConfig(vocab_size=len(table), embed_dim=table.shape[1])
    return StoredModel(
        config=DualEncoderConfig(backbone=backbone),
        params={"encoder.table.embedding": table},
        tokenizer=_tokenizer(ids),
        settings=EncoderSettings(query_max_length=_LENGTH, passage_max_length=_LENGTH),
    )


def _tokenizer(ids: dict[str, int]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=_PADDING))
    if all(word == word.lower() for word in ids if word != _PADDING):
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with temporary_directory() as directory:
        backend.save(str(directory / "tokenizer.json"))
        return Tokenizer.load(directory)


def _rows(path: str) -> Rows:
    lines = raw_lines(path)
    number, first = next(lines)
    header = first.split()
    if len(header) != 2 or not all(field.isdigit() for field in header):
        return _text(path, itertools.chain([(number, first)], lines), max(1, len(header) - 1))
    count, width = map(int, header)
    if not width:
        raise BadInputError(path, 1, "its vectors have 0 dimensions; expected at least 1")
    number, second = next(lines, (2, b""))
    if _is_text(second, width):
        return _counted(path, _text(path, itertools.chain([(number, second)], lines), width), count)
    content = b"".join([second, *(line for _, line in lines)])
    return _counted(path, _binary(content, width), count)


def _is_text(line: bytes, width: int) -> bool:
    try:
        return len([float(field) for field in line.split()[-width:]]) == width
    except ValueError:
        return False


def _text(path: str, lines: Iterable[tuple[int, bytes]], width: int) -> Rows:
    for number, line in lines:
        name, *fields = line.rstrip().rsplit(b" ", width)  # a word in GloVe's files may contain spaces
        try:
            vector = np.array([float(field) for field in fields], np.float32)
        except ValueError:
            vector = np.empty(0, np.float32)
        # "_" is refused, because float() would accept 1_0.
        if len(vector) != width or any(b"_" in field for field in fields):
            raise BadInputError(path, number, f"expected a word and {width} numbers, separated by spaces")
        yield number, name, vector


def _binary(content: bytes, width: int) -> Rows:
    at, number = 0, 0
    while (space := content.find(b" ", at)) >= 0 and space + 1 + 4 * width <= len(content):
        number += 1
        name, at = content[at:space].lstrip(b"\n"), space + 1 + 4 * width
        yield number, name, np.frombuffer(content, "<f4", width, space + 1)


def _counted(path: str, rows: Rows, count: int) -> Rows:
    found = 0
    for row in rows:
        found += 1
        yield row
    if found != count:
        raise BadInputError(
            path, None, f"its first line says {count:,} words, but it has {found:,}; copy it again"
        )

"""Semantic textual similarity: how well cosine ranks pairs of sentences as people did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from scipy import stats

from jaxir.data.lines import MalformedRecord, as_number, parsed_lines
from jaxir.errors import BadInputError, UserError
from jaxir.files import local_path

HEADER = ["score", "sentence1", "sentence2"]


class SentencePair(NamedTuple):
    """Two sentences and how similar people found them."""

    score: float
    sentence1: str
    sentence2: str


class QueryEncoder(Protocol):
    """What is asked of a model: texts to float32 vectors [N, D]."""

    def encode_queries(self, texts: list[str]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class STSScores:
    """Spearman's rank correlation x 100 between people's scores and the cosine of the two vectors.

    Attributes:
      spearman: per file (its name without .tsv), then "all": the pairs of all files taken together.
      pairs: the number of pairs behind each.
    """

    spearman: dict[str, float]
    pairs: dict[str, int]


def evaluate_sts(encoder: QueryEncoder, sets: Mapping[str, Sequence[SentencePair]]) -> STSScores:
    """Evaluates a model on sets of sentence pairs; both sentences go through the query tower.

    Args:
      encoder: the model.
      sets: name to pairs, as `read_sts` gives them.
    """
    return scores_of(sets, encoder.encode_queries(sentences_of(sets)))


def sentences_of(sets: Mapping[str, Sequence[SentencePair]]) -> list[str]:
    """Returns the distinct sentences of all pairs, in order."""
    return sorted({text for pairs in sets.values() for p in pairs for text in (p.sentence1, p.sentence2)})


def scores_of(sets: Mapping[str, Sequence[SentencePair]], vectors: np.ndarray) -> STSScores:
    """Scores the vectors float32 [N, D] of `sentences_of(sets)`, of any length."""
    row = {text: i for i, text in enumerate(sentences_of(sets))}
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(lengths > 0, lengths, 1)
    together = {**sets, "all": [pair for pairs in sets.values() for pair in pairs]}
    spearman = {}
    for name, pairs in together.items():
        first = vectors[[row[p.sentence1] for p in pairs]]
        second = vectors[[row[p.sentence2] for p in pairs]]
        spearman[name] = _spearman(np.sum(first * second, axis=1), np.array([p.score for p in pairs]))
    return STSScores(spearman=spearman, pairs={name: len(pairs) for name, pairs in together.items()})


def read_sts(path: str | Path) -> dict[str, list[SentencePair]]:
    """Reads a .tsv file, or every one of a folder in the order of their names.

    Args:
      path: a file of `score<TAB>sentence1<TAB>sentence2` under a header line, or a folder of such.

    Returns:
      The pairs of each file, by its name without .tsv.

    Raises:
      BadInputError: a file without header or with fewer than two different scores, or a malformed line.
      UserError: no such file or folder, no .tsv files in it, or one called all.tsv.
    """
    path = local_path(path)
    if not path.is_dir() and not path.is_file():
        raise UserError(f"{path} is not a folder of .tsv files, nor one of them")
    files = [path] if path.is_file() else sorted(path.glob("*.tsv"))
    if not files:
        raise UserError(f"{path} has no .tsv files (score, sentence1, sentence2)")
    for file in files:
        if file.stem == "all":
            raise UserError(f"{file}: 'all' names the pairs of all files together; rename the file")
    return {file.stem: _read_file(file) for file in files}


def _spearman(cosine: np.ndarray, scores: np.ndarray) -> float:
    if np.ptp(cosine) == 0:  # a collapsed model ranks nothing, and the correlation is undefined
        return 0.0
    return 100 * float(stats.spearmanr(cosine, scores).statistic)


def _read_file(path: Path) -> list[SentencePair]:
    pairs = list(parsed_lines(path, _parse, "stop"))
    if len({p.score for p in pairs}) < 2:
        raise BadInputError(path, None, "needs pairs of at least two different scores")
    return pairs


def _parse(line: str, number: int) -> SentencePair | None:
    fields = [field.strip() for field in line.split("\t")]
    if number == 1:
        if [field.lower() for field in fields] != HEADER:
            raise MalformedRecord(f"the header must be {'<TAB>'.join(HEADER)}")
        return None
    if len(fields) != 3:
        raise MalformedRecord("expected 3 columns separated by tabs,", f"found {len(fields)}")
    if (score := as_number(fields[0])) is None:
        raise MalformedRecord("the score is not a number:", repr(fields[0]))
    if not fields[1] or not fields[2]:
        raise MalformedRecord("a sentence is empty")
    return SentencePair(score, fields[1], fields[2])

"""Reads learned sparse vectors (SPLADE, uniCOIL): lines of {"id": ..., "vector": {token: weight}}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    json_object,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.sources import new_id

ID_FIELDS = ("_id", "id", "docid", "qid")
VECTOR_FIELDS = ("vector", "weights")

MAX_WEIGHT = 65_535  # limits an index's size, because Lucene stores a token as often as its weight


class SparseVector(NamedTuple):
    """A document or a query as weights of tokens.

    Attributes:
      id: the id in the file.
      weights: {token: positive integer}; empty if all weights are 0.
    """

    id: str
    weights: dict[str, int]


def read_sparse_vectors(
    path: str | Path, on_bad_input: OnBadInput | Policy = "stop"
) -> Iterator[SparseVector]:
    """Yields the vectors of a .jsonl[.gz] of documents or queries, in the format of Anserini's collections.

    Each line has an id ("_id", "id", "docid" or "qid", a string or an integer) and a "vector" (or "weights").
    Weights of 0 are left out; other fields are ignored.
    """
    seen: dict[str, int] = {}

    def parse(line: str, _: int) -> SparseVector:
        record = json_object(line)
        name = next((name for name in ID_FIELDS if name in record), ID_FIELDS[0])
        number = isinstance(record.get(name), int) and not isinstance(record[name], bool)
        identifier = str(record[name]) if number else string_field(record, name)
        field = next((name for name in VECTOR_FIELDS if name in record), None)
        if field is None:
            present = ", ".join(map(repr, record))
            raise MalformedRecord("no field 'vector' of {token: weight}", f"(it has {present:.200})")
        weights = weights_of(record[field])
        return SparseVector(new_id(identifier, seen, frozenset(weights.items())), weights)

    return parsed_lines(path, parse, on_bad_input)


def parse_weights(text: str) -> dict[str, int]:
    """Parses a text {"token": weight, ...}, such as a query given on the command line."""
    return weights_of(json_object(text))


def weights_of(value: Any) -> dict[str, int]:
    """Returns a vector as {token: integer}, without weights of 0; raises MalformedRecord for other values."""
    if not isinstance(value, Mapping):
        raise MalformedRecord("a vector must be an object {token: weight},", f"not {value!r:.40}")
    weights = {}
    for token, weight in value.items():
        if token.split() != [token]:
            raise MalformedRecord("a token is empty or has white space in it:", repr(token))
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight < 0 or weight % 1:
            raise MalformedRecord(
                "a weight is not a whole number above 0 (SPLADE's are multiplied by 100 and rounded):",
                f"{token!r} has {weight!r:.20}",
            )
        if weight > MAX_WEIGHT:
            raise MalformedRecord(f"a weight is above {MAX_WEIGHT:,}:", f"{token!r} has {weight!r:.20}")
        if weight:
            weights[token] = int(weight)
    return weights

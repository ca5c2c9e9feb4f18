"""DPR's training files (Karpukhin et al. 2020), such as biencoder-nq-train.json.gz.

Open Natural Questions, TriviaQA and others, with passages of 100 words of Wikipedia and BM25's negatives.
A file is one JSON array over many lines, larger than memory: it is read object by object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxir.core.errors import BadInputError
from jaxir.data.formats.json_arrays import json_array
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    as_object,
    list_field,
    needed_text,
    string_field,
)
from jaxir.data.formats.pair_files import is_negative
from jaxir.data.formats.sources import PairExample, joined, text_id
from jaxir.data.sets.pair_sources import PairSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class DprPairs(PairSource):
    """A training file of DPR; see `read_dpr`."""

    path: str

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields a pair for each positive passage of each question."""
        return read_dpr(self.path, on_bad_input)


def read_dpr(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[PairExample]:
    """Yields a pair for each of `positive_ctxs` of each object, with its `hard_negative_ctxs`.

    Negatives that are among the positive passages too are left out.
    Ids are the hashes of the texts: equal passages are one, whatever the file calls them.

    Raises:
      BadInputError: a malformed object, unless they are skipped; a file that is no JSON array.
    """
    collector = on_bad_input if isinstance(on_bad_input, OnBadInput) else OnBadInput(on_bad_input)
    usable = False
    for number, item in json_array(path):
        try:
            examples = _pairs(as_object(item, "the array"))
        except MalformedRecord as fault:
            collector.record(path, number, fault.kind, fault.detail)
            continue
        usable = True
        yield from examples
    if not usable:
        raise BadInputError(path, None, "the file has no usable record")
    if collector is not on_bad_input:
        collector.report()


def _pairs(record: dict[str, Any]) -> list[PairExample]:
    query = needed_text(record, "question")
    positives, negatives = (
        tuple(_passage(as_object(item, name)) for item in list_field(record, name))
        for name in ("positive_ctxs", "hard_negative_ctxs")
    )
    if not positives:
        raise MalformedRecord("no passage in 'positive_ctxs'")
    return [
        PairExample(
            text_id(query), query, *text, tuple(n for n in negatives if is_negative(n, text, positives))
        )
        for text in positives
    ]


def _passage(record: dict[str, Any]) -> tuple[str, str]:
    text = joined(string_field(record, "title", ""), needed_text(record, "text"))
    return text_id(text), text

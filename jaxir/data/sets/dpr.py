"""Reads DPR's training files (Karpukhin et al. 2020), such as biencoder-nq-train.json.gz.

These files cover open-domain Natural Questions, TriviaQA and others, with Wikipedia passages of 100 words and
BM25's hard negatives. A file is one JSON array, which may exceed memory, so it is read object by object.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxir.data.formats.json_arrays import json_array
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    as_object,
    list_field,
    needed_text,
    parsed,
    string_field,
)
from jaxir.data.formats.sources import PairExample, joined, text_id
from jaxir.data.sets.pair_sources import PairSource, is_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class DprPairs(PairSource):
    """The pairs of a DPR training file: objects with `question`, `positive_ctxs` and `hard_negative_ctxs`.

    Negatives that are also positive passages are left out. Ids are hashes of the texts, so equal texts have
    the same id.
    """

    path: str

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        return itertools.chain.from_iterable(
            parsed(self.path, json_array(self.path), lambda item, _: _pairs(item), on_bad_input)
        )


def _pairs(item: Any) -> list[PairExample]:
    record = as_object(item, "the array")
    query = needed_text(record, "question")
    positives, negatives = (
        tuple(_passage(as_object(item, name)) for item in list_field(record, name))
        for name in ("positive_ctxs", "hard_negative_ctxs")
    )
    if not positives:
        raise MalformedRecord("'positive_ctxs' has no passage")
    return [
        PairExample(
            text_id(query), query, *text, tuple(n for n in negatives if is_negative(n, text, positives))
        )
        for text in positives
    ]


def _passage(record: dict[str, Any]) -> tuple[str, str]:
    text = joined(string_field(record, "title", ""), needed_text(record, "text"))
    return text_id(text), text

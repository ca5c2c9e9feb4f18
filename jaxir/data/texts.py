"""Texts by themselves, without labels, and texts to be written for texts: where there are no pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxir.data.lines import OnBadInput, json_object, needed_text, parsed_lines
from jaxir.data.sources import BeirFolder, read_corpus, read_lines
from jaxir.data.text_data import RecordSource
from jaxir.features import Record
from jaxir.files import local_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts(RecordSource):
    """Texts: the field `text`.

    Attributes:
      path: a file with a text on each line; a .jsonl[.gz] of documents (`_id`, `text`, maybe `title`), as the
        corpus of a BEIR folder; or such a folder.
    """

    path: str

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        """Yields the texts; documents without any are left out."""
        place = local_path(self.path)
        if place.is_dir():
            place = BeirFolder(place).corpus_path
        if ".jsonl" in Path(place).suffixes:
            documents = read_corpus(place, on_bad_input)
            return ({"text": (d.id, d.contents)} for d in documents if d.contents)
        return ({"text": tuple(line)} for line in read_lines(place, on_bad_input))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcesAndTargets(RecordSource):
    """What a generator learns to write for what: the fields `source` and `target`.

    Attributes:
      path: a .jsonl[.gz] of {"source", "target"}.
    """

    path: str

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        """Yields the examples."""

        def parse(line: str, number: int) -> Record:
            record = json_object(line)
            return {name: (str(number), needed_text(record, name)) for name in ("source", "target")}

        return parsed_lines(local_path(self.path), parse, on_bad_input)

"""Texts by themselves, without labels: what is trained on where there are no pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxir.data.lines import OnBadInput
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

"""Titles and texts stored beside an index, read from disk one at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxir.data.lines import OnBadInput
from jaxir.data.sources import Document, read_corpus
from jaxir.errors import UserError
from jaxir.retrieval.npy import write_npy

_TEXTS = "documents.jsonl"
_OFFSETS = "documents-offsets.npy"


class Documents:
    """The documents of an index by id. Use `Documents.open`."""

    def __init__(self, path: Path, offsets: np.ndarray, ids: Sequence[str]):
        self._path, self._offsets = path, offsets
        self._row_of = {doc_id: row for row, doc_id in enumerate(ids)}

    def __getitem__(self, doc_id: str) -> Document:
        """Returns a document, read from disk.

        Raises:
          KeyError: there is none of that id.
        """
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[self._row_of[doc_id]]))
            title, text = json.loads(file.readline())
        return Document(doc_id, title, text)

    @classmethod
    def open(cls, directory: Path, ids: Sequence[str]) -> Documents | None:
        """Returns the documents stored in an index directory, None where there are none."""
        if not (directory / _TEXTS).is_file():
            return None
        try:
            return cls(directory / _TEXTS, np.load(directory / _OFFSETS, mmap_mode="r"), ids)
        except (OSError, ValueError) as error:
            raise UserError(f"{directory} is a damaged index: {error}") from None

    @staticmethod
    def write(directory: Path, corpus: str | Path, ids: Sequence[str]) -> None:
        """Copies the documents named by `ids` from a corpus file into an index directory.

        Raises:
          UserError: the corpus lacks one of them (a malformed line is no document), or cannot be read.
        """
        row_of = {doc_id: row for row, doc_id in enumerate(ids)}
        offsets = np.full(len(ids), -1, np.int64)
        with (directory / _TEXTS).open("wb") as file:
            for document in read_corpus(corpus, OnBadInput("skip")):
                row = row_of.get(document.id)
                if row is not None:
                    offsets[row] = file.tell()
                    line = json.dumps([document.title, document.text], ensure_ascii=False)
                    file.write(line.encode() + b"\n")
        missing = np.flatnonzero(offsets < 0)
        if len(missing):
            raise UserError(
                f"{corpus} lacks {len(missing)} of the {len(ids)} documents that were encoded, "
                f"for example {ids[missing[0]]!r}: is it the corpus that was encoded?"
            )
        with (directory / _OFFSETS).open("wb") as file:
            write_npy(file, [offsets])

"""Titles, texts and metadata stored with an index, as JSON lines [title, text] or [title, text, metadata]."""

from __future__ import annotations

import json
import os
import stat
import weakref
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxir.core.errors import DamagedError, UserError
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import Document, has_lines, read_documents
from jaxir.storage.files import local_path
from jaxir.storage.npy import read_npy, write_npy
from jaxir.storage.open_files import check_readable, sha256_of

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings

_TEXTS = "documents.jsonl"
_OFFSETS = "documents-offsets.npy"


class Documents:
    """The documents of an index by id. The file is kept open, so it can be read after an update."""

    def __init__(self, path: Path, offsets: np.ndarray, ids: Sequence[str]):
        self._path, self._offsets = path, offsets
        self._row_of = {doc_id: row for row, doc_id in enumerate(ids)}
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, doc_id: str) -> Document:
        """Returns a document; raises a KeyError for an unknown id, a DamagedError for a changed file."""
        try:
            line = self._line(int(self._offsets[self._row_of[doc_id]]))
            # Read NaN and infinities, which Python's parser accepts but JSON does not have, as null.
            title, text, *metadata = json.loads(line, parse_constant=lambda _: None)
        except (TypeError, ValueError):
            what = f"the document {doc_id!r} cannot be read; build the index again with jaxir.index"
            raise DamagedError(self._path, what) from None
        return Document(doc_id, title, text, *metadata)

    @classmethod
    def open(cls, directory: Path, ids: Sequence[str]) -> Documents | None:
        if not (directory / _TEXTS).is_file():
            return None
        offsets = np.array(read_npy(directory / _OFFSETS, np.int64, (len(ids),)))
        return cls(directory / _TEXTS, offsets, ids)

    def lines(self, ids: Collection[str]) -> Iterator[tuple[str, bytes]]:
        rows = sorted((int(self._offsets[self._row_of[doc_id]]), doc_id) for doc_id in ids)
        for offset, doc_id in rows:
            yield doc_id, self._line(offset)

    def _line(self, offset: int) -> bytes:
        line, size = b"", 1 << 12
        while b"\n" not in line and (piece := os.pread(self._descriptor, size, offset + len(line))):
            line, size = line + piece, 2 * size
        return line[: line.find(b"\n") + 1]

    @staticmethod
    def write(
        directory: Path,
        corpus: str | Path | None,
        ids: Sequence[str],
        *,
        kept: Documents | None = None,
        new: Collection[str] | None = None,
    ) -> None:
        """Copies documents into an index directory: `new` (None: all) from the corpus, others from `kept`."""
        row_of = {doc_id: row for row, doc_id in enumerate(ids)}
        wanted = row_of.keys() if new is None else set(new)
        offsets = np.full(len(ids), -1, np.int64)
        with (directory / _TEXTS).open("wb") as file:
            if kept is not None:
                for doc_id, line in kept.lines([i for i in ids if i not in wanted]):
                    offsets[row_of[doc_id]] = file.tell()
                    file.write(line)
            for document in read_documents(corpus, OnBadInput("skip")) if corpus is not None else ():
                if document.id in wanted:
                    offsets[row_of[document.id]] = file.tell()
                    stored = [document.title, document.text]
                    stored += [document.metadata] if document.metadata is not None else []
                    line = json.dumps(stored, ensure_ascii=False)
                    # Replaces unpaired surrogates, which metadata may hold.
                    file.write(line.encode(errors="replace") + b"\n")
        _check_none([ids[row] for row in np.flatnonzero(offsets < 0)], corpus, len(wanted))
        with (directory / _OFFSETS).open("wb") as file:
            write_npy(file, [offsets])


def check_corpus(corpus: str | Path, stored: StoredEmbeddings) -> None:
    """Raises UserError if a corpus lacks an encoded document. A pipe is not checked: it can be read once."""
    path = local_path(corpus)
    check_readable(path)
    if stat.S_ISFIFO(path.stat().st_mode) or sha256_of(path) == stored.info.input_sha256:
        return
    if has_lines(path):  # ids are line numbers, so they cannot tell whether this is the file
        raise UserError(
            f"{corpus} is not the file that was encoded ({stored.info.input_name}), whose line numbers are"
            " the ids: give that file"
        )
    found = {document.id for document in read_documents(path, OnBadInput("skip"))}
    ids = dict.fromkeys(stored.ids)
    _check_none([doc_id for doc_id in ids if doc_id not in found], corpus, len(ids))


def _check_none(missing: Sequence[str], corpus: str | Path | None, count: int) -> None:
    if missing:
        raise UserError(
            f"{corpus} lacks {len(missing)} of the {count} documents that were encoded, "
            f"for example {missing[0]!r}: give the corpus that was encoded"
        )

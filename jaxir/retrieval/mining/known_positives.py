"""What must not be mined: documents that are known to be relevant, and others of the same text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxir.data.sources import BeirFolder, Document
from jaxir.errors import UserError


class KnownPositives(NamedTuple):
    """The judgements that mining has to heed.

    Attributes:
      asked: the positives that a split judges, by query.
      every: those of the same queries in any split.
      twins: the documents that have the text of a positive, itself among them, by its id.
      empty: the documents without text.
    """

    asked: dict[str, list[str]]
    every: dict[str, set[str]]
    twins: dict[str, list[str]]
    empty: set[str]

    @classmethod
    def read(cls, folder: BeirFolder, split: str) -> KnownPositives:
        """Reads judgements, and the corpus twice.

        Raises:
          UserError: no such split, none relevant in it, or a positive that the corpus lacks or has no text.
        """
        asked, every = _read_positives(folder, split)
        return cls(asked, every, *_read_twins(folder, every))


def _read_positives(folder: BeirFolder, split: str) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """Returns the positives that `split` judges, and those of the same queries in any split."""
    asked: dict[str, list[str]] = {}
    for qrel in folder.qrels(split):
        if qrel.score > 0:
            asked.setdefault(qrel.query_id, []).append(qrel.document_id)
    if not asked:
        raise UserError(f"split {split!r} of {folder.directory} has no relevant judgement")
    every = {query_id: set(doc_ids) for query_id, doc_ids in asked.items()}
    for other in folder.splits:
        for qrel in folder.qrels(other) if other != split else ():
            if qrel.score > 0 and qrel.query_id in every:
                every[qrel.query_id].add(qrel.document_id)
    return asked, every


def _read_twins(
    folder: BeirFolder, positives: Mapping[str, set[str]]
) -> tuple[dict[str, list[str]], set[str]]:
    """Returns the documents that have the text of a positive, by its id, and those that have no text."""
    wanted = set().union(*positives.values())
    texts = {d.id: _digest(d) for d in folder.documents_again("reading positives") if d.id in wanted}
    if lacking := wanted - texts.keys():
        raise UserError(f"{folder.corpus_path}: it lacks {min(lacking)!r}, which is judged relevant")
    nothing = _digest(Document("", "", ""))
    if textless := [doc_id for doc_id, digest in texts.items() if digest == nothing]:
        raise UserError(f"{folder.corpus_path}: {textless[0]!r} is judged relevant and has no text")
    of_text: dict[bytes, list[str]] = {digest: [] for digest in (*texts.values(), nothing)}
    for document in folder.documents_again("looking for duplicates"):
        if (digest := _digest(document)) in of_text:
            of_text[digest].append(document.id)
    twins = {doc_id: of_text[digest] for doc_id, digest in texts.items() if len(of_text[digest]) > 1}
    return twins, set(of_text[nothing])


def _digest(document: Document) -> bytes:
    text = " ".join(document.contents.casefold().split())
    return hashlib.blake2b(text.encode(), digest_size=16).digest()

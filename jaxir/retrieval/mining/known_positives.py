"""What must not be mined: documents that are known to be relevant, others of the same text, and the query."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxir.data.lines import has_text
from jaxir.data.sources import BeirFolder
from jaxir.errors import UserError


class KnownPositives(NamedTuple):
    """The judgements that mining has to heed.

    Attributes:
      asked: the positives that a split judges, by query.
      every: those of the same queries in any split.
      twins: the documents that have the text of a positive, itself among them, by its id.
      own: the documents that have the text of a query, by its id.
      empty: the documents without text.
    """

    asked: dict[str, list[str]]
    every: dict[str, set[str]]
    twins: dict[str, list[str]]
    own: dict[str, list[str]]
    empty: set[str]

    @classmethod
    def read(cls, folder: BeirFolder, split: str) -> KnownPositives:
        """Reads judgements, and the corpus twice.

        Raises:
          UserError: no such split, none relevant in it, or a positive that the corpus lacks or has no text.
        """
        asked, every = _read_positives(folder, split)
        return cls(asked, every, *_read_copies(folder, every))


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


def _read_copies(
    folder: BeirFolder, positives: Mapping[str, set[str]]
) -> tuple[dict[str, list[str]], dict[str, list[str]], set[str]]:
    """Returns the documents of the text of a positive, of a query, by their ids, and those without text."""
    wanted = set().union(*positives.values())
    texts = {d.id: _digest(d.contents) for d in folder.documents_again("reading positives") if d.id in wanted}
    if lacking := wanted - texts.keys():
        raise UserError(f"{folder.corpus_path}: it lacks {min(lacking)!r}, which is judged relevant")
    nothing = _digest("")
    if textless := [doc_id for doc_id, digest in texts.items() if digest == nothing]:
        raise UserError(f"{folder.corpus_path}: {textless[0]!r} is judged relevant and has no text")
    queries = {query.id: _digest(query.text) for query in folder.queries() if query.id in positives}
    of_text: dict[bytes, list[str]] = {d: [] for d in (*texts.values(), *queries.values(), nothing)}
    for document in folder.documents_again("looking for duplicates"):
        if (digest := _digest(document.contents)) in of_text:
            of_text[digest].append(document.id)
    twins = {doc_id: of_text[digest] for doc_id, digest in texts.items() if len(of_text[digest]) > 1}
    own = {query_id: of_text[digest] for query_id, digest in queries.items() if of_text[digest]}
    return twins, own, set(of_text[nothing])


def _digest(text: str) -> bytes:
    text = " ".join(text.casefold().split()) if has_text(text) else ""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()

"""What must not be mined: documents that are known to be relevant, others of the same text, and the query."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import has_text
from jaxir.data.formats.sources import BeirFolder


class KnownPositives(NamedTuple):
    """The judgements that mining has to heed.

    Attributes:
      asked: the positives that a split judges and that have a text, by query.
      every: the positives of those queries in any split, and of all other queries of the same text.
      twins: the documents that have the text of a positive, itself among them, by its id.
      own: the documents that have the text of a query, by its id.
      empty: the documents without text.
      lacking: how many positives of the split were left out, because the collection lacks the query, the
        document or its text.
    """

    asked: dict[str, list[str]]
    every: dict[str, set[str]]
    twins: dict[str, list[str]]
    own: dict[str, list[str]]
    empty: set[str]
    lacking: int

    @classmethod
    def read(cls, folder: BeirFolder, split: str, *, strict: bool = False) -> KnownPositives:
        """Reads judgements and queries, and the corpus twice.

        Args:
          strict: whether a positive that the collection lacks is refused. By default it is left out and
            counted.

        Raises:
          UserError: no such split, or no relevant judgement in it that can be used.
        """
        asked, every, queries = _read_positives(folder, split, strict=strict)
        documents = _read_documents(folder, set().union(*every.values()), strict=strict)
        usable = {
            query_id: found
            for query_id, doc_ids in asked.items()
            if query_id in queries and (found := [doc_id for doc_id in doc_ids if doc_id in documents])
        }
        if not usable:
            raise UserError(
                f"{folder.qrels_path(split)}: the collection lacks the query, the document or its text of"
                " every relevant judgement: is it its file?"
            )
        lacking = sum(map(len, asked.values())) - sum(map(len, usable.values()))
        queries = {query_id: queries[query_id] for query_id in usable}
        every = {query_id: every[query_id] for query_id in usable}
        return cls(usable, every, *_read_copies(folder, documents, queries), lacking)


def _read_positives(
    folder: BeirFolder, split: str, *, strict: bool
) -> tuple[dict[str, list[str]], dict[str, set[str]], dict[str, bytes]]:
    """Returns the positives that `split` judges, those of queries of the same text in any split, and digests.

    The digests are of the texts of the queries that `split` judges. A query is known by its words, so two ids
    of one text share their positives.
    """
    asked: dict[str, list[str]] = {}
    for qrel in folder.qrels(split):
        if qrel.score > 0:
            asked.setdefault(qrel.query_id, []).append(qrel.document_id)
    if not asked:
        raise UserError(f"split {split!r} of {folder.directory} has no relevant judgement")
    every = {query_id: set(doc_ids) for query_id, doc_ids in asked.items()}
    for other in folder.splits:
        for qrel in folder.qrels(other) if other != split else ():
            if qrel.score > 0:
                every.setdefault(qrel.query_id, set()).add(qrel.document_id)
    texts = {query.id: _digest(query.text) for query in folder.queries() if query.id in every}
    if strict and (lacking := asked.keys() - texts.keys()):
        raise UserError(f"{folder.queries_path}: it lacks {min(lacking)!r}, which is judged")
    of_text: dict[bytes | str, set[str]] = {}
    for query_id, doc_ids in every.items():
        of_text.setdefault(texts.get(query_id, query_id), set()).update(doc_ids)
    shared = {query_id: of_text[texts.get(query_id, query_id)] for query_id in asked}
    return asked, shared, {query_id: texts[query_id] for query_id in asked if query_id in texts}


def _read_documents(folder: BeirFolder, wanted: set[str], *, strict: bool) -> dict[str, bytes]:
    """Returns the digests of those wanted documents that are there and have a text."""
    found = {d.id: _digest(d.contents) for d in folder.documents_again("reading positives") if d.id in wanted}
    if strict and (lacking := wanted - found.keys()):
        raise UserError(f"{folder.corpus_path}: it lacks {min(lacking)!r}, which is judged relevant")
    textless = [doc_id for doc_id, digest in found.items() if digest == _digest("")]
    if strict and textless:
        raise UserError(f"{folder.corpus_path}: {textless[0]!r} is judged relevant and has no text")
    return {doc_id: digest for doc_id, digest in found.items() if digest != _digest("")}


def _read_copies(
    folder: BeirFolder, texts: Mapping[str, bytes], queries: Mapping[str, bytes]
) -> tuple[dict[str, list[str]], dict[str, list[str]], set[str]]:
    """Returns the documents of the text of a positive, of a query, by their ids, and those without text."""
    nothing = _digest("")
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

"""Documents that are never negatives: positives, and documents with the text of a positive or the query."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import has_text


class KnownPositives(NamedTuple):
    """The judgements of a collection, for mining.

    Attributes:
      split_positives: query id -> the positives of the split that have a text.
      all_positives: query id -> the positives, in any split, of all queries with the same text.
      duplicates: id of a positive -> the documents with the positive's text, including the positive.
      query_copies: query id -> the documents with the query's text.
      empty: the documents without text.
      lacking: number of the split's positives whose query, document or text is not in the collection.
    """

    split_positives: dict[str, list[str]]
    all_positives: dict[str, set[str]]
    duplicates: dict[str, list[str]]
    query_copies: dict[str, list[str]]
    empty: set[str]
    lacking: int

    @classmethod
    def read(cls, folder: BeirFolder, split: str, *, strict: bool = False) -> KnownPositives:
        """Reads judgements, queries and the corpus (twice). `strict` raises for positives not in it."""
        split_positives, all_positives, queries = _read_positives(folder, split, strict=strict)
        documents = _read_documents(folder, set().union(*all_positives.values()), strict=strict)
        usable = {
            query_id: found
            for query_id, doc_ids in split_positives.items()
            if query_id in queries and (found := [doc_id for doc_id in doc_ids if doc_id in documents])
        }
        if not usable:
            raise UserError(
                f"{folder.qrels_path(split)}: every relevant judgement names a query or a text that the"
                " collection lacks; give judgements of this collection"
            )
        lacking = sum(map(len, split_positives.values())) - sum(map(len, usable.values()))
        queries = {query_id: queries[query_id] for query_id in usable}
        all_positives = {query_id: all_positives[query_id] for query_id in usable}
        return cls(usable, all_positives, *_read_copies(folder, documents, queries), lacking)


def _read_positives(
    folder: BeirFolder, split: str, *, strict: bool
) -> tuple[dict[str, list[str]], dict[str, set[str]], dict[str, bytes]]:
    """Returns `split_positives`, `all_positives` and query id -> digest of the query's text."""
    split_positives: dict[str, list[str]] = {}
    for qrel in folder.qrels(split):
        if qrel.score > 0:
            split_positives.setdefault(qrel.query_id, []).append(qrel.document_id)
    if not split_positives:
        raise UserError(f"split {split!r} of {folder.directory} has no relevant judgement; use another")
    all_positives = {query_id: set(doc_ids) for query_id, doc_ids in split_positives.items()}
    for other in folder.splits:
        for qrel in folder.qrels(other) if other != split else ():
            if qrel.score > 0:
                all_positives.setdefault(qrel.query_id, set()).add(qrel.document_id)
    texts = {query.id: _digest(query.text) for query in folder.queries() if query.id in all_positives}
    if strict and (lacking := split_positives.keys() - texts.keys()):
        raise UserError(f"{folder.queries_path} lacks query {min(lacking)!r}, which is judged: omit --strict")
    of_text: dict[bytes | str, set[str]] = {}
    for query_id, doc_ids in all_positives.items():
        of_text.setdefault(texts.get(query_id, query_id), set()).update(doc_ids)
    shared = {query_id: of_text[texts.get(query_id, query_id)] for query_id in split_positives}
    return (
        split_positives,
        shared,
        {query_id: texts[query_id] for query_id in split_positives if query_id in texts},
    )


def _read_documents(folder: BeirFolder, wanted: set[str], *, strict: bool) -> dict[str, bytes]:
    """Returns document id -> digest of the text, for the wanted documents that exist and have a text."""
    found = {d.id: _digest(d.contents) for d in folder.documents_again("reading positives") if d.id in wanted}
    if strict and (lacking := wanted - found.keys()):
        raise UserError(
            f"{folder.corpus_path} lacks {min(lacking)!r}, which is judged relevant: omit --strict"
        )
    textless = [doc_id for doc_id, digest in found.items() if digest == _digest("")]
    if strict and textless:
        raise UserError(
            f"{folder.corpus_path}: {textless[0]!r} is judged relevant and has no text: omit --strict"
        )
    return {doc_id: digest for doc_id, digest in found.items() if digest != _digest("")}


def _read_copies(
    folder: BeirFolder, texts: Mapping[str, bytes], queries: Mapping[str, bytes]
) -> tuple[dict[str, list[str]], dict[str, list[str]], set[str]]:
    """Returns `duplicates`, `query_copies` and `empty` (see `KnownPositives`)."""
    nothing = _digest("")
    of_text: dict[bytes, list[str]] = {d: [] for d in (*texts.values(), *queries.values(), nothing)}
    for document in folder.documents_again("looking for duplicates"):
        if (digest := _digest(document.contents)) in of_text:
            of_text[digest].append(document.id)
    duplicates = {doc_id: of_text[digest] for doc_id, digest in texts.items() if len(of_text[digest]) > 1}
    query_copies = {query_id: of_text[digest] for query_id, digest in queries.items() if of_text[digest]}
    return duplicates, query_copies, set(of_text[nothing])


def _digest(text: str) -> bytes:
    text = " ".join(text.casefold().split()) if has_text(text) else ""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()

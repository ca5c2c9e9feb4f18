"""The types of text records, and readers of collections in BEIR format."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import Record
from jaxir.core.progress import progress
from jaxir.data.formats.lines import (
    MalformedRecord,
    OddRecord,
    OnBadInput,
    Policy,
    check_id,
    collecting,
    decode_line,
    has_text,
    json_object,
    list_field,
    needed_text,
    numbered_lines,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.qrels import qrel_parser
from jaxir.storage.files import local_path

_TABLES = (".csv", ".tsv", ".parquet")


class Document(NamedTuple):
    """A document of a corpus; `title` may be empty, and `metadata` may be None."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any] | None = None

    @property
    def contents(self) -> str:
        """The text that is encoded: title, a space, text."""
        return joined(self.title, self.text)


class Query(NamedTuple):
    id: str
    text: str


class PairExample(NamedTuple):
    """A training example: query, relevant passage, irrelevant passages (id, text), and a teacher's scores."""

    query_id: str
    query: str
    passage_id: str
    passage: str
    negatives: tuple[tuple[str, str], ...] = ()
    passage_score: float | None = None
    negative_scores: tuple[float, ...] | None = None

    def record(self) -> Record:
        """Returns the example as {field: value}, with the field names of `jaxir.core.features`."""
        found = {
            "query": (self.query_id, self.query),
            "passage": (self.passage_id, self.passage),
            "negatives": self.negatives,
        }
        if self.passage_score is not None and self.negative_scores is not None:
            found |= {"passage_score": self.passage_score, "negative_scores": self.negative_scores}
        return found


def joined(title: str, text: str) -> str:
    return f"{title} {text}".strip()


def text_id(text: str) -> str:
    """Returns an id for a text that has none: 128 bits of the text's hash, in hexadecimal."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def folded(text: str) -> str:
    """Returns a case-folded text with single spaces, to compare texts ignoring case and white space."""
    return " ".join(text.casefold().split())


def key_digest(identifier: str) -> bytes:
    """Returns the 64-bit BLAKE2b hash of an id, which `stable_keys` splits into two integers."""
    return hashlib.blake2b(identifier.encode(), digest_size=8).digest()


def stable_keys(ids: Sequence[str]) -> np.ndarray:
    """Returns int32 [N, 2]: the halves of a 64-bit BLAKE2b hash of each id, the same on any machine.

    Duplicate masking compares these keys, so equal texts with different ids are different passages. Data
    without ids get hashes of the texts as ids, so their equal texts are the same passage.
    """
    return np.frombuffer(b"".join(map(key_digest, ids)), "<i4").astype(np.int32).reshape(len(ids), 2)


def check_no_table(path: str | Path, what: str) -> None:
    """Raises UserError if a file of documents or queries is a table, according to its name."""
    kind = Path(Path(path).name.lower().removesuffix(".gz")).suffix
    if kind in _TABLES:
        raise UserError(
            f"{path}: {what} are read from a .jsonl with an object (_id, text) on each line, not from a"
            f" table. From a table of pairs, jaxir.prepare --dataset=pairs:{path} --output=DIR makes"
            " DIR/corpus.jsonl and DIR/queries.jsonl"
        )


def read_corpus(
    path: str | Path, on_bad_input: OnBadInput | Policy = "stop", *, unique: bool = True
) -> Iterator[Document]:
    """Yields the documents of a corpus.jsonl[.gz]: `_id`, `title` (optional), `text`, `metadata` (optional).

    Metadata that is not an object is ignored. A document with neither title nor text is kept and reported,
    because judgements may name it. With `unique`, repeated documents are left out and counted, an id with two
    texts is malformed, and all ids are held in memory.
    """
    check_no_table(path, "documents")
    seen: dict[str, int] = {}

    def parse(line: str, number: int) -> Document:
        record = json_object(line)
        title, text = string_field(record, "title", ""), string_field(record, "text")
        identifier = string_field(record, "_id")
        metadata = record.get("metadata")
        if unique:
            new_id(identifier, seen, (title, text))
        kept = metadata if isinstance(metadata, dict) and metadata else None
        document = Document(identifier, title, text, kept)
        if not has_text(document.contents):
            collector.note(path, number, "document with neither title nor text")
        return document

    with collecting(on_bad_input) as collector:
        yield from parsed_lines(path, parse, collector)


def read_wanted(
    path: str | Path, wanted: Collection[str], on_bad_input: OnBadInput | Policy = "stop", *, named_by: str
) -> Iterator[Document]:
    """Yields the documents with the ids `wanted`, in the order of the corpus, with a progress bar.

    `named_by` says where the ids come from, for the error if a document is missing: "a query found".
    """
    found: dict[str, str] = {}
    documents = read_corpus(path, on_bad_input, unique=False)
    for document in progress(documents, what="reading passages", unit="documents"):
        if document.id in wanted:
            text = text_id(document.contents)
            if document.id not in found:
                found[document.id] = text
                yield document
            elif found[document.id] != text:
                raise BadInputError(path, None, f"duplicate id {document.id!r}, with two texts")
    if lacking := set(wanted) - found.keys():
        raise UserError(
            f"{path} lacks {min(lacking)!r}, which {named_by} ({len(lacking):,} of {len(wanted):,}"
            " documents): give the corpus that these ids come from"
        )


def read_queries(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Query]:
    """Yields the queries of a queries.jsonl[.gz]: `_id`, `text`. A blank text is malformed."""
    check_no_table(path, "queries")
    seen: dict[str, int] = {}

    def parse(line: str, number: int) -> Query:
        record = json_object(line)
        text = needed_text(record, "text")
        return Query(new_id(string_field(record, "_id"), seen, text), text)

    return parsed_lines(path, parse, on_bad_input)


def read_excluded(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Returns the ids of documents that a query's results must not have, by the id of the query.

    They are in the field `excluded_ids` of queries.jsonl[.gz], a list that few files have. A pipe, which can
    be read only once, is not read.
    """
    found = {}
    for number, raw in numbered_lines(path) if local_path(path).is_file() else ():
        if b'"excluded_ids"' in raw:
            try:
                record = json_object(decode_line(raw))
                excluded = tuple(map(str, list_field(record, "excluded_ids")))
                found[string_field(record, "_id")] = excluded
            except MalformedRecord as fault:
                raise BadInputError(path, number, f"{fault.kind} {fault.detail}".strip()) from None
    return {query_id: excluded for query_id, excluded in found.items() if excluded}


def read_lines(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Query]:
    """Yields the lines of a file that are not blank; the line number is the id."""

    def parse(line: str, number: int) -> Query | None:
        # A line with only Unicode white space has no text.
        return Query(str(number), line) if has_text(line) else None

    return parsed_lines(path, parse, on_bad_input)


def has_lines(path: str | Path) -> bool:
    """Returns whether a file is read as texts, one per line, rather than as records."""
    return Path(path).name.removesuffix(".gz").endswith(".txt")


def read_documents(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Document]:
    if has_lines(path):
        return (Document(line.id, "", line.text) for line in read_lines(path, on_bad_input))
    return read_corpus(path, on_bad_input)


def read_judged_pairs(
    qrels: str | Path,
    queries: Callable[[], Iterator[Query]],
    documents: Callable[[], Iterator[Document]],
    on_bad_input: OnBadInput | Policy = "stop",
    *,
    trec: bool = False,
) -> Iterator[PairExample]:
    """Yields a pair for each relevant judgement (a score of 1 or more) of a file.

    The entire collection is read and checked first; memory only holds judged texts. Judgements of missing
    queries or documents are left out and counted. A relevant document without text is malformed.
    """
    policy = on_bad_input.policy if isinstance(on_bad_input, OnBadInput) else on_bad_input
    judged = list(parsed_lines(qrels, qrel_parser(None, None, trec=trec), OnBadInput(policy)))
    query_ids, document_ids = {q.query_id for q in judged}, {q.document_id for q in judged}
    query_texts = {q.id: q.text for q in queries() if q.id in query_ids}
    contents = {d.id: d.contents for d in documents() if d.id in document_ids}
    parse_qrel = qrel_parser(query_texts, contents, trec=trec)

    def parse(line: str, number: int) -> PairExample | None:
        try:
            qrel = parse_qrel(line, number)
        except OddRecord as odd:
            qrel = odd.record
            if qrel.query_id not in query_texts or qrel.document_id not in contents:
                noted = "judgements of queries or documents that the collection lacks, left out"
                raise OddRecord(odd.kind, odd.detail, noted=noted) from None
        if qrel is None or qrel.score <= 0:
            return None
        passage = contents[qrel.document_id]
        if not has_text(passage):
            raise MalformedRecord("the relevant document has neither title nor text:", repr(qrel.document_id))
        return PairExample(qrel.query_id, query_texts[qrel.query_id], qrel.document_id, passage)

    yield from parsed_lines(qrels, parse, on_bad_input)


def new_id(identifier: str, seen: dict[str, int], content: Hashable) -> str:
    """Returns the id of a new document or query and adds a hash of its content to `seen`.

    Raises OddRecord for a repeated record, which is left out, or MalformedRecord for an id with two contents.
    """
    if check_id(identifier) not in seen:
        seen[identifier] = hash(content)
        return identifier
    if seen[identifier] == hash(content):
        noted = "lines that repeat an earlier document or query, left out"
        raise OddRecord("duplicate id", repr(identifier), noted=noted)
    raise MalformedRecord("duplicate id", f"{identifier!r}, which has another text on an earlier line")


def find_file(directory: Path, name: str, kind: str) -> Path:
    """Returns `directory`/`name` or `directory`/`name`.gz; errors call the folder `kind`."""
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(f"{directory} is not {kind}: it has no {name} or {name}.gz; give another")


def splits_in(directory: Path, kind: str) -> list[str]:
    """Returns the SPLITs of files `kind`SPLIT.tsv[.gz] in a directory, without backups and hidden files."""
    found = (re.fullmatch(rf"{re.escape(kind)}(\w.*)\.tsv(\.gz)?", p.name) for p in directory.glob("*.tsv*"))
    return sorted({match[1] for match in found if match})

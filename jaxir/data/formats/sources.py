"""Records of text, and readers of collections in BEIR format. (Files of training pairs: `pair_sources`.)

Readers stream, read gzip, and tell file, line and reason of what is malformed (`lines.OnBadInput`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import BadInputError, UserError, suggest
from jaxir.core.features import Record
from jaxir.core.progress import progress
from jaxir.data.formats.lines import (
    MalformedRecord,
    OddRecord,
    OnBadInput,
    Policy,
    check_id,
    collecting,
    has_text,
    json_object,
    needed_text,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.qrels import Qrel, qrel_parser, read_qrels
from jaxir.storage.files import local_path

_TABLES = (".csv", ".tsv", ".parquet")


class Document(NamedTuple):
    """A document of a corpus; `title` may be empty, `metadata` is None where the corpus has none of it."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any] | None = None

    @property
    def contents(self) -> str:
        """The text that is encoded: title, a space, text."""
        return joined(self.title, self.text)


class Query(NamedTuple):
    """A query."""

    id: str
    text: str


class PairExample(NamedTuple):
    """A training example: a query, a relevant passage, and (id, text) of passages known to be irrelevant.

    A teacher's scores of the passage and of the negatives are there where it has judged them.
    """

    query_id: str
    query: str
    passage_id: str
    passage: str
    negatives: tuple[tuple[str, str], ...] = ()
    passage_score: float | None = None
    negative_scores: tuple[float, ...] | None = None

    def record(self) -> Record:
        """Returns it by field, as `jaxir.core.features` names them."""
        found = {
            "query": (self.query_id, self.query),
            "passage": (self.passage_id, self.passage),
            "negatives": self.negatives,
        }
        if self.passage_score is not None and self.negative_scores is not None:
            found |= {"passage_score": self.passage_score, "negative_scores": self.negative_scores}
        return found


def joined(title: str, text: str) -> str:
    """Returns title and text as the one string that is encoded."""
    return f"{title} {text}".strip()


def text_id(text: str) -> str:
    """Returns the id of a text that came without one: 128 bits of its hash, in hexadecimal."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def folded(text: str) -> str:
    """Returns a text without its capitals and runs of white space, as texts are compared word for word."""
    return " ".join(text.casefold().split())


def key_digest(identifier: str) -> bytes:
    """Returns the 8 bytes of which `stable_keys` makes two integers."""
    return hashlib.blake2b(identifier.encode(), digest_size=8).digest()


def stable_keys(ids: Sequence[str]) -> np.ndarray:
    """Returns int32 [N, 2]: the halves of a 64-bit BLAKE2b hash of each id, the same on any machine.

    Duplicate masking compares these, so it goes by id: passages with one text under two ids are two passages.
    Pairs read without ids have their texts' hashes for ids, so there equal texts are one passage.
    """
    return np.frombuffer(b"".join(map(key_digest, ids)), "<i4").astype(np.int32).reshape(len(ids), 2)


def check_no_table(path: str | Path, what: str) -> None:
    """Raises a UserError if the name of a file of documents or queries says that it is a table."""
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

    Metadata that is not an object is none. A document with neither title nor text is kept, because judgements
    may name it, and noted in the report.

    Args:
      path: the file.
      on_bad_input: what to do with a malformed line.
      unique: whether a repeated document is left out and counted, and an id with two texts is malformed. All
        ids are held in memory for this.
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
    """Yields the documents of some ids of a corpus, in its order, under a progress bar; no other is held.

    Raises:
      BadInputError: a malformed line, or one of them comes a second time with another text.
      UserError: the corpus lacks one, which `named_by` ("a query found", say) has named.
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
            f"{path}: it lacks {min(lacking)!r}, which {named_by} ({len(lacking):,} of {len(wanted):,}"
            " documents): is it of this corpus?"
        )


def read_queries(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Query]:
    """Yields the queries of a queries.jsonl[.gz]: `_id`, `text`. An empty one is malformed."""
    check_no_table(path, "queries")
    seen: dict[str, int] = {}

    def parse(line: str, number: int) -> Query:
        record = json_object(line)
        text = needed_text(record, "text")
        return Query(new_id(string_field(record, "_id"), seen, text), text)

    return parsed_lines(path, parse, on_bad_input)


def read_lines(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Query]:
    """Yields the texts of a file with one on each line that is not blank; the line's number is the id."""

    def parse(line: str, number: int) -> Query | None:
        return Query(str(number), line) if has_text(line) else None  # of blanks that ASCII has not

    return parsed_lines(path, parse, on_bad_input)


def has_lines(path: str | Path) -> bool:
    """Whether a file is read as texts, one on each line, and not as records."""
    return Path(path).name.removesuffix(".gz").endswith(".txt")


def read_documents(path: str | Path, on_bad_input: OnBadInput | Policy = "stop") -> Iterator[Document]:
    """Yields the documents of a corpus.jsonl[.gz], or the texts of a .txt[.gz], whose ids are their lines."""
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

    The whole collection is read and checked first; only the texts that the judgements name are held.
    Judgements of queries or documents that are not there are left out and counted.

    Args:
      qrels: the file of judgements.
      queries: returns a reader of the queries.
      documents: returns a reader of the documents.
      on_bad_input: what to do with malformed records.
      trec: whether the judgements have TREC's four columns.

    Raises:
      BadInputError: a malformed line, a relevant document without text, or no judgement that can be used.
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

    If the id stands for this content already, the record is odd (`OddRecord`) and is left out. If the id
    stands for something else, the record is malformed.
    """
    if check_id(identifier) not in seen:
        seen[identifier] = hash(content)
        return identifier
    if seen[identifier] == hash(content):
        noted = "lines that repeat an earlier document or query, left out"
        raise OddRecord("duplicate id", repr(identifier), noted=noted)
    raise MalformedRecord("duplicate id", f"{identifier!r}, which has another text on an earlier line")


def find_file(directory: Path, name: str, kind: str) -> Path:
    """Returns `directory`/`name`, or that with .gz; raises a UserError that names the `kind` of folder."""
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(f"{directory} is not {kind}: it has no {name} or {name}.gz")


def splits_in(directory: Path, kind: str) -> list[str]:
    """Returns SPLIT of each file `kind`SPLIT.tsv[.gz] of a directory, not of backups and hidden files."""
    found = (re.fullmatch(rf"{re.escape(kind)}(\w.*)\.tsv(\.gz)?", p.name) for p in directory.glob("*.tsv*"))
    return sorted({match[1] for match in found if match})


class BeirFolder:
    """A collection: corpus.jsonl[.gz], queries.jsonl[.gz], qrels/SPLIT.tsv."""

    def __init__(self, directory: str | Path, on_bad_input: OnBadInput | Policy = "stop"):
        self.directory = local_path(str(directory).removeprefix("beir:"))  # as commands name it
        self.on_bad_input = on_bad_input
        if not self.directory.is_dir():
            how = f"; jaxir.prepare --dataset=pairs:{directory} --output=DIR makes one"
            how = how if self.directory.is_file() else ""
            raise UserError(f"{directory} is not a directory: a BEIR folder is needed{how}")
        self.corpus_path = self._find("corpus.jsonl")
        self.queries_path = self._find("queries.jsonl")

    @property
    def splits(self) -> list[str]:
        """Names of the splits that have judgements."""
        return splits_in(self.directory / "qrels", "")

    def qrels_path(self, split: str) -> Path:
        """Returns the file of judgements of `split`; raises a UserError that names those that there are."""
        if split not in self.splits:
            known = ", ".join(self.splits) or "none"
            raise UserError(
                f"{self.directory} has no split {split!r} (has: {known}){suggest(split, self.splits)}"
            )
        return self._find(f"qrels/{split}.tsv")

    def corpus(self) -> Iterator[Document]:
        """Yields the documents."""
        return read_corpus(self.corpus_path, self.on_bad_input)

    def documents_again(self, what: str) -> Iterator[Document]:
        """Yields the documents once more, under a progress bar named `what`; ids are not compared."""
        documents = read_corpus(self.corpus_path, OnBadInput("stop"), unique=False)
        return iter(progress(documents, what=what, unit="documents"))

    def queries(self) -> Iterator[Query]:
        """Yields the queries of all splits."""
        return read_queries(self.queries_path, self.on_bad_input)

    def qrels(
        self,
        split: str,
        *,
        query_ids: Collection[str] | None = None,
        document_ids: Collection[str] | None = None,
    ) -> Iterator[Qrel]:
        """Yields the judgements of `split`, checked against the ids where they are given."""
        known = {"query_ids": query_ids, "document_ids": document_ids}
        return read_qrels(self.qrels_path(split), self.on_bad_input, **known)

    def pairs(self, split: str) -> Iterator[PairExample]:
        """Yields a pair for each relevant judgement of `split`; see `read_judged_pairs`."""
        return read_judged_pairs(self.qrels_path(split), self.queries, self.corpus, self.on_bad_input)

    def _find(self, name: str) -> Path:
        return find_file(self.directory, name, "a BEIR folder")

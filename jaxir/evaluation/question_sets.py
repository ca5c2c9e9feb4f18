"""Reads test collections of duplicate questions (Quora, CQADupStack) and of product titles (eProduct)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.lines import (
    MalformedRecord,
    OddRecord,
    OnBadInput,
    decode_line,
    parsed,
    parsed_lines,
    raw_lines,
)
from jaxir.data.formats.sources import joined, new_id
from jaxir.evaluation.collection import Collection, read_collection
from jaxir.storage.files import local_path
from jaxir.storage.json_files import read_json

FORUMS = (
    *("android", "english", "gaming", "gis", "mathematica", "physics", "programmers", "stats", "tex", "unix"),
    *("webmasters", "wordpress"),
)
QUORA = (
    "expected a BEIR folder (corpus.jsonl, queries.jsonl, qrels/test.tsv: 'quora' of"
    " github.com/beir-cellar/beir), or information-retrieval/ with corpus.tsv, dev-queries.tsv and"
    " test-queries.tsv (sbert.net/datasets/quora-IR-dataset.zip, the source of BEIR's), or"
    " quora_duplicate_questions.tsv (Quora's own release)"
)
CQADUPSTACK = (
    "expected a folder for each forum, FORUM/corpus.jsonl, FORUM/queries.jsonl and FORUM/qrels/test.tsv"
    " ('cqadupstack' of github.com/beir-cellar/beir) or FORUM/FORUM_questions.json"
    " (nlp.cis.unimelb.edu.au/resources/cqadupstack, unpacked)"
)
EPRODUCT = (
    "expected a BEIR folder: corpus.jsonl with the titles of the index set, queries.jsonl with the titles of"
    " the queries, and qrels/SPLIT.tsv with the matches (eBay's challenge, arxiv.org/abs/2107.05856,"
    " publishes titles without the matches)"
)
HELD_OUT = 0.15  # share of the posts with duplicates that the test set gets, and likewise the dev set
_LACKED = "duplicates missing from the collection, which are treated as not retrieved"
Duplicates = dict[str, dict[str, int]]


def read_quora(directory: str | Path, split: str = "test", *, strict: bool = False) -> Collection:
    """Reads Quora's duplicate questions: BEIR's folder, the files on which it is based, or Quora's release.

    Quora's own release has no splits, so its scores are not comparable with those of the other two. Each
    question that has a duplicate is a query of the split "test"; evaluate with identical_ids="drop". For
    `strict` see `read_collection`.
    """
    directory = local_path(directory)
    if _is_beir(directory):
        return read_collection(directory, split, strict=strict)
    for folder in (directory, directory / "information-retrieval"):
        if (folder / "corpus.tsv").is_file():
            return _quora_ir(folder, split, strict=strict)
    release = directory / "quora_duplicate_questions.tsv"
    if not release.is_file():
        raise UserError(f"{directory} has no questions of Quora: {QUORA}")
    if split != "test":
        raise UserError(
            f"{release} has no split {split!r}: Quora's own release has no splits; use --split=test"
        )
    return _quora_release(release)


def read_eproduct(directory: str | Path, split: str = "test", *, strict: bool = False) -> Collection:
    """Reads eBay's eProduct from a BEIR folder: product titles as queries and documents; see `EPRODUCT`."""
    directory = local_path(directory)
    if not _is_beir(directory):
        raise UserError(f"{directory} has no eProduct: {EPRODUCT}")
    return read_collection(directory, split, strict=strict)


def read_cqadupstack(
    directory: str | Path, split: str = "test", *, strict: bool = False
) -> dict[str, Collection]:
    """Reads the forums of CQADupStack in a folder, from BEIR's or the authors' files: {name: collection}.

    For `strict` see `read_collection`.
    """
    directory = local_path(directory)
    found = {}
    for forum in FORUMS:
        posts = directory / forum / f"{forum}_questions.json"
        if _is_beir(directory / forum):
            found[forum] = read_collection(directory / forum, split, strict=strict)
        elif posts.is_file():
            found[forum] = _forum(posts, split, strict=strict)
    if not found:
        raise UserError(f"{directory} has none of the forums {', '.join(FORUMS)}: {CQADUPSTACK}")
    return found


# Kinds of datasets that are one collection, and their readers. CQADupStack is a collection for each forum.
COLLECTIONS = {"beir": read_collection, "quora": read_quora, "eproduct": read_eproduct}


def _is_beir(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("corpus.jsonl", "corpus.jsonl.gz"))


def _collection(
    path: Path, documents: Mapping[str, str], queries: Mapping[str, str], qrels: Duplicates
) -> Collection:
    """Returns a collection of the queries with duplicates; raises a UserError if `path` has no duplicates."""
    judged = {query: documents for query, documents in qrels.items() if documents}
    if not judged:
        raise BadInputError(
            path, None, "no question in it has a duplicate in the collection: download it again"
        )
    return Collection(
        document_ids=list(documents),
        documents=list(documents.values()),
        query_ids=list(judged),
        queries=[queries[query] for query in judged],
        qrels=judged,
    )


def _quora_ir(folder: Path, split: str, *, strict: bool) -> Collection:
    """Reads Quora's corpus.tsv (qid, question) and SPLIT-queries.tsv (qid, question, duplicate qids)."""
    path = folder / f"{split}-queries.tsv"
    if not path.is_file():
        raise UserError(f"{folder} has no {path.name}: {QUORA}")
    collector = OnBadInput(strict=strict)
    documents = {qid: text for _, (qid, text) in _table(folder / "corpus.tsv", 2, collector)}
    rows = list(_table(path, 3, collector))
    queries = {qid: text for _, (qid, text, _) in rows}
    qrels: Duplicates = {}
    for line, (qid, _, duplicates) in rows:
        named = [duplicate for duplicate in duplicates.split(",") if duplicate]
        for duplicate in named:
            if duplicate not in documents and duplicate not in queries:
                reason = "is neither in corpus.tsv nor a query"
                collector.accept(path, line, OddRecord(repr(duplicate), reason, noted=_LACKED))
        # A duplicate that is a query is not in the corpus. An unknown duplicate is treated as not retrieved.
        qrels[qid] = {other: 1 for other in named if other in documents or other not in queries}
    collector.report()
    return _collection(path, documents, queries, qrels)


def _table(path: Path, columns: int, collector: OnBadInput) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the fields of each line after the header; the first field is a unique id."""
    seen: dict[str, int] = {}

    def parse(line: str, number: int) -> tuple[int, list[str]] | None:
        fields = line.split("\t")
        if len(fields) != columns:
            raise MalformedRecord(f"expected {columns} columns separated by tabs,", f"found {len(fields)}")
        if number == 1:
            if fields[0].isdecimal():
                raise MalformedRecord("a header is missing: the first line is a question,", repr(fields[0]))
            return None
        new_id(fields[0], seen, tuple(fields[1:]))
        return number, fields

    return parsed_lines(path, parse, collector)


def _quora_release(path: Path) -> Collection:
    """Reads Quora's release: a .tsv file of question pairs; its quoted fields may contain line breaks."""
    header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    lines = parsed(path, raw_lines(path), lambda raw, _: decode_line(raw), "stop")
    reader = csv.reader(lines, delimiter="\t", strict=True)
    texts: dict[str, str] = {}
    qrels: Duplicates = {}
    line = 0  # the number of the last line that was read
    try:
        for row in reader:
            if row != header if line == 0 else len(row) != len(header) or row[-1] not in ("0", "1"):
                found = f"expected the columns {', '.join(header)}; found {row!r:.80}"
                raise BadInputError(path, line + 1, found)
            _, first, second, *questions, same = row
            if line and all(questions):  # some questions of the release are empty
                texts |= {first: " ".join(questions[0].split()), second: " ".join(questions[1].split())}
                if same == "1" and first != second:
                    qrels.setdefault(first, {})[second] = 1
                    qrels.setdefault(second, {})[first] = 1
            line = reader.line_num
    except csv.Error as error:
        raise BadInputError(path, line + 1, str(error)) from error
    return _collection(path, texts, texts, qrels)


def _forum(path: Path, split: str, *, strict: bool) -> Collection:
    """Reads a forum's posts and splits them for retrieval as Hoogeveen et al. 2015 did.

    The newest posts are held out, alternately for test and dev, until `HELD_OUT` of the posts with duplicates
    are in the test set. Duplicates of held-out posts, and all older posts, form the corpus. A query is a
    title; a document is a title and a body without HTML tags. Posts of the same day keep the file's order.
    """
    posts = _posts(path, OnBadInput(strict=strict))
    parts = _split_posts(posts)
    if split not in parts:
        raise UserError(f"{path} has no split {split!r} (has: {', '.join(parts)})")
    held_out = parts["test"] | parts["dev"]
    documents = {
        name: joined(post["title"], _plain(post["body"]))
        for name, post in posts.items()
        if name not in held_out
    }
    queries = {name: post["title"] for name, post in posts.items() if name in parts[split]}
    return _collection(
        path, documents, queries, {name: dict.fromkeys(posts[name]["dups"], 1) for name in queries}
    )


def _posts(path: Path, collector: OnBadInput) -> dict[str, dict[str, Any]]:
    posts = read_json(path, dict[str, dict[str, Any]])
    for name, fields in posts.items():
        if any(not isinstance(fields.get(field), str) for field in ("title", "body", "creationdate")):
            raise BadInputError(
                path,
                None,
                f"post {name!r} needs the texts title, body and creationdate; download the file again",
            )
        if not isinstance(fields.get("dups"), list | dict):
            raise BadInputError(
                path,
                None,
                f"post {name!r} needs dups, a list of its duplicates' ids; download the file again",
            )
        if unknown := [other for other in fields["dups"] if other not in posts]:
            reason = f"lists the duplicate {unknown[0]!r}, which is not in the file"
            collector.accept(path, None, OddRecord(f"post {name!r}", reason, noted=_LACKED))
    collector.report()
    return posts


def _split_posts(posts: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    """Returns the held-out posts of test and of dev, leaving out duplicates of other held-out posts."""
    wanted = math.floor(HELD_OUT * sum(bool(post["dups"]) for post in posts.values()) + 0.5)
    held_out: dict[str, list[str]] = {"test": [], "dev": []}
    judged: dict[str, list[str]] = {"test": [], "dev": []}
    turn, other = "test", "dev"
    for name in sorted(posts, key=lambda post: posts[post]["creationdate"][:10], reverse=True):
        if len(judged["test"]) == wanted:
            break
        held_out[turn].append(name)
        if posts[name]["dups"]:
            judged[turn].append(name)
            turn, other = other, turn
    duplicated = {other for names in judged.values() for name in names for other in posts[name]["dups"]}
    return {part: set(names) - duplicated for part, names in held_out.items()}


class _Text(HTMLParser):
    """Collects the text of an HTML document, without tags."""

    def __init__(self) -> None:
        super().__init__()
        self.text = io.StringIO()

    def handle_data(self, data: str) -> None:
        self.text.write(data)


def _plain(body: str) -> str:
    parser = _Text()
    parser.feed(body)
    parser.close()
    return " ".join(parser.text.getvalue().split())

"""Hard negatives from a run: what a retriever finds for training queries and should not.

Files are streamed. What is held in memory grows with the judgements and with what is written, not with the
corpus or the depth of the run.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxir.data.lines import OnBadInput
from jaxir.data.sources import BeirFolder, Document, key_digest, read_corpus
from jaxir.errors import UserError
from jaxir.files import atomic_directory
from jaxir.progress import progress
from jaxir.retrieval.runs import rank, read_run_by_query

PAIRS, SETTINGS = "train.jsonl", "mining.json"
FEW, MISSED, UNANSWERED = "few", "missed", "unanswered"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningSettings:
    """How negatives are chosen.

    Attributes:
      negatives: of a query, at most.
      first: rank of a run's answers from which on they are candidates, 1 for the best.
      last: the last such rank.
      sampling: `random` candidates, or the `top` ones.
      margin: how much less than its query's lowest-scored positive a negative must score; None asks nothing.
      seed: of random sampling.
    """

    negatives: int = 7
    first: int = 1
    last: int = 200
    sampling: Literal["random", "top"] = "random"
    margin: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.negatives < 1 or not 1 <= self.first <= self.last:
            raise UserError(
                "negatives must be at least 1 and ranks go up from 1, not"
                f" {self.negatives} negatives of ranks {self.first} to {self.last}"
            )
        if self.margin is not None and not math.isfinite(self.margin):
            raise UserError(f"margin must be a number, not {self.margin}")

    def choose(
        self, query_id: str, answers: Mapping[str, float], positives: set[str], excluded: set[str]
    ) -> list[str]:
        """Returns a query's negatives among its answers; which, depends on nothing but these arguments.

        Args:
          query_id: the query.
          answers: document id to score.
          positives: its positives that are among the answers, for the margin.
          excluded: what is no negative: all positives and their duplicates.
        """
        window = rank(answers)[self.first - 1 : self.last]
        found = [doc_id for doc_id in window if doc_id not in excluded]
        if self.margin is not None:
            ceiling = min(answers[doc_id] for doc_id in positives) - self.margin
            found = [doc_id for doc_id in found if answers[doc_id] <= ceiling]
        if self.sampling == "top" or len(found) <= self.negatives:
            return found[: self.negatives]
        drawn = np.random.default_rng([self.seed, *key_digest(query_id)]).permutation(len(found))
        return [found[i] for i in sorted(drawn[: self.negatives])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningReport:
    """What was mined.

    Attributes:
      queries: with their negatives written.
      negatives: of them all.
      duplicates: documents that are kept out because they have the text of a positive.
      left_out: queries without negatives, by reason: `unanswered` (they are not in the run), `missed` (no
        positive among the answers, so that no margin can be told), `few` (no candidate is left).
    """

    queries: int
    negatives: int
    duplicates: int
    left_out: dict[str, int]


def mine(
    run: str | Path, folder: BeirFolder, output: str | Path, *, split: str, settings: MiningSettings
) -> MiningReport:
    """Writes OUTPUT/train.jsonl, pairs with negatives in Tevatron's format, and OUTPUT/mining.json.

    A document is no negative of a query if any split judges it relevant to it, or if it has the same text as
    one that is (white space and case apart).

    Args:
      run: what a retriever found for the queries of `split`; a query's lines must stand together.
      folder: queries, judgements and documents.
      output: a new directory, which appears only when whole.
      split: whose queries get negatives.
      settings: how they are chosen.

    Raises:
      BadInputError: a malformed line.
      UserError: no such split, a document of the run that the corpus lacks, or no negative at all.
    """
    asked, positives = _read_positives(folder, split)
    twins, empty = _read_twins(folder, positives)
    chosen: dict[str, list[str]] = {}
    left_out: collections.Counter[str] = collections.Counter({UNANSWERED: len(asked)})
    for query_id, answers in progress(read_run_by_query(run), what="choosing", unit="queries"):
        if query_id not in asked:
            continue
        left_out[UNANSWERED] -= 1
        known = positives[query_id]
        there = known & answers.keys()
        if settings.margin is not None and not there:
            left_out[MISSED] += 1
            continue
        excluded = known.union(empty, *(twins.get(doc_id, ()) for doc_id in known))
        if found := settings.choose(query_id, answers, there, excluded):
            chosen[query_id] = found
        else:
            left_out[FEW] += 1
    if not chosen:
        raise UserError(f"{run}: no negative for any query of split {split!r} ({_say(left_out)})")
    report = MiningReport(
        queries=len(chosen),
        negatives=sum(map(len, chosen.values())),
        duplicates=len(set().union(*twins.values()) - set().union(*positives.values())),
        left_out={reason: count for reason, count in left_out.items() if count},
    )
    with atomic_directory(output) as aside:
        _write_pairs(aside / PAIRS, folder, chosen, asked)
        content = {
            "settings": dataclasses.asdict(settings),
            "run": {"name": Path(run).name, "sha256": _sha256(run)},
            "split": split,
            "collection": str(folder.directory),
            **dataclasses.asdict(report),
        }
        (aside / SETTINGS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return report


def describe(report: MiningReport) -> str:
    """Says in one line what was mined."""
    text = f"{report.queries:,} queries, {report.negatives / report.queries:.1f} negatives each"
    if report.left_out:
        text += f"; left out: {_say(report.left_out)}"
    return text + f"; {report.duplicates:,} documents have the text of a positive"


def _say(left_out: Mapping[str, int]) -> str:
    reasons = {
        UNANSWERED: "not in the run",
        MISSED: "without a positive in the run, so without a margin",
        FEW: "without a candidate",
    }
    return ", ".join(
        f"{left_out[reason]:,} {text}" for reason, text in reasons.items() if left_out.get(reason)
    )


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
    texts = {d.id: _digest(d) for d in _documents(folder, "reading positives") if d.id in wanted}
    if lacking := wanted - texts.keys():
        raise UserError(f"{folder.corpus_path}: it lacks {min(lacking)!r}, which is judged relevant")
    nothing = _digest(Document("", "", ""))
    if textless := [doc_id for doc_id, digest in texts.items() if digest == nothing]:
        raise UserError(f"{folder.corpus_path}: {textless[0]!r} is judged relevant and has no text")
    of_text: dict[bytes, list[str]] = {digest: [] for digest in (*texts.values(), nothing)}
    for document in _documents(folder, "looking for duplicates"):
        if (digest := _digest(document)) in of_text:
            of_text[digest].append(document.id)
    twins = {doc_id: of_text[digest] for doc_id, digest in texts.items() if len(of_text[digest]) > 1}
    return twins, set(of_text[nothing])


def _write_pairs(
    path: Path, folder: BeirFolder, chosen: Mapping[str, Sequence[str]], asked: Mapping[str, Sequence[str]]
) -> None:
    wanted = {doc_id for query_id, found in chosen.items() for doc_id in (*found, *asked[query_id])}
    documents = {d.id: d for d in _documents(folder, "reading negatives") if d.id in wanted}
    if lacking := wanted - documents.keys():
        raise UserError(f"{folder.corpus_path}: it lacks {min(lacking)!r}, which the run has found")
    queries = {query.id: query.text for query in folder.queries() if query.id in chosen}
    if lacking := chosen.keys() - queries.keys():
        raise UserError(f"{folder.queries_path}: it lacks {min(lacking)!r}, which is judged")

    def passages(doc_ids: Sequence[str]) -> list[dict[str, str]]:
        found = [documents[doc_id] for doc_id in doc_ids]
        return [{"docid": d.id, "title": d.title, "text": d.text} for d in found]

    with path.open("w", encoding="utf-8") as file:
        for query_id, doc_ids in chosen.items():
            record = {
                "query_id": query_id,
                "query": queries[query_id],
                "positive_passages": passages(asked[query_id]),
                "negative_passages": passages(doc_ids),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _documents(folder: BeirFolder, what: str) -> Iterator[Document]:
    # A collector of one's own, whose report is not asked for: the corpus is read three times.
    documents = read_corpus(folder.corpus_path, OnBadInput("stop"), unique=False)
    return iter(progress(documents, what=what, unit="documents"))


def _digest(document: Document) -> bytes:
    text = " ".join(document.contents.casefold().split())
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _sha256(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Mines hard negatives: documents that a run found for training queries although they are not relevant.

Files are streamed. Memory grows with the judgements and the output, not with the corpus or the run.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import read_wanted
from jaxir.retrieval.mining.judging import Drawn, RelevanceFilter
from jaxir.retrieval.mining.known_positives import KnownPositives
from jaxir.retrieval.mining.mining_settings import MiningSettings, RelevanceSettings
from jaxir.retrieval.ranking.run_reranking import texts_of_queries
from jaxir.retrieval.ranking.runs import rank, read_run_by_query
from jaxir.storage.files import atomic_directory, check_new_directory
from jaxir.storage.json_files import json_line
from jaxir.storage.open_files import sha256_of

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.pair_scorer import CrossEncoder

PAIRS, SETTINGS = "train.jsonl", "mining.json"
# Reasons why a query has no negatives, and the words for each after a number of queries.
MISSED, UNANSWERED, FEW, RELEVANT = "missed", "unanswered", "few", "relevant"
LEFT_OUT = {
    UNANSWERED: "not in the run",
    MISSED: "without a positive in the run, which a margin needs",
    FEW: "without a candidate",
    RELEVANT: "whose candidates the cross-encoder all dropped",
}
# Reasons why a document in the range of ranks is no candidate, and the words for each after a number.
POSITIVE, DUPLICATE, QUERY_TEXT, EMPTY, NEAR = "positive", "duplicate", "query", "empty", "score"
DROPPED = {
    POSITIVE: "known positives",
    DUPLICATE: "duplicates of known positives",
    QUERY_TEXT: "with the query's text",
    EMPTY: "without text",
    NEAR: "scored too high",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningReport:
    """The counts that mining prints and writes to mining.json.

    Attributes:
      queries: number of queries with negatives.
      negatives: number of negatives of all queries.
      duplicates: number of documents that were excluded because they have the text of a positive.
      lacking: number of the split's positives whose query, document or text is not in the collection.
      left_out: queries without negatives, by reason: `unanswered` (not in the run), `missed` (no positive in
        the run, which a margin needs), `few` (no candidate), `relevant` (the cross-encoder dropped all).
      dropped: documents in the range of ranks that are not candidates, by reason: known `positive`,
        `duplicate` of a positive, text of the `query`, `empty`, a `score` above the margins or max_score.
      judged: number of candidates that the cross-encoder scored. They are drawn until a query has enough.
      false_negatives: candidates that the cross-encoder dropped, by `max_relevance` or `relevance_margin`.
    """

    queries: int
    negatives: int
    duplicates: int
    lacking: int
    left_out: dict[str, int]
    dropped: dict[str, int]
    judged: int
    false_negatives: dict[str, int]


def mine(
    run: str | Path,
    folder: BeirFolder,
    output: str | Path,
    *,
    split: str,
    settings: MiningSettings,
    judge: CrossEncoder | None = None,
    relevance: RelevanceSettings | None = None,
    teacher: CrossEncoder | None = None,
    strict: bool = False,
) -> MiningReport:
    """Writes OUTPUT/train.jsonl, pairs with negatives in Tevatron's format, and OUTPUT/mining.json.

    A document is not a negative of a query if it is judged relevant, in any split, to a query with that text,
    or if it has the text of such a document, or of the query (ignoring white space and case).

    Args:
      run: the run of a retriever for the queries of `split`; the lines of a query must be consecutive.
      output: a new directory, which appears only when complete.
      judge: a cross-encoder that drops candidates that are too relevant by the settings `relevance`; or None.
      teacher: a cross-encoder whose scores of all positives and negatives are written; None: no scores.
      strict: raise an error for judgements whose query or document is not in the collection, repeated queries
        and grades such as 1.0. By default these are counted, and such judgements are left out.
    """
    check_new_directory(output)
    policy = getattr(folder.on_bad_input, "policy", folder.on_bad_input)
    collector = OnBadInput(policy, strict=strict)
    folder = BeirFolder(folder.directory, collector)
    known = KnownPositives.read(folder, split, strict=strict)
    collector.report()
    check = None
    if judge is not None:
        check = RelevanceFilter(judge, relevance, folder, known.split_positives)
    chosen, left_out, dropped = _choose(run, known, settings, check)
    if not chosen:
        raise UserError(
            f"{run}: no query of split {split!r} has a negative: {_counts(left_out, LEFT_OUT)}. Give a run of"
            " this split, or looser settings"
        )
    report = MiningReport(
        queries=len(chosen),
        negatives=sum(map(len, chosen.values())),
        duplicates=len(set().union(*known.duplicates.values()) - set().union(*known.all_positives.values())),
        lacking=known.lacking,
        left_out={reason: count for reason, count in left_out.items() if count},
        dropped=dict(dropped),
        judged=check.judged if check else 0,
        false_negatives=dict(check.dropped) if check else {},
    )
    with atomic_directory(output) as temporary:
        _write_pairs(temporary / PAIRS, folder, chosen, known.split_positives, teacher)
        content = {
            "settings": dataclasses.asdict(settings),
            "cross_encoder": check.description if check else None,
            "teacher": teacher and {"name": teacher.spec, "fingerprint": teacher.fingerprint},
            "run": {"name": Path(run).name, "sha256": sha256_of(Path(run))},
            "split": split,
            "collection": str(folder.directory),
            **dataclasses.asdict(report),
        }
        (temporary / SETTINGS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return report


def describe(report: MiningReport) -> str:
    """Returns a line that says how much was mined and how much each filter dropped."""
    text = f"{report.queries:,} queries, {report.negatives / report.queries:.1f} negatives each"
    if report.left_out:
        text += f"; left out: {_counts(report.left_out, LEFT_OUT)}"
    text += f"; {report.duplicates:,} documents have the text of a positive"
    if report.lacking:
        text += f"; {report.lacking:,} positives left out, because the collection lacks their query or text"
    if report.dropped:
        text += f"; dropped: {_counts(report.dropped, DROPPED)}"
    if report.judged:
        found = sum(report.false_negatives.values())
        text += f"; of {report.judged:,} candidates the cross-encoder found {found:,} relevant"
        if found:
            reasons = {
                RelevanceFilter.ABOVE: "above the maximum",
                RelevanceFilter.NEAR: "too close to a positive",
            }
            text += f" ({_counts(report.false_negatives, reasons)})"
    return text


def _counts(counts: Mapping[str, int], reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{counts[reason]:,} {text}" for reason, text in reasons.items() if counts.get(reason))


def _choose(
    run: str | Path, known: KnownPositives, settings: MiningSettings, check: RelevanceFilter | None
) -> tuple[dict[str, list[str]], collections.Counter[str], collections.Counter[str]]:
    """Returns negatives by query, and counts of exclusions; `check` may need several readings of the run."""
    left_out: collections.Counter[str] = collections.Counter({UNANSWERED: len(known.split_positives)})
    dropped: collections.Counter[str] = collections.Counter()
    taken: dict[str, Drawn] = {}
    # `wanting`: how many candidates of each unfinished query were drawn. `size`: how many to draw next.
    wanting, size = dict.fromkeys(known.split_positives, 0), settings.negatives
    while wanting:
        counts = (collections.Counter(), collections.Counter()) if taken else (left_out, dropped)
        drawn: dict[str, Drawn] = {}
        for query_id, found in _candidates(run, wanting, known, settings, *counts):
            order = settings.order(query_id, len(found))
            drawn[query_id] = [(i, found[i]) for i in order[wanting[query_id] :][:size]]
        passed = drawn if check is None else check.keep(drawn)
        for query_id, some in passed.items():
            taken.setdefault(query_id, []).extend(some)
        wanting = {
            query_id: wanting[query_id] + size
            for query_id, some in drawn.items()
            if check is not None and len(some) == size and len(taken[query_id]) < settings.negatives
        }
        size = min(2 * size, settings.negatives * len(known.split_positives) // max(1, len(wanting)))
    chosen = {q: [doc_id for _, doc_id in sorted(some[: settings.negatives])] for q, some in taken.items()}
    left_out[RELEVANT] = sum(not some for some in chosen.values())
    return {query_id: found for query_id, found in chosen.items() if found}, left_out, dropped


def _candidates(
    run: str | Path,
    wanting: Mapping[str, int],
    known: KnownPositives,
    settings: MiningSettings,
    left_out: collections.Counter[str],
    dropped: collections.Counter[str],
) -> Iterator[tuple[str, list[str]]]:
    """Yields each query of `wanting` with its candidates, best first; counts queries without candidates."""
    for query_id, answers in progress(read_run_by_query(run), what="choosing", unit="queries"):
        if query_id not in wanting:
            continue
        left_out[UNANSWERED] -= 1
        positives = known.all_positives[query_id]
        ranked = [answers[doc_id] for doc_id in positives & answers.keys()]
        if settings.needs_positive and not ranked:
            left_out[MISSED] += 1
            continue
        ceiling = settings.ceiling(ranked)
        duplicates = set().union(*(known.duplicates.get(doc_id, ()) for doc_id in positives))
        own, found = known.query_copies.get(query_id, ()), []
        for doc_id in rank(answers)[settings.first - 1 : settings.last]:
            reasons = (
                (POSITIVE, doc_id in positives),
                (DUPLICATE, doc_id in duplicates),
                (QUERY_TEXT, doc_id in own),
                (EMPTY, doc_id in known.empty),
                (NEAR, answers[doc_id] > ceiling),
            )
            if reason := next((reason for reason, applies in reasons if applies), None):
                dropped[reason] += 1
            else:
                found.append(doc_id)
        if found:
            yield query_id, found
        else:
            left_out[FEW] += 1


def _write_pairs(
    path: Path,
    folder: BeirFolder,
    chosen: Mapping[str, Sequence[str]],
    positives: Mapping[str, Sequence[str]],
    teacher: CrossEncoder | None,
) -> None:
    wanted = {doc_id for query_id, found in chosen.items() for doc_id in (*found, *positives[query_id])}
    documents = {d.id: d for d in read_wanted(folder.corpus_path, wanted, named_by="the run has found")}
    queries = texts_of_queries(folder, chosen, "is judged")
    pairs = [(q, d) for q, found in chosen.items() for d in (*positives[q], *found)]
    scores: dict[tuple[str, str], float] = {}
    if teacher is not None:
        texts = [(queries[query_id], documents[doc_id].contents) for query_id, doc_id in pairs]
        scores = dict(zip(pairs, teacher.score(texts).tolist(), strict=True))

    def passages(query_id: str, doc_ids: Sequence[str]) -> list[dict[str, object]]:
        found = [documents[doc_id] for doc_id in doc_ids]
        score = (lambda d: {"score": scores[query_id, d.id]}) if scores else (lambda _: {})
        return [{"docid": d.id, "title": d.title, "text": d.text} | score(d) for d in found]

    with path.open("w", encoding="utf-8") as file:
        for query_id, doc_ids in chosen.items():
            record = {
                "query_id": query_id,
                "query": queries[query_id],
                "positive_passages": passages(query_id, positives[query_id]),
                "negative_passages": passages(query_id, doc_ids),
            }
            file.write(json_line(record))

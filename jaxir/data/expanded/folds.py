"""K-fold hold-out generation: each question is expanded by a generator that was not trained on it."""

from __future__ import annotations

from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import read_queries
from jaxir.data.sets.holdout import group_key
from jaxir.data.sets.texts import SourcesAndTargets
from jaxir.storage.files import atomic_directory
from jaxir.storage.json_files import json_line


def write_folds(targets: str | Path, queries: str | Path, output: str | Path, folds: int) -> str:
    """Writes targets-K.jsonl, all targets except fold K's, and queries-K.jsonl, the questions of fold K.

    Source: Chuang 2024, section 3.3.3. Texts that differ only in case or white space are in the same fold,
    whatever the order of the files, so that no generator has seen a question that it expands. Returns a
    summary.
    """
    questions = list(read_queries(queries))
    examples = list(SourcesAndTargets(path=str(targets)).records(OnBadInput("stop")))

    def fold_of(text: str) -> int:
        return group_key(text, seed=0) % folds

    known = {group_key(query.text, seed=0) for query in questions}
    foreign = sum(group_key(record["source"][1], seed=0) not in known for record in examples)
    if foreign == len(examples):
        raise UserError(
            f"{targets}: none of its sources is a question in {queries}: give the questions of the targets"
        )
    held_out = [[query for query in questions if fold_of(query.text) == k] for k in range(folds)]
    kept = [[r for r in examples if fold_of(r["source"][1]) != k] for k in range(folds)]
    if not all(held_out) or not all(kept):
        raise UserError(
            f"{queries}: {len(questions):,} questions are too few for {folds} folds: give fewer folds"
        )
    with atomic_directory(output) as temporary:
        for number, (some, of_others) in enumerate(zip(held_out, kept, strict=True), 1):
            questions_of_fold = [{"_id": query.id, "text": query.text} for query in some]
            targets_of_others = [{name: text for name, (_, text) in record.items()} for record in of_others]
            for name, records in (("queries", questions_of_fold), ("targets", targets_of_others)):
                lines = [json_line(record) for record in records]
                (temporary / f"{name}-{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    sizes = [len(some) for some in held_out]
    note = f"; {foreign:,} of {len(examples):,} targets have no question in {queries}" if foreign else ""
    return f"{folds} folds of {min(sizes):,} to {max(sizes):,} questions{note}"

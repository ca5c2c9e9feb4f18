"""Smaller BEIR folders."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import OnBadInput, json_object, parsed_lines, string_field
from jaxir.data.formats.sources import new_id
from jaxir.storage.files import atomic_directory


def write_sample(
    directory: str | Path, output: str | Path, *, train: int, split: str, seed: int
) -> tuple[int, int]:
    """Writes a BEIR folder with `train` random judgements of `split`, all other splits, and their texts.

    Returns the numbers of documents and queries.
    """
    collector = OnBadInput()
    folder = BeirFolder(directory, collector)
    folder.qrels_path(split)  # if this split is missing, the error names the existing splits
    qrels = {name: list(folder.qrels(name)) for name in folder.splits}
    if not 0 < train <= len(qrels[split]):
        most = len(qrels[split])
        raise UserError(f"train must be from 1 to {most}, the judgements of split {split!r}, not {train}")
    rows = np.random.default_rng(seed).permutation(len(qrels[split]))[:train]
    qrels[split] = [qrels[split][row] for row in np.sort(rows)]
    query_ids = {qrel.query_id for judged in qrels.values() for qrel in judged}
    document_ids = {qrel.document_id for judged in qrels.values() for qrel in judged}
    with atomic_directory(output) as aside:
        copied = [
            _copy_lines(folder.corpus_path, aside / "corpus.jsonl", document_ids, collector),
            _copy_lines(folder.queries_path, aside / "queries.jsonl", query_ids, collector),
        ]
        (aside / "qrels").mkdir()
        for name, judged in qrels.items():
            lines = [f"{qrel.query_id}\t{qrel.document_id}\t{qrel.score}\n" for qrel in judged]
            content = "query-id\tcorpus-id\tscore\n" + "".join(lines)
            (aside / "qrels" / f"{name}.tsv").write_text(content, encoding="utf-8")
    collector.report()
    return copied[0], copied[1]


def _copy_lines(source: Path, target: Path, ids: set[str], collector: OnBadInput) -> int:
    """Copies the lines of a .jsonl[.gz] file whose `_id` is in `ids`; returns their number."""
    found: dict[str, int] = {}

    def parse(line: str, _: int) -> str:
        record = json_object(line)
        identifier = string_field(record, "_id")
        content = (record.get("title"), record.get("text"))
        return f"{line}\n" if identifier in ids and new_id(identifier, found, repr(content)) else ""

    with target.open("w", encoding="utf-8") as file:
        file.writelines(parsed_lines(source, parse, collector))
    missing = sorted(ids - found.keys())
    if missing:
        what = f"{missing[0]!r} has judgements but is missing ({len(missing):,} of {len(ids):,} are missing)"
        if 2 * len(missing) > len(ids):
            raise BadInputError(source, None, f"{what}; the file may be truncated")
        print(f"note: {source}: {what}", file=sys.stderr)
    return len(found)

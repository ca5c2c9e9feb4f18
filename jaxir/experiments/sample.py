"""Smaller BEIR folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxir.data.lines import json_object, parsed_lines, string_field
from jaxir.data.sources import BeirFolder, new_id
from jaxir.errors import BadInputError, UserError
from jaxir.files import atomic_directory


def write_sample(
    directory: str | Path, output: str | Path, *, train: int, split: str, seed: int
) -> tuple[int, int]:
    """Writes a BEIR folder with `train` judgements of `split`, and all of the other splits.

    Args:
      directory: the folder to draw from.
      output: directory to write.
      train: judgements of `split` to keep.
      split: the training split.
      seed: of the drawing.

    Returns:
      The numbers of documents and queries that are left, those that are judged.

    Raises:
      BadInputError: a malformed line, or what is judged is not there.
      UserError: no such folder or split, fewer judgements, or the output exists.
    """
    folder = BeirFolder(directory)
    folder.qrels_path(split)  # names the splits there are, where this is none
    qrels = {name: list(folder.qrels(name)) for name in folder.splits}
    if not 0 < train <= len(qrels[split]):
        raise UserError(f"train must be between 1 and {len(qrels[split])}, the judgements of {split!r}")
    rows = np.random.default_rng(seed).permutation(len(qrels[split]))[:train]
    qrels[split] = [qrels[split][row] for row in np.sort(rows)]
    query_ids = {qrel.query_id for judged in qrels.values() for qrel in judged}
    document_ids = {qrel.document_id for judged in qrels.values() for qrel in judged}
    with atomic_directory(output) as aside:
        _copy_lines(folder.corpus_path, aside / "corpus.jsonl", document_ids)
        _copy_lines(folder.queries_path, aside / "queries.jsonl", query_ids)
        (aside / "qrels").mkdir()
        for name, judged in qrels.items():
            lines = [f"{qrel.query_id}\t{qrel.document_id}\t{qrel.score}\n" for qrel in judged]
            content = "query-id\tcorpus-id\tscore\n" + "".join(lines)
            (aside / "qrels" / f"{name}.tsv").write_text(content, encoding="utf-8")
    return len(document_ids), len(query_ids)


def _copy_lines(source: Path, target: Path, ids: set[str]) -> None:
    """Copies the lines of a .jsonl[.gz] file whose `_id` is one of `ids`, just as they are."""
    found: set[str] = set()

    def parse(line: str, _: int) -> str:
        identifier = string_field(json_object(line), "_id")
        return f"{line}\n" if identifier in ids and new_id(identifier, found) else ""

    with target.open("w", encoding="utf-8") as file:
        file.writelines(parsed_lines(source, parse, "stop"))
    if missing := ids - found:
        what = (
            f"it lacks {min(missing)!r}, which is judged ({len(missing):,} of {len(ids):,}): is it cut off?"
        )
        raise BadInputError(source, None, what)

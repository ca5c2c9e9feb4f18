"""Collections to search in and to judge by, from whatever format, as BEIR folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxir.data.sources import Document, Qrel, Query
from jaxir.errors import UserError
from jaxir.progress import progress


class Counts(NamedTuple):
    """What was written."""

    documents: int
    queries: int
    qrels: dict[str, int]


def write_collection(
    folder: Path,
    *,
    documents: Iterable[Document],
    queries: Iterable[Query],
    qrels: Mapping[str, Iterable[Qrel]],
) -> Counts:
    """Writes corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv into an existing empty `folder`.

    The iterables are read one after the other, in the order of the arguments.

    Raises:
      UserError: no document, no query, or a split without a judgement.
    """

    def records(file_name: str, items: Iterable[Document | Query]) -> int:
        count = 0
        with (folder / file_name).open("w", encoding="utf-8") as file:
            for item in progress(items, what=f"writing {file_name}", unit="lines"):
                record = item._asdict()
                record = {"_id": record.pop("id"), **record}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise UserError(f"nothing to write to {file_name}")
        return count

    def judgements(split: str) -> int:
        count = 0
        with (folder / "qrels" / f"{split}.tsv").open("w", encoding="utf-8") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            for qrel in qrels[split]:
                file.write(f"{qrel.query_id}\t{qrel.document_id}\t{qrel.score}\n")
                count += 1
        if not count:
            raise UserError(f"nothing is judged in split {split!r}")
        return count

    written = records("corpus.jsonl", documents), records("queries.jsonl", queries)
    (folder / "qrels").mkdir()
    counts = {split: judgements(split) for split in qrels}
    return Counts(*written, counts)

"""Writes a BEIR folder with held-out splits from the user's own pairs."""

from __future__ import annotations

import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxir.core.progress import progress
from jaxir.data.formats.collection_files import CollectionWriter, Counts
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.pair_table import Pair, PairTable, Positives
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import Document
from jaxir.data.sets.holdout import HeldOut, group_key, hold_out
from jaxir.storage.json_files import json_line

NEGATIVES = "negatives.jsonl"
TRAIN = "train"


class Prepared(NamedTuple):
    """What `write_pairs` wrote into a BEIR folder.

    Attributes:
      counts: numbers of documents, queries and judgements.
      queries: {split: number of distinct queries}.
      held_out: the assignment of the pairs to splits.
      with_negatives: number of pairs in negatives.jsonl; 0 if the folder has no such file.
      example: a training pair, for messages.
    """

    counts: Counts
    queries: dict[str, int]
    held_out: HeldOut
    with_negatives: int
    example: Pair


def write_pairs(
    folder: Path,
    table: PairTable,
    on_bad_input: OnBadInput,
    *,
    dev: float | None = None,
    test: float | None = None,
    seed: int = 0,
) -> Prepared:
    """Writes corpus.jsonl, queries.jsonl and qrels/{train,dev,test}.tsv into an existing empty `folder`.

    The file is read twice, and memory holds only hashes of its texts. Negatives become documents, too.
    negatives.jsonl has the training pairs with negatives, in Tevatron's format; a pair repeated with other
    negatives has several lines. Negatives that are relevant to their query in another pair are left out.
    `dev` and `test` are sizes for `holdout.hold_out`; `seed` determines the choice of held-out groups.
    """
    queries, query_keys, passage_keys = (array.array("q") for _ in range(3))
    positives = Positives()
    for pair in progress(table.pairs(on_bad_input), what="reading pairs", unit="pairs"):
        positives.add(pair)
        queries.append(hash(pair.query.text))
        query_keys.append(group_key(pair.query.text, seed))
        passage_keys.append(group_key(pair.passage.contents, seed))
    held_out = hold_out(
        *(np.asarray(column) for column in (queries, query_keys, passage_keys)), {"test": test, "dev": dev}
    )
    splits = [TRAIN, *held_out.names]
    again = progress(
        table.pairs(OnBadInput("skip")), what="writing pairs", unit="pairs", total=len(held_out.split)
    )
    written: set[int] = set()  # hashes of the ids of queries, documents and pairs already written

    def is_new(*what: str) -> bool:
        size = len(written)
        written.add(hash(what))
        return len(written) > size

    num_queries = {name: 0 for name in (TRAIN, "dev", "test") if name in splits}
    with_negatives, example = 0, None
    with (
        CollectionWriter(folder, num_queries) as writer,
        (folder / NEGATIVES).open("w", encoding="utf-8") as file,
    ):
        for number, found in zip(held_out.split, again, strict=True):
            split, pair = splits[number], positives.without(found)
            if is_new("query", pair.query.id):
                writer.query(pair.query)
                num_queries[split] += 1
            for document in (pair.passage, *pair.negatives):
                if is_new("passage", document.id):
                    writer.document(document)
            ids = pair.query.id, pair.passage.id
            if is_new("pair", *ids):
                writer.judge(split, Qrel(*ids, 1))
            if split == TRAIN:
                example = example or pair
                if pair.negatives:
                    file.write(_tevatron_line(pair))
                    with_negatives += is_new("with negatives", *ids)
        counts = writer.counts()
    positives.report(table.path)
    if not with_negatives:
        (folder / NEGATIVES).unlink()
    return Prepared(counts, num_queries, held_out, with_negatives, example)


def _tevatron_line(pair: Pair) -> str:
    def passages(documents: list[Document]) -> list[dict[str, str]]:
        return [{"docid": d.id, "title": d.title, "text": d.text} for d in documents]

    record = {
        "query_id": pair.query.id,
        "query": pair.query.text,
        "positive_passages": passages([pair.passage]),
        "negative_passages": passages(pair.negatives),
    }
    return json_line(record)

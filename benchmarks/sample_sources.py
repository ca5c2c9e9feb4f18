"""Draws a sample of debpkgs that keeps the packages of a source together, for docs/results/mining.md.

The test split stays complete. Training sources are taken in the order of the SHA-256 of their names, until
they have 5,000 documents.

    python benchmarks/sample_sources.py DEBPKGS OUTPUT
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections import defaultdict
from pathlib import Path

TRAINING_DOCUMENTS = 5000


def main(source: Path, output: Path) -> None:
    """Writes the sample as a BEIR folder."""
    (output / "qrels").mkdir(parents=True)
    rows = {s: (source / f"qrels/{s}.tsv").read_text().splitlines()[1:] for s in ("train", "test")}
    train, test = ({row.split("\t")[1] for row in rows[split]} for split in ("train", "test"))
    with gzip.open(source / "corpus.jsonl.gz", "rt") as file:
        documents = {json.loads(line)["_id"]: line for line in file}
    sources = defaultdict(list)
    for name in documents.keys() & train:
        sources[json.loads(documents[name])["metadata"]["source"]].append(name)
    kept = set(test)
    for name in sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(kept) < len(test) + TRAINING_DOCUMENTS:
            kept.update(sources[name])
    with (output / "corpus.jsonl").open("w") as file:
        file.writelines(line for name, line in documents.items() if name in kept)
    asked = set()
    for split, judged in rows.items():
        judged = [row for row in judged if row.split("\t")[1] in kept]
        asked.update(row.split("\t")[0] for row in judged)
        (output / f"qrels/{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged, ""]))
    with gzip.open(source / "queries.jsonl.gz", "rt") as file, (output / "queries.jsonl").open("w") as out:
        out.writelines(line for line in file if json.loads(line)["_id"] in asked)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))

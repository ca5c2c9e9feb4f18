"""Writing a small BEIR folder."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

WORDS = ["apple", "banana", "cherry", "dune", "ember", "fjord", "grove", "harbour", "iris", "jade"]


def write_jsonl(path: Path, records: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_folder(directory: Path, *, train: int = 40, held_out: int = 8) -> Path:
    """Writes a small BEIR folder; its first 12 training pairs come from sources with 5, 3, 2 and 2 pairs."""
    rng = np.random.default_rng(0)
    sources = [name for name, size in (("a", 5), ("b", 3), ("c", 2), ("d", 2)) for _ in range(size)]
    sources += [f"s{i}" for i in range(train + 2 * held_out - len(sources))]
    corpus, queries, place = [], [], 0
    (directory / "qrels").mkdir(parents=True)
    for split, count in (("train", train), ("dev", held_out), ("test", held_out)):
        lines = ["query-id\tcorpus-id\tscore\n"]
        for _ in range(count):
            chosen = rng.choice(WORDS, 6).tolist()
            text = " ".join(chosen) + f" {place}"
            corpus.append({"_id": f"d{place}", "text": text, "metadata": {"source": sources[place]}})
            queries.append({"_id": f"q{place}", "text": " ".join(chosen[:3]) + f" {place}"})
            lines.append(f"q{place}\td{place}\t1\n")
            place += 1
        (directory / "qrels" / f"{split}.tsv").write_text("".join(lines))
    for name, records in (("corpus", corpus), ("queries", queries)):
        write_jsonl(directory / f"{name}.jsonl", records)
    return directory

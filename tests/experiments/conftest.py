"""A small BEIR folder whose documents belong to groups, and a small model for it."""

import json
from pathlib import Path

import numpy as np
import pytest

WORDS = ["apple", "banana", "cherry", "dune", "ember", "fjord", "grove", "harbour", "iris", "jade"]
MODEL = f"hf:{Path(__file__).resolve().parent.parent / 'golden' / 'bert'}"


def write_folder(directory: Path, *, train: int = 40, held_out: int = 8) -> Path:
    """Writes a folder whose first 12 training pairs are of sources with 5, 3, 2 and 2 pairs."""
    rng = np.random.default_rng(0)
    sources = [name for name, size in (("a", 5), ("b", 3), ("c", 2), ("d", 2)) for _ in range(size)]
    sources += [f"s{i}" for i in range(train + 2 * held_out - len(sources))]
    corpus, queries, place = [], [], 0
    (directory / "qrels").mkdir(parents=True)
    for split, count in (("train", train), ("dev", held_out), ("test", held_out)):
        lines = ["query-id\tcorpus-id\tscore\n"]
        for _ in range(count):
            words = rng.choice(WORDS, 6).tolist()
            text = " ".join(words) + f" {place}"
            corpus.append({"_id": f"d{place}", "text": text, "metadata": {"source": sources[place]}})
            queries.append({"_id": f"q{place}", "text": " ".join(words[:3]) + f" {place}"})
            lines.append(f"q{place}\td{place}\t1\n")
            place += 1
        (directory / "qrels" / f"{split}.tsv").write_text("".join(lines))
    for name, records in (("corpus", corpus), ("queries", queries)):
        content = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{name}.jsonl").write_text(content)
    return directory


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "pairs")


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture
def tiny_gin(tmp_path, model) -> Path:
    """A gin file of a model that trains in seconds."""
    lines = [
        'include "gin/experiments/minilm.gin"',
        f'MODEL = "{model}"',
        "QUERY_LENGTH = 8",
        "PASSAGE_LENGTH = 8",
    ]
    path = tmp_path / "tiny.gin"
    path.write_text("\n".join(lines) + "\n")
    return path

"""XQuAD's English part as sentences to search, for the chain of docs/results/generated_text.md.

Writes corpus.jsonl (a sentence a passage), answers.jsonl, queries.jsonl, a file of questions for each split
(train.jsonl, dev.jsonl, test.jsonl), and targets.jsonl, from which a generator learns to write sentences:
some words of each, also of test's articles, after an interrogative, stand for a question.

    python benchmarks/xquad_sentences.py XQUAD_FOLDER OUTPUT
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxir.files import atomic_directory

ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(“])")
WORDS = re.compile(r"\w[\w'’-]*")
ASKED = ("Who", "What", "When", "Where", "Which", "How many", "How", "Why", "In what")
EACH = 40  # pairs of a sentence
SHARE = (0.25, 0.6)  # of a sentence's longer words


def main(source: str, output: str) -> None:
    """Writes the folder and prints what is in it."""
    rng, folder = random.Random(0), Path(source)
    passages = [
        {"_id": f"{d['_id']}_{n}", "title": "", "text": text}
        for d in lines_of(folder / "corpus.jsonl")
        for n, text in enumerate(ENDS.split(d["text"]))
    ]
    queries = {q["_id"]: q for q in lines_of(folder / "queries.jsonl")}
    pairs = [{"source": words_of(p["text"], rng), "target": p["text"]} for p in passages for _ in range(EACH)]
    rng.shuffle(pairs)
    with atomic_directory(output) as place:
        write(place / "corpus.jsonl", passages)
        write(place / "queries.jsonl", queries.values())
        answers = ({"_id": q["_id"], "answers": q["metadata"]["answers"]} for q in queries.values())
        write(place / "answers.jsonl", answers)
        write(place / "targets.jsonl", pairs)
        for split in ("train", "dev", "test"):
            rows = (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
            write(
                place / f"{split}.jsonl",
                [queries[q] for q in dict.fromkeys(row.split("\t")[0] for row in rows)],
            )
    print(f"{output}: {len(passages):,} sentences, {len(queries):,} questions, {len(pairs):,} targets")


def words_of(text: str, rng: random.Random) -> str:
    """Returns what stands for a question about a sentence: some of its longer words, in their order."""
    words = [word for word in WORDS.findall(text) if len(word) > 3] or WORDS.findall(text)
    some = max(1, round(len(words) * rng.uniform(*SHARE)))
    kept = sorted(rng.sample(range(len(words)), some))
    return f"{rng.choice(ASKED)} {' '.join(words[i] for i in kept)}?"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes records as JSONL."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.rpartition("    ")[2].strip())
    main(*sys.argv[1:])

"""Questions with a hole and the passage that fills it, from which a reader learns to copy.

A question is what stands around a few words of a passage, some of it left out; its answer is those words, as
in unsupervised question answering by clozes (Lewis et al. 2019). They are read as questions are later:

    question: What battalion surrendered on May? title: TITLE context: TEXT      ->  17th

Writes targets.jsonl, dev_targets.jsonl, and corpus.jsonl with queries.jsonl, from which small_t5.py learns
its vocabulary. EACH is how many are made of each text, 1 if it is not told.

    python benchmarks/reading_clozes.py OUTPUT FILE.jsonl[.gz][=EACH] ...
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xquad_sentences import ASKED, bare, hole_in, lines_of, write

from jaxir.files import atomic_directory

CONTEXT = 55  # words of a passage
AROUND = (2, 9)  # words of a question on either side of the hole
DROPPED = 0.6  # of a question's words, at most
DEV = 1000
QUERIES = 20_000


def main(output: str, *sources: str) -> None:
    """Writes the folder and prints how many clozes there are."""
    rng, clozes, texts = random.Random(0), [], []
    for source in sources:
        path, _, each = source.partition("=")
        passages = lines_of(Path(path))
        texts += passages
        clozes += [c for p in passages for _ in range(int(each or 1)) for c in cloze_of(p, rng)]
    rng.shuffle(clozes)
    with atomic_directory(output) as folder:
        write(folder / "targets.jsonl", clozes[DEV:])
        write(folder / "dev_targets.jsonl", clozes[:DEV])
        write(folder / "corpus.jsonl", texts)
        write(
            folder / "queries.jsonl",
            ({"_id": c["target"], "text": c["source"].partition("? ")[0]} for c in clozes[:QUERIES]),
        )
    print(f"{output}: {len(clozes):,} clozes of {len(texts):,} texts")


def cloze_of(passage: Mapping[str, Any], rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields a question on some words of a passage, with it, and those words; nothing if it is too short."""
    words = passage["text"].split()
    begin = rng.randrange(max(1, len(words) - CONTEXT + 1))
    words = words[begin : begin + CONTEXT]
    hole = hole_in(words, rng)
    if len(words) < 8 or hole is None:
        return
    before, after = (rng.randint(*AROUND) for _ in range(2))
    dropped = rng.uniform(0, DROPPED)
    around = words[max(0, hole.start - before) : hole.start], words[hole.stop : hole.stop + after]
    left, right = ([w for w in side if rng.random() >= dropped] for side in around)
    question = " ".join([*left, rng.choice(ASKED).lower(), *right])
    title = f"title: {passage['title']} " if passage.get("title") else ""
    yield {
        "source": f"question: {question}? {title}context: {' '.join(words)}",
        "target": bare(" ".join(words[hole])),
    }


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__.rpartition("    ")[2].strip())
    main(*sys.argv[1:])

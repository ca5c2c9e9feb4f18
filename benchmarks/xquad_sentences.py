"""Writes XQuAD's English part as sentences to search, for docs/results/generated_text.md.

Writes corpus.jsonl (each sentence is a passage), answers.jsonl, queries.jsonl, and the questions of each
split (train.jsonl, dev.jsonl, test.jsonl). From targets.jsonl a generator learns to write sentences. Its
artificial questions are an interrogative and some words of a sentence; they include sentences of the test
articles. In the folder targets, answers.jsonl and titles.jsonl have similar questions. Their targets are a
few words that the question leaves out, or the title of the article.

    python benchmarks/xquad_sentences.py XQUAD_FOLDER OUTPUT
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxir.storage.files import atomic_directory

ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(“])")
WORDS = re.compile(r"\w[\w'’-]*")
ASKED = ("Who", "What", "When", "Where", "Which", "How many", "How", "Why", "In what")
EACH = 40  # number of pairs made from a sentence
SHARE = (0.25, 0.6)  # range of the share of a sentence's longer words that a question keeps
HOLE = 3  # maximum number of words that a question asks for


def main(source: str, output: str) -> None:
    """Writes the folder and prints the numbers of its records."""
    rng, folder = random.Random(0), Path(source)
    passages = [
        {"_id": f"{d['_id']}_{n}", "title": "", "text": text}
        for d in lines_of(folder / "corpus.jsonl")
        for n, text in enumerate(ENDS.split(d["text"]))
    ]
    queries = {q["_id"]: q for q in lines_of(folder / "queries.jsonl")}
    titles = {d["_id"]: d["title"] for d in lines_of(folder / "corpus.jsonl")}
    pairs = [{"source": words_of(p["text"], rng), "target": p["text"]} for p in passages for _ in range(EACH)]
    rng.shuffle(pairs)
    answers_of = [pair for p in passages for _ in range(EACH) for pair in answered(p["text"], rng)]
    titles_of = [
        {"source": words_of(p["text"], rng), "target": titles[p["_id"].rpartition("_")[0]]}
        for p in passages
        for _ in range(EACH)
    ]
    rng.shuffle(answers_of)
    rng.shuffle(titles_of)
    with atomic_directory(output) as place:
        write(place / "corpus.jsonl", passages)
        write(place / "queries.jsonl", queries.values())
        answers = ({"_id": q["_id"], "answers": q["metadata"]["answers"]} for q in queries.values())
        write(place / "answers.jsonl", answers)
        write(place / "targets.jsonl", pairs)
        (place / "targets").mkdir()
        write(place / "targets" / "answers.jsonl", answers_of)
        write(place / "targets" / "titles.jsonl", titles_of)
        for split in ("train", "dev", "test"):
            rows = (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
            write(
                place / f"{split}.jsonl",
                [queries[q] for q in dict.fromkeys(row.split("\t")[0] for row in rows)],
            )
    print(f"{output}: {len(passages):,} sentences, {len(queries):,} questions, {len(pairs):,} targets")


def words_of(text: str, rng: random.Random) -> str:
    """Returns an artificial question about a sentence: some of its longer words, in their order."""
    words = [word for word in WORDS.findall(text) if len(word) > 3] or WORDS.findall(text)
    some = max(1, round(len(words) * rng.uniform(*SHARE)))
    kept = sorted(rng.sample(range(len(words)), some))
    return f"{rng.choice(ASKED)} {' '.join(words[i] for i in kept)}?"


def answered(text: str, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields artificial questions about some words of a sentence, and those words as answers."""
    words = text.split()
    if hole := hole_in(words, rng):
        rest = " ".join(words[: hole.start] + words[hole.stop :])
        if WORDS.search(rest):
            yield {"source": words_of(rest, rng), "target": bare(" ".join(words[hole]))}


def hole_in(words: list[str], rng: random.Random) -> slice | None:
    """Returns the place of words to ask for, with words for which `told` is true at both ends; or None."""
    size = rng.randint(1, HOLE)
    places = [n for n in range(len(words) - size + 1) if told(words[n]) and told(words[n + size - 1])]
    if not places:
        return None
    place = rng.choice(places)
    return slice(place, place + size)


def told(word: str) -> bool:
    """Returns whether a word may be asked for: a name, a number or a longer word."""
    return len(bare(word)) > 4 or any(c.isdigit() for c in word) or bare(word)[:1].isupper()


def bare(words: str) -> str:
    """Returns words without the punctuation around them."""
    return words.strip(".,;:()\"'“”")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a JSONL file, gzipped or not."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes records as JSONL."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.rpartition("    ")[2].strip())
    main(*sys.argv[1:])

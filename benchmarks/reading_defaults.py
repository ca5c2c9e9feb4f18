"""Writes data from which a reader learns to find a parameter's default in a signature.

The data are made from the folder that doc_questions.py writes. In targets.jsonl and dev_targets.jsonl, each
signature has random defaults of other functions. So the right answer must be read, not remembered:

    question: what is the default of name? context: Identity(validate_args=0.9, name=32)      ->  32

corpus.jsonl, queries.jsonl, answers.jsonl and qrels/ have the original questions for defaults, and the first
characters of passages. train.jsonl, dev.jsonl and test.jsonl have the questions of one split. No passage of a
dev or test question is trained on.

    python benchmarks/reading_defaults.py DOC_QUESTIONS OUTPUT
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xquad_sentences import lines_of, write

from jaxir.storage.files import atomic_directory

SIGNATURE = re.compile(r"^[A-Za-z_]\w*\((?P<parameters>.*?)\)(?=\s|$)")
PARAMETER = re.compile(r"(?P<name>\w+)\s*=\s*(?P<value>'[^']*'|\"[^\"]*\"|-?[\w.]+)(?=[,)\s]|$)")
LONGEST = 130  # maximum number of characters of a signature
EACH = 14  # number of targets made from a signature
DEV = 800
WITH_SUMMARY = WITH_TITLE = 0.3  # shares of the targets that have a summary or a title
PASSAGE = 200  # number of first characters of a passage that are kept


def main(source: str, output: str) -> None:
    """Writes the folder and prints the numbers of its records."""
    rng, folder = random.Random(0), Path(source)
    records = lines_of(folder / "corpus.jsonl")
    passages = {p["_id"]: p | {"text": " ".join(p["text"].split())} for p in records}
    judged = {split: pairs_of(folder, split) for split in ("train", "dev", "test")}
    held_out = {passage for split in ("dev", "test") for _, passage in judged[split]}
    targets = list(targets_of([p for i, p in passages.items() if i not in held_out], rng))
    rng.shuffle(targets)
    asked = {split: [pair for pair in judged[split] if pair[0].startswith("default:")] for split in judged}
    kept = {passage for split in ("dev", "test") for _, passage in asked[split]}
    asked["train"] = [pair for pair in asked["train"] if pair[1] not in kept]
    queries = {q["_id"]: q for q in lines_of(folder / "queries.jsonl")}
    ids = {split: list(dict.fromkeys(query for query, _ in asked[split])) for split in asked}
    wanted = {i for some in ids.values() for i in some}
    with atomic_directory(output) as place:
        for name, some in (("targets", targets[DEV:]), ("dev_targets", targets[:DEV])):
            write(place / f"{name}.jsonl", (t for t in some if t["target"].strip()))
        write(place / "corpus.jsonl", ({**p, "text": p["text"][:PASSAGE]} for p in passages.values()))
        write(place / "queries.jsonl", (queries[i] for some in ids.values() for i in some))
        write(place / "answers.jsonl", (a for a in lines_of(folder / "answers.jsonl") if a["_id"] in wanted))
        (place / "qrels").mkdir()
        for split, pairs in asked.items():
            write(place / f"{split}.jsonl", (queries[i] for i in ids[split]))
            rows = ["query-id\tcorpus-id\tscore", *(f"{query}\t{passage}\t1" for query, passage in pairs)]
            (place / "qrels" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    print(f"{output}: {len(targets):,} targets; questions: {', '.join(f'{s} {len(ids[s]):,}' for s in ids)}")


def pairs_of(folder: Path, split: str) -> list[tuple[str, str]]:
    """Returns (question id, passage id) of each relevant judgement of a split."""
    rows = (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
    return [(query, passage) for query, passage, _ in (row.split("\t") for row in rows)]


def targets_of(passages: list[Mapping[str, Any]], rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields questions about signatures with random defaults, and the right answers."""
    signatures: dict[tuple[str, str, str], None] = {}
    values: Counter[str] = Counter()
    for passage in passages:
        text = passage["text"]
        found = SIGNATURE.match(text)
        if not found or found.end() > LONGEST:
            continue
        if some := [m["value"] for m in PARAMETER.finditer(found["parameters"]) if m["value"].strip("'\"")]:
            values.update(some)
            summary = text[found.end() :].split(". ")[0][:60].strip()
            signatures[text[: found.end()], summary, passage["title"]] = None
    drawn, weights = list(values), [count**0.5 for count in values.values()]
    for _ in range(EACH):
        for signature, summary, title in signatures:
            told: list[tuple[str, str]] = []

            def another(match: re.Match[str], told: list[tuple[str, str]] = told) -> str:
                value = rng.choices(drawn, weights)[0]
                told.append((match["name"], value.strip("'\"")))
                return f"{match['name']}={value}"

            name, _, parameters = signature.partition("(")
            context = f"{name}({PARAMETER.sub(another, parameters)}"
            parameter, value = rng.choice(told)
            question = f"what is the default of {parameter}?"
            if summary and rng.random() < WITH_SUMMARY:
                question = f"{summary}: {question}"
            titled = f"title: {title} " if rng.random() < WITH_TITLE else ""
            yield {"source": f"question: {question} {titled}context: {context}", "target": value}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.rpartition("    ")[2].strip())
    main(*sys.argv[1:])

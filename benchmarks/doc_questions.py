"""Writes a BEIR folder of questions that the documentation of the installed Python packages answers.

The questions ask for a parameter's default, for the module, or for the returned type of a documented function
or class, which they describe only by its summary line. The passages are those of `jaxir.pydocs`, without
summaries. A passage's title is the name, split into words.

    python benchmarks/doc_questions.py OUTPUT
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator

from jaxir.data.formats.collection_files import write_collection
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import Document, Query
from jaxir.data.sets.package_docs import Entry, collect
from jaxir.evaluation.answer_match import tokens_of
from jaxir.storage.files import atomic_directory

# Defaults that are too common to be asked for.
COMMON = {"None", "True", "False", "0", "1", "-1", "2", ""}
RETURNS = re.compile(r"^Returns\n-{3,}\n(?:\w+ ?: ?)?(?P<type>[^\n]{3,40})\n", re.MULTILINE)
"""NumPy's section of what is returned."""


def main(output: str) -> None:
    """Writes the folder and prints how many questions of each kind there are."""
    entries = collect()
    asked = [(kind, entry, text, answer) for entry in entries for kind, text, answer in questions(entry)]
    splits = [split_of(entry.name, kind) for kind, entry, _, _ in asked]
    ids = [f"{kind}:{number}" for number, (kind, *_) in enumerate(asked)]
    with atomic_directory(output) as folder:
        write_collection(
            folder,
            documents=(passage(entry) for entry in entries),
            queries=(Query(i, text) for i, (_, _, text, _) in zip(ids, asked, strict=True)),
            qrels={
                split: [
                    Qrel(i, entry.document.id, 1)
                    for i, (_, entry, _, _), of in zip(ids, asked, splits, strict=True)
                    if of == split
                ]
                for split in ("train", "dev", "test")
            },
        )
        with (folder / "answers.jsonl").open("w") as file:
            for i, (*_, answer) in zip(ids, asked, strict=True):
                file.write(json.dumps({"_id": i, "answers": [answer]}) + "\n")
    print(f"{len(entries):,} passages")
    for (split, kind), count in sorted(Counter(zip(splits, (k for k, *_ in asked), strict=True)).items()):
        print(f"{split:6}{kind:8}{count:7,}")


def passage(entry: Entry) -> Document:
    """Returns an entry's passage. Its title is the name in words: to Lucene a dotted name is one word."""
    return entry.document._replace(title=entry.name.replace(".", " "))


def questions(entry: Entry) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, question, answer) of an entry if the passage, but not the question, has the answer."""
    summary = entry.summary.rstrip(".")
    found = [
        *(
            ("default", f"{summary}: what is the default of {name}?", value)
            for name, value in defaults(entry)
        ),
        ("module", f"{summary}: which module has it?", entry.name.rpartition(".")[0].rpartition(".")[2]),
    ]
    if told := RETURNS.search(entry.rest):
        found.append(("returns", f"{summary}: what type does it return?", told["type"].strip()))
    text_of_it = "\0".join(["", *tokens_of(passage(entry).contents), ""])
    for kind, text, answer in found:
        words = tokens_of(answer)
        if words and set(words) - set(tokens_of(text)) and "\0".join(["", *words, ""]) in text_of_it:
            yield kind, text, answer


def defaults(entry: Entry) -> Iterator[tuple[str, str]]:
    """Yields (parameter, default) of the signature for each default that is a rare text or number."""
    try:
        function = ast.parse(f"def {entry.signature.replace(', ...', '')}: pass").body[0]
    except SyntaxError:  # the signature of a class without a constructor is no valid call
        return
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    pairs = [*zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True)]
    pairs += [pair for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True) if pair[1] is not None]
    for argument, value in pairs:
        if isinstance(value, ast.Constant) and str(value.value) not in COMMON:
            yield argument.arg, str(value.value)


def split_of(name: str, kind: str) -> str:
    """Returns a question's split by a hash, which does not depend on other packages: 8 of 10 are train."""
    drawn = int.from_bytes(hashlib.sha256(f"{name} {kind}".encode()).digest()[:4], "big") % 10
    return "train" if drawn < 8 else ("dev", "test")[drawn - 8]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.rpartition("    ")[2].strip())
    main(sys.argv[1])

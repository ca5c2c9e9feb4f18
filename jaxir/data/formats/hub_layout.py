"""Finds corpus, queries and judgements among the files of a data set of the Hugging Face hub.

A data set has configurations, and each configuration has splits, which are files. The README's metadata name
them; without metadata, a folder is a configuration, and a file's name begins with its split.
"""

from __future__ import annotations

import collections
import fnmatch
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxir.core.errors import UserError, suggest

README = "README.md"
_DATA = re.compile(
    r"(?P<split>.+?)(?:-\d{5}-of-(?P<parts>\d{5}))?(?:-[0-9a-f]{16})?\.(?:parquet|jsonl|tsv)(?:\.gz)?"
)
Splits = dict[str, list[str]]  # files by the name of the split


class Chosen(NamedTuple):
    """The files of one collection; `style` is how their rows are read.

    Attributes:
      style: "beir" (columns _id, title, text; query-id, corpus-id, score) or "bright".
      corpus: files of documents.
      queries: files of queries.
      qrels: files of judgements, by the name of the split. In BRIGHT's style the queries hold them.
    """

    style: str
    corpus: list[str]
    queries: list[str]
    qrels: Splits

    @property
    def files(self) -> list[str]:
        return [*self.corpus, *self.queries, *(file for files in self.qrels.values() for file in files)]


def configurations(files: Sequence[str], metadata: dict[str, Any]) -> dict[str, Splits]:
    """Returns {configuration: {split: files}} of a data set's files and its README's metadata."""
    found: dict[str, Splits] = collections.defaultdict(lambda: collections.defaultdict(list))
    for config in metadata.get("configs") or []:
        data = config.get("data_files") or []
        entries = data if isinstance(data, list) else [data]
        for entry in entries:
            entry = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
            patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            named = [f for f in sorted(files) if any(fnmatch.fnmatchcase(f, p) for p in patterns)]
            found[config["config_name"]][entry.get("split", "train")] += [f for f in named if _parts_of(f)]
    known = {file for splits in found.values() for of_split in splits.values() for file in of_split}
    for file in sorted(set(files) - known):
        *folders, name = file.split("/")
        if (match := _DATA.fullmatch(name)) is None or len(folders) > 1:
            continue
        if not folders and match["split"] in ("corpus", "queries"):
            found[match["split"]][match["split"]].append(file)
        else:
            config = folders[0] if folders and folders[0] != "data" else "default"
            if config not in {c["config_name"] for c in metadata.get("configs") or []}:
                found[config][match["split"]].append(file)
    return {
        name: {s: f for s, f in splits.items() if f} for name, splits in found.items() if any(splits.values())
    }


def choose(where: str, known: dict[str, Splits], subset: str | None) -> Chosen:
    """Returns the files of a collection.

    Args:
      where: the data set's name, for errors.
      known: what `configurations` returned.
      subset: the part of the data set: a prefix of configurations ("de" of de-corpus), a split of the corpus
        (NanoBEIR's NanoMSMARCO), or a domain of BRIGHT, perhaps followed by -long; None: the whole data set.
    """
    if {"documents", "examples"} <= known.keys():
        return _bright(where, known, subset)
    names = {"corpus": "corpus", "queries": "queries", "qrels": "qrels"}
    if subset is not None and f"{subset}-corpus" in known:
        names = {role: f"{subset}-{name}" for role, name in names.items()}
        names["qrels"] = names["qrels"] if names["qrels"] in known else subset
        subset = None
    elif "queries" not in known and "query" in known:
        names["queries"] = "query"
    if names["qrels"] not in known and "default" in known:
        names["qrels"] = "default"
    missing = [role for role in ("corpus", "queries") if names[role] not in known]
    subsets = sorted({name.removesuffix("-corpus") for name in known if name.endswith("-corpus")})
    if missing and subsets:
        raise UserError(_which(where, subset, subsets))
    if missing:
        raise UserError(
            f"hf:{where} has no {' and no '.join(missing)} in a layout of BEIR, MTEB, NanoBEIR or BRIGHT (it"
            f" has {', '.join(sorted(known)) or 'no tables'}): give a data set of documents and queries"
        )
    corpus, queries, qrels = (known.get(names[role], {}) for role in ("corpus", "queries", "qrels"))
    if subset is None and len(corpus) == 1:
        return Chosen("beir", _all(corpus), _all(queries), qrels)
    if subset not in corpus:
        raise UserError(_which(where, subset, sorted(corpus)))
    return Chosen("beir", corpus[subset], queries[subset], {"test": qrels[subset]})


def _bright(where: str, known: dict[str, Splits], subset: str | None) -> Chosen:
    long = known.get("long_documents", {})
    subsets = [*known["documents"], *(f"{domain}-long" for domain in long)]
    if subset not in subsets:
        raise UserError(_which(where, subset, subsets))
    domain = subset.removesuffix("-long")
    documents = known["documents"] if subset == domain else long
    style = "bright" if subset == domain else "bright-long"
    return Chosen(style, documents[domain], known["examples"][domain], {"test": []})


def check_complete(where: str, chosen: Chosen) -> None:
    """Raises a UserError if a table lacks one of its parts, as in an interrupted download."""
    for file in chosen.files:
        if (parts := _parts_of(file)) > 1:
            others = [f for f in chosen.files if f.partition("-0")[0] == file.partition("-0")[0]]
            if len(others) < parts:
                raise UserError(f"{where}: {len(others)} of the {parts} parts of {file} are there: copy all")


def _parts_of(file: str) -> int:
    """Returns the number of files that the file's table is split into; 0 if the file is not a table."""
    match = _DATA.fullmatch(file.rpartition("/")[2])
    return int(match["parts"] or 1) if match else 0


def _all(splits: Splits) -> list[str]:
    return [file for files in splits.values() for file in files]


def _which(where: str, subset: str | None, subsets: Sequence[str]) -> str:
    if subset is None:
        return f"hf:{where} has several collections: name one, such as hf:{where}/{subsets[0]}"
    listed = ", ".join(subsets[:20]) + (", ..." if len(subsets) > 20 else "")
    return f"hf:{where} has no part {subset!r} (has: {listed or 'none'}){suggest(subset, subsets)}"

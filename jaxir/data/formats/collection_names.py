"""The ways to name a collection: a BEIR folder, hf:NAME of the Hugging Face hub, or ir_datasets:ID."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.core.installation import cache_directory
from jaxir.data.formats.collection_files import Counts, write_collection
from jaxir.data.formats.hub_collections import StoredCollection, open_hub_collection
from jaxir.data.formats.ir_collections import open_ir_collection
from jaxir.data.formats.lines import OnBadInput
from jaxir.storage import fingerprints
from jaxir.storage.files import atomic_directory, local_path

FORMAT = 1  # version of the BEIR folders in the cache
# Kinds of names whose collections are written as BEIR folders, and the functions that open them.
MADE: dict[str, Callable[[str, OnBadInput], StoredCollection]] = {
    "hf": open_hub_collection,
    "ir_datasets": open_ir_collection,
}
FORMS = {"beir": "DIR", "hf": "NAME", "ir_datasets": "ID"}


def made_kind(name: str) -> str | None:
    """Returns the kind of a collection's name, such as "hf" for hf:NAME; None for a directory."""
    kind, colon, rest = name.partition(":")
    if colon and kind in MADE and not rest:
        raise UserError(f"{name!r} names no data set: write {kind}:{FORMS[kind]}")
    return kind if colon and kind in MADE else None


def folder_of(name: str | Path) -> Path:
    """Returns the BEIR folder of a collection: DIR, beir:DIR, hf:NAME or ir_datasets:ID.

    A collection of another kind is written as a BEIR folder into the user's cache when it is first read. It
    is written again if its files, the hub's commit, or ir_datasets' queries and judgements have changed.
    """
    kind = made_kind(str(name))
    if kind is None:
        return local_path(str(name).removeprefix("beir:"))
    opened, collector = _open(str(name))
    key = fingerprints.of_values(FORMAT, str(name), *map(str, opened.identity))[:16]
    slug = re.sub(r"[^\w.-]+", "-", str(name))[-60:].strip("-")
    folder = cache_directory() / "collections" / f"{slug}-{key}"
    if folder.is_dir():
        return folder
    try:
        with atomic_directory(folder) as temporary:
            counts = _written(opened, temporary, None)
    except UserError:
        if not folder.is_dir():  # if the folder exists by now, another process has written it
            raise
        return folder
    collector.report()
    judged = ", ".join(f"{count:,} judgements ({split})" for split, count in counts.qrels.items())
    print(
        f"{name}: {counts.documents:,} documents, {counts.queries:,} queries, {judged}; kept in {folder}",
        file=sys.stderr,
    )
    return folder


def write_folder(name: str, folder: Path, splits: list[str] | None, on_bad_input: OnBadInput) -> Counts:
    """Writes a collection hf:NAME or ir_datasets:ID as a BEIR folder into an existing empty folder."""
    kind, _, rest = name.partition(":")
    return _written(MADE[kind](rest, on_bad_input), folder, splits)


def _open(name: str) -> tuple[StoredCollection, OnBadInput]:
    kind, _, rest = name.partition(":")
    collector = OnBadInput()
    return MADE[kind](rest, collector), collector


def _written(opened: StoredCollection, folder: Path, splits: list[str] | None) -> Counts:
    if unknown := sorted(set(splits or []) - opened.qrels.keys()):
        raise UserError(f"there is no split {unknown[0]!r} (has: {', '.join(opened.qrels)})")
    qrels = {split: read() for split, read in opened.qrels.items() if splits is None or split in splits}
    excluded = opened.excluded()
    documents, queries = opened.documents(), opened.queries()
    return write_collection(folder, documents=documents, queries=queries, qrels=qrels, excluded=excluded)

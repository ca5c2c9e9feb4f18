"""Hashes of what an experiment reads, so that no table mixes results from before and after a change."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.core.installation import RECIPES, find_recipe, included_in
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.interop.model.stored_run import CONFIG, checkpoint_of
from jaxir.storage.open_files import open_to_read

# Files that mark the directory of a model: jaxir's, Hugging Face's, sentence-transformers'.
MODEL_FILES = (CONFIG, "config.json", "modules.json")


def of_file(path: str | Path) -> str:
    """Returns a hash of a file's content, or of the names and sizes of all files in a folder."""
    path = Path(path)
    if path.is_dir():
        found = sorted((str(p.relative_to(path)), p.stat().st_size) for p in path.rglob("*") if p.is_file())
        return _hash("\n".join(f"{name} {size}" for name, size in found).encode("utf-8", "surrogateescape"))
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def of_collection(folder: BeirFolder, *splits: str) -> str:
    """Returns a hash of the sizes of corpus and queries, and of the judgements of existing splits."""
    sizes = [str(path.stat().st_size) for path in (folder.corpus_path, folder.queries_path)]
    there = [split for split in dict.fromkeys(splits) if split in folder.splits]
    return _hash("\n".join([*sizes, *(of_file(folder.qrels_path(split)) for split in there)]).encode())


def check_split(folder: BeirFolder, split: str) -> None:
    """Raises a UserError if a split has too few queries with judgements to compare systems."""
    queries = {qrel.query_id for qrel in folder.qrels(split)}
    if len(queries) < 2:
        raise UserError(
            f"{folder.qrels_path(split)}: {len(queries)} queries have judgements, but paired tests"
            " of systems need at least two; give another split"
        )


def of_training_splits(folder: BeirFolder, name: str, bindings: Iterable[str]) -> dict[str, str]:
    """Returns hashes of the judgements that runs train on and choose checkpoints by, if they exist."""
    given = _values(bindings)
    splits = {given.get("TRAIN_SPLIT", "train"), given.get("DEV_SPLIT", "dev")}
    there = sorted(splits & set(folder.splits))
    return {f"split {split} of {name}": of_file(folder.qrels_path(split)) for split in there}


def of_gin_files(files: Iterable[str | Path]) -> dict[str, str]:
    """Returns hashes of gin files that are not shipped with jaxir, and of the files that they include.

    Comments are ignored; files that macros of the gin files name are included (see `of_named`).
    """
    own: dict[str, str] = {}
    left = list(files)
    for file in left:  # the list grows during the loop
        path = find_recipe(file)
        if path is None or str(file) in own or path.resolve().is_relative_to((RECIPES / "gin").resolve()):
            continue
        content = path.read_bytes()
        lines = (line.strip() for line in content.splitlines())
        own[str(file)] = _hash(b"\n".join(line for line in lines if line and line[:1] != b"#"))
        text = content.decode(errors="replace")
        macros = re.findall(r"""^(\w+ *= *(['"]).+\2) *$""", text, re.M)
        own |= {f"{name} of {file}": found for name, found in of_named(m for m, _ in macros).items()}
        left += included_in(text)
    return own


def of_named(bindings: Iterable[str]) -> dict[str, str]:
    """Returns hashes of the local files and models that gin bindings name, by macro."""
    found = {macro: of_model(value) for macro, value in _values(bindings).items()}
    return {macro: content for macro, content in found.items() if content is not None}


def _values(bindings: Iterable[str]) -> dict[str, str]:
    """Returns {NAME: VALUE} of bindings, without quotes; the last value of a name is used."""
    pairs = (binding.partition("=")[::2] for binding in bindings)
    return {macro.strip(): value.strip(" '\"") for macro, value in pairs}


def of_model(spec: str) -> str | None:
    """Returns a hash of a local model's or file's content; None if it does not exist or is not a model."""
    scheme = re.match(r"(hf|st|w2v|t5x):", spec)
    path = Path(spec[scheme.end() :] if scheme else spec)
    try:
        if path.is_file():
            return _of_files((path,))
        if not path.is_dir() or not (scheme or any((path / name).is_file() for name in MODEL_FILES)):
            return None
    except OSError:  # raised if the path is too long, so it is no model
        return None
    checkpoint = checkpoint_of(path)  # a run is identified by its checkpoint's record, which has checksums
    return _of_files(_of_folder(path) if checkpoint is None else (path / CONFIG, checkpoint / "run/metadata"))


def _of_folder(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.suffix != ".md":
            yield path


def _of_files(paths: Iterable[Path]) -> str:
    state = tuple((str(p), s.st_size, s.st_mtime_ns, s.st_ino) for p in paths for s in [p.stat()])
    return _of_unchanged(state)


@functools.cache  # cached, because cells of a grid share a model
def _of_unchanged(state: tuple[tuple[str, int, int, int], ...]) -> str:
    return _hash("\n".join(f"{Path(path).name} {of_file(path)}" for path, *_ in state).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

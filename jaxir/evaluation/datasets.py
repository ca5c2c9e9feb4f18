"""Parsing of a dataset's name in commands: KIND:DIR, or DIR alone for a BEIR folder."""

from __future__ import annotations

from pathlib import Path

from jaxir.core.errors import UserError, suggest
from jaxir.storage.files import local_path


def parse_dataset(spec: str, *kinds: str, what: str = "--dataset") -> tuple[str, Path]:
    """Returns the kind, one of `kinds`, and the directory; `what` is the setting's name in messages."""
    if "beir" in kinds and Path(spec).is_dir():
        return "beir", Path(spec)
    local_path(spec.removeprefix("beir:"))
    kind, colon, directory = spec.partition(":")
    if not colon or kind not in kinds or not directory:
        missing = "" if colon else ", which is not a directory"
        expected = " or ".join(f"{known}:DIR" for known in kinds)
        raise UserError(f"{what} must be {expected}, not {spec!r}{suggest(kind, kinds) or missing}")
    return kind, local_path(directory)

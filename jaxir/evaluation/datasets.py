"""Parses the name of a dataset given on the command line: KIND:DIR, or only DIR for a BEIR folder."""

from __future__ import annotations

from pathlib import Path

from jaxir.core.errors import UserError, suggest
from jaxir.storage.files import local_path


def parse_dataset(spec: str, *kinds: str, what: str = "--dataset") -> tuple[str, Path]:
    """Returns the dataset's kind, one of `kinds`, and directory; `what` is the flag's name in errors."""
    if "beir" in kinds and Path(spec).is_dir():
        return "beir", Path(spec)
    local_path(spec.removeprefix("beir:"))
    kind, colon, directory = spec.partition(":")
    if not colon or kind not in kinds or not directory:
        missing = "" if colon else ", which is not a directory"
        expected = " or ".join(f"{known}:DIR" for known in kinds)
        raise UserError(f"{what} must be {expected}, not {spec!r}{suggest(kind, kinds) or missing}")
    return kind, local_path(directory)

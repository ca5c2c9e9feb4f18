"""Parses the name of a dataset given on the command line: KIND:NAME, or only DIR for a BEIR folder."""

from __future__ import annotations

from pathlib import Path

from jaxir.core.errors import UserError, suggest
from jaxir.data.formats.collection_names import FORMS, folder_of, made_kind
from jaxir.storage.files import local_path


def parse_dataset(spec: str, *kinds: str, what: str = "--dataset") -> tuple[str, Path]:
    """Returns the dataset's kind, one of `kinds`, and directory; `what` is the flag's name in errors.

    Where beir:DIR is allowed, so are hf:NAME and ir_datasets:ID, which become BEIR folders.
    """
    if "beir" in kinds and made_kind(spec) is not None:
        return "beir", folder_of(spec)
    if "beir" in kinds and Path(spec).is_dir():
        return "beir", Path(spec)
    local_path(spec.removeprefix("beir:"))
    kind, colon, directory = spec.partition(":")
    if not colon or kind not in kinds or not directory:
        missing = "" if colon else ", which is not a directory"
        forms = dict.fromkeys(kinds, "DIR") | (FORMS if "beir" in kinds else {})
        expected = " or ".join(f"{known}:{form}" for known, form in forms.items())
        raise UserError(f"{what} must be {expected}, not {spec!r}{suggest(kind, forms) or missing}")
    return kind, local_path(directory)

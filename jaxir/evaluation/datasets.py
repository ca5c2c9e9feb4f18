"""How commands name a test collection: KIND:DIR."""

from __future__ import annotations

from pathlib import Path

from jaxir.errors import UserError, suggest


def parse_dataset(spec: str, *kinds: str) -> tuple[str, Path]:
    """Returns the kind and the directory of `KIND:DIR`.

    Args:
      spec: what the user wrote.
      *kinds: the kinds that are meant.

    Raises:
      UserError: another kind, or no directory.
    """
    kind, colon, directory = spec.partition(":")
    if not colon or kind not in kinds or not directory:
        expected = " or ".join(f"{known}:DIR" for known in kinds)
        raise UserError(f"--dataset must be {expected}, not {spec!r}{suggest(kind, kinds)}")
    return kind, Path(directory)

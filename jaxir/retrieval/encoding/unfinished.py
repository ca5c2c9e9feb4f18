"""The directory `.NAME.unfinished` beside an output, in which its parts lie until all are there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError, changed
from jaxir.storage.files import atomic_file, remove_tree
from jaxir.storage.json_files import read_json

MADE = "made.json"  # all that the parts depend on


def unfinished_of(output: Path) -> Path:
    """Returns the directory of an output, which need not be there."""
    return output.with_name(f".{output.name}.unfinished")


def take_up(
    output: Path, made: Mapping[str, Any], parts: str, *, called: Mapping[str, str] | None = None
) -> None:
    """Makes the directory, or checks that what was begun in it was made of the same.

    Args:
      made: all that its parts depend on, as JSON can hold it.
      parts: a pattern of the parts that are there. Without any nothing is lost by beginning anew.
      called: what messages call the names of `made`, where that differs.

    Raises:
      UserError: it was made of something else.
    """
    unfinished = unfinished_of(output)
    if (unfinished / MADE).exists():
        before = read_json(unfinished / MADE, dict[str, Any])
        differing = next((name for name, value in made.items() if before.get(name) != value), None)
        if differing is None:
            return
        if any(unfinished.glob(parts)):
            how = changed((called or {}).get(differing, differing), before.get(differing), made[differing])
            raise UserError(
                f"{output} was begun with {how}: give the same to finish it, or remove {unfinished}"
            )
    for left in unfinished.glob(parts):  # of a run that was killed while it tidied up
        remove_tree(left) if left.is_dir() else left.unlink()
    with atomic_file(unfinished / MADE) as file:
        file.write(json.dumps(made, ensure_ascii=False) + "\n")

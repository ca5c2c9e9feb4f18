"""The directory `.NAME.unfinished` beside an output NAME, which holds its parts until all are complete."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError, changed
from jaxir.storage.files import atomic_file, remove_tree
from jaxir.storage.json_files import json_line, read_json

MADE = "made.json"  # all inputs and settings that the parts depend on


def unfinished_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.unfinished")


def start_or_resume(
    output: Path, made: Mapping[str, Any], parts: str, *, called: Mapping[str, str] | None = None
) -> None:
    """Makes the directory, or checks that its parts (a glob pattern) were made with the settings `made`."""
    unfinished = unfinished_of(output)
    if (unfinished / MADE).exists():
        before = read_json(unfinished / MADE, dict[str, Any])
        differing = next((name for name, value in made.items() if before.get(name) != value), None)
        if differing is None:
            return
        if any(unfinished.glob(parts)):
            how = changed((called or {}).get(differing, differing), before.get(differing), made[differing])
            raise UserError(
                f"{output} was started with {how}: give the same value to finish it, or remove {unfinished}"
            )
    for left in unfinished.glob(parts):  # left by a run that was killed while it removed the directory
        remove_tree(left) if left.is_dir() else left.unlink()
    with atomic_file(unfinished / MADE) as file:
        file.write(json_line(made))

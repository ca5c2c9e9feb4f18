"""What the files of a Lucene index are: who opened it knows by it whether it is still the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def state_of(index: str | Path) -> list[Any] | None:
    """Returns the inode of an index's directory, and the name, size and time of each file in it.

    None where there is no Lucene index.
    """
    path = Path(index)
    try:
        inode = path.stat().st_ino
        found = sorted((file.name, file.stat()) for file in path.iterdir())
    except OSError:
        return None
    if not any(name.startswith("segments_") for name, _ in found):
        return None
    return [inode, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]]

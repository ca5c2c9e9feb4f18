"""Progress bars for long work: rate and time left on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(
    items: Iterable[T] | None = None,
    *,
    total: int | None = None,
    what: str,
    unit: str = "it",
    initial: int = 0,
    hidden: bool = False,
) -> tqdm:
    """Wraps `items` (or counts by `.update(n)`) in a bar on standard error named `what`, unless `hidden`."""
    return tqdm(
        items,
        total=total,
        desc=what,
        unit=f" {unit}",
        unit_scale=total is not None and total >= 10_000,
        initial=initial,
        disable=True if hidden else None,
        dynamic_ncols=True,
    )

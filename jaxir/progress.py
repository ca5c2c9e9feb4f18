"""Progress of long work: a bar with rate and time left on a terminal, elsewhere a line a minute."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
EVERY = 60.0  # seconds between lines; what is done sooner prints none
_KNOWN = "{desc}: {n_fmt} of {total_fmt}{unit}, {elapsed} so far, about {remaining} left"
_ENDLESS = "{desc}: {n_fmt}{unit}, {elapsed} so far"


def progress(
    items: Iterable[T] | None = None,
    *,
    total: int | None = None,
    what: str,
    unit: str = "it",
    initial: int = 0,
    hidden: bool = False,
    lines: bool = True,
) -> tqdm:
    """Wraps `items` (or counts by `.update(n)`) and shows on standard error how far `what` is.

    Args:
      items: what to go through; None where the caller counts.
      total: how many there are.
      what: what is done, such as "encode".
      unit: what is counted.
      initial: how many are done already.
      hidden: whether to show nothing.
      lines: whether to print lines where standard error is no terminal (not: the caller prints its own).
    """
    # Of bars within a bar, window after window, only the outer one stays when it is done.
    how: dict[str, object] = {"dynamic_ncols": True, "leave": None}
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if lines and not terminal:
        known = total is not None or hasattr(items, "__len__")
        how = {"file": _Lines(), "delay": EVERY, "mininterval": EVERY, "maxinterval": EVERY, "ncols": 200}
        how["bar_format"] = _KNOWN if known else _ENDLESS
    return tqdm(
        items,
        total=total,
        desc=what,
        unit=f" {unit}",
        unit_scale=terminal and total is not None and total >= 10_000,
        initial=initial,
        disable=hidden or not (terminal or lines),
        **how,
    )


class _Lines(io.TextIOBase):
    """Prints what tqdm writes over and over into one line as lines on standard error."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)

"""Shows the progress of long work: as a bar on a terminal, elsewhere as a line each minute."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
EVERY = 60.0  # seconds between two progress lines, and before the first line
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
    """Wraps `items`, or counts by `.update(n)`, and shows the progress on standard error.

    Args:
      items: what to iterate over; None if the caller counts.
      total: the number of items.
      what: the work, such as "encode".
      unit: the unit of the items, such as "texts".
      initial: items that are already done.
      hidden: show nothing.
      lines: print lines if standard error is not a terminal; otherwise nothing.
    """
    # leave=None: a bar within another one disappears when it is done.
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


@contextlib.contextmanager
def outliving_reader() -> Iterator[None]:
    """Discards standard error once its reader has ended (`tee` after Ctrl-C, or a closed terminal).

    The work whose progress is printed continues.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        drop(2)


def drop(descriptor: int) -> None:
    """Discards what is written to `descriptor` from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discards what C++ libraries write to standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    drop(2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class _Lines(io.TextIOBase):
    """Prints each state of a tqdm bar as a line on standard error."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)

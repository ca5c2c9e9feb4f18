"""Progress of long work: a bar with rate and time left on a terminal, elsewhere a line a minute."""

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


@contextlib.contextmanager
def outliving_reader() -> Iterator[None]:
    """Has standard error go nowhere from then on if its reader has gone: `tee` at Ctrl-C, or a terminal.

    For what is told of work that is worth more than the telling.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        drop(2)


def drop(descriptor: int) -> None:
    """Has what is written to `descriptor` from then on go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class _Lines(io.TextIOBase):
    """Prints what tqdm writes over and over into one line as lines on standard error."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)

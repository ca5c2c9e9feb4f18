"""Reading the docstrings of many files in several processes: one builds syntax trees on one processor."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.data.sets.docstrings import Entry, entries

FEWEST = 500  # files for which it is worth while: one process reads 200 a second
MOST = 16  # processes
_CHILD = "from jaxir.data.sets import docstring_workers; docstring_workers.work()"


def read(files: Sequence[tuple[str, Path]]) -> Iterator[list[Entry]]:
    """Yields the entries of each (module's dotted name, file), in their order.

    Raises:
      UserError: a process that reads was killed.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(available, MOST)
    if count == 1 or len(files) < FEWEST:
        for module, path in files:
            yield entries(module, path)
        return
    with contextlib.ExitStack() as started:
        workers = []
        for number in range(count):
            with tempfile.TemporaryFile() as share:
                pickle.dump(files[number::count], share)
                share.seek(0)
                command = [sys.executable, "-c", _CHILD]
                worker = started.enter_context(
                    subprocess.Popen(command, stdin=share, stdout=subprocess.PIPE, process_group=0)
                )
            started.callback(worker.kill)
            workers.append(worker)
        for number in range(len(files)):
            worker = workers[number % count]
            try:
                yield pickle.load(worker.stdout)
            except EOFError:
                raise UserError(f"a process that read docstrings ended with status {worker.wait()}") from None


def work() -> None:
    """Reads what `read` writes to standard input and writes the entries of each file to standard output.

    It ends with the process that started it, at the next file; a terminal's Ctrl-C reaches that one alone.
    """
    files = pickle.load(sys.stdin.buffer)
    gc.disable()  # syntax trees have no cycles, and looking for some takes a fifth of the time
    try:
        for module, path in files:
            pickle.dump(entries(module, path), sys.stdout.buffer)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # nobody reads; Python would complain that it cannot flush

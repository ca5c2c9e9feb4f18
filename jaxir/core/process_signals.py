"""Signals and streams of a command's process: SIGTERM and a closed terminal unwind its stack."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any

from jaxir.core.errors import Terminated
from jaxir.core.progress import drop

AGAIN_SECONDS = 0.05  # until a signal that Python has dropped comes again


def open_streams() -> None:
    """Opens the standard streams that are closed: a file would get their numbers, and what libraries say."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _is_unheard(number: signal.Signals) -> bool:
    """Whether a signal would end the process, and a handler can be set here."""
    return (
        threading.current_thread() is threading.main_thread() and signal.getsignal(number) == signal.SIG_DFL
    )


@contextlib.contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Has SIGTERM raise `Terminated` where it would end the process at once; a second one does that.

    What is raised within a callback of the garbage collector, or while an object is finalized, Python drops:
    there this signal, or Ctrl-C, comes again a moment later.
    """
    owner, usual = os.getpid(), sys.unraisablehook

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != owner:  # a library's fork, which has nothing to put in order
            os.kill(os.getpid(), signal.SIGTERM)
        raise Terminated

    def come_again(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Terminated | KeyboardInterrupt):
            usual(dropped)
            return
        number = signal.SIGINT
        if isinstance(dropped.exc_value, Terminated):
            number = signal.SIGTERM
            signal.signal(number, stop)
        timer = threading.Timer(AGAIN_SECONDS, os.kill, [owner, number])
        timer.daemon = True
        timer.start()

    if not _is_unheard(signal.SIGTERM):
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    sys.unraisablehook = come_again
    try:
        yield
    finally:
        sys.unraisablehook = usual
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def hearing_terminals_end() -> Iterator[None]:
    """Takes SIGHUP, which comes when a terminal or its ssh connection has gone, as SIGTERM.

    Where it is ignored (`nohup`), it stays so. What is written to the terminal from then on goes nowhere.
    """

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the kernel and the shell both send it
        for descriptor in (1, 2):
            try:
                termios.tcgetattr(descriptor)
            except termios.error as error:
                if error.args[0] == errno.EIO:
                    drop(descriptor)
        os.kill(os.getpid(), signal.SIGTERM)

    if not _is_unheard(signal.SIGHUP):
        yield
        return
    signal.signal(signal.SIGHUP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

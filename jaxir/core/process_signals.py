"""Makes SIGTERM and a closed terminal raise an exception, so that a command cleans up before it ends."""

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

AGAIN_SECONDS = 0.05  # delay before a signal is sent again, if Python dropped its exception


def _is_unheard(number: signal.Signals) -> bool:
    """Whether a signal still has its default handler, and this thread may set another one."""
    return (
        threading.current_thread() is threading.main_thread() and signal.getsignal(number) == signal.SIG_DFL
    )


@contextlib.contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise `Terminated`; a second one ends the process at once.

    Python drops exceptions that are raised within finalizers and callbacks of the garbage collector. If this
    happens to the exception of SIGTERM or Ctrl-C, the signal is sent again a moment later.
    """
    owner, usual = os.getpid(), sys.unraisablehook

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != owner:  # a library's forked process, which has nothing to clean up
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
    """Treats SIGHUP, which a closing terminal or ssh connection sends, as SIGTERM.

    If SIGHUP is ignored (`nohup`), it stays ignored. Later output to the terminal is discarded.
    """

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # kernel and shell both send it: ignore the second
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

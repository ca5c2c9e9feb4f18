"""One sentence for a user instead of a library's tracebacks."""

import contextlib
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from printing the tracebacks of errors that are reported in one sentence.

    It logs them, lets them end its threads, and abandons coroutines that raise when they are collected.
    """
    if not isinstance(sys.unraisablehook, _WithoutLateAnswers):
        sys.unraisablehook = _WithoutLateAnswers(sys.unraisablehook)

    def logged(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    def ended_thread(details: threading.ExceptHookArgs) -> None:
        if not type(details.thread).__module__.startswith("orbax."):
            thread_hook(details)

    def collected(details: Any) -> None:
        code = getattr(details.object, "cr_code", None)
        abandoned = code is not None and "orbax" in Path(code.co_filename).parts
        if not abandoned:
            collection_hook(details)

    thread_hook, collection_hook = threading.excepthook, sys.unraisablehook
    logger = logging.getLogger("absl")
    logger.addFilter(logged)
    threading.excepthook, sys.unraisablehook = ended_thread, collected
    try:
        yield
    finally:
        gc.collect()
        threading.excepthook, sys.unraisablehook = thread_hook, collection_hook
        logger.removeFilter(logged)


class _WithoutLateAnswers:
    """A hook without the answers to reads that Orbax has given up; it stays for the life of the process.

    Where one array of a checkpoint is broken, Orbax closes its event loop while TensorStore is still reading
    others. Their answers come when they will: after the run, if it ends for it.
    """

    def __init__(self, hook: Callable[[Any], None]):
        self.hook = hook

    def __call__(self, details: Any) -> None:
        error = details.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.hook(details)

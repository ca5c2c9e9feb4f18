"""One sentence for a user instead of a library's tracebacks."""

import contextlib
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from printing the tracebacks of errors that are reported in one sentence.

    It logs them, lets them end its threads, and abandons coroutines that raise when they are collected.
    """

    def logged(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    def ended_thread(details: threading.ExceptHookArgs) -> None:
        if not type(details.thread).__module__.startswith("orbax."):
            thread_hook(details)

    def collected(details: Any) -> None:
        code = getattr(details.object, "cr_code", None)
        abandoned = code is not None and "orbax" in Path(code.co_filename).parts
        if (
            not abandoned and str(details.exc_value) != "Event loop is closed"
        ):  # TensorStore's answer comes late
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

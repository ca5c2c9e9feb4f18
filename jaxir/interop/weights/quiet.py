"""Keeps Orbax from printing tracebacks."""

import contextlib
import gc
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxir.core.errors import causes


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from printing the tracebacks of errors that jaxir reports in one sentence.

    Orbax logs errors, lets them end its threads, and abandons coroutines and tasks, which print warnings when
    they are garbage-collected. An error that leaves this block holds no references to them.
    """
    if not isinstance(sys.unraisablehook, _WithoutLateReads):
        sys.unraisablehook = _WithoutLateReads(sys.unraisablehook)

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

    def retrieved(record: logging.LogRecord) -> bool:
        return record.getMessage().partition("\n")[0] != "Task exception was never retrieved"

    filters = {"absl": logged, "asyncio": retrieved}
    for name, filter in filters.items():
        logging.getLogger(name).addFilter(filter)
    threading.excepthook, sys.unraisablehook = ended_thread, collected
    try:
        yield
    except BaseException as error:
        _clear_frames(error)
        raise
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            gc.collect()
        threading.excepthook, sys.unraisablehook = thread_hook, collection_hook
        for name, filter in filters.items():
            logging.getLogger(name).removeFilter(filter)


def _clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames of an error and its causes."""
    for cause in causes(error, implicit=True):
        traceback.clear_frames(cause.__traceback__)


class _WithoutLateReads:
    """An unraisable hook, kept until the process ends, that ignores results of reads that Orbax abandoned.

    If one array of a checkpoint is broken, Orbax closes its event loop while TensorStore still reads others.
    Their results may arrive at any time until the process ends.
    """

    def __init__(self, hook: Callable[[Any], None]):
        self.hook = hook

    def __call__(self, details: Any) -> None:
        error = details.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.hook(details)

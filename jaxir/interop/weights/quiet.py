"""One sentence for a user instead of a library's tracebacks."""

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


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from printing the tracebacks of errors that are reported in one sentence.

    It logs them, lets them end its threads, and abandons coroutines and tasks that complain when they are
    collected. An error that leaves the block holds none of them any more.
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

    def retrieved(record: logging.LogRecord) -> bool:
        return record.getMessage().partition("\n")[0] != "Task exception was never retrieved"

    filters = {"absl": logged, "asyncio": retrieved}
    for name, filter in filters.items():
        logging.getLogger(name).addFilter(filter)
    threading.excepthook, sys.unraisablehook = ended_thread, collected
    try:
        yield
    except BaseException as error:
        _forget_frames(error)
        raise
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            gc.collect()
        threading.excepthook, sys.unraisablehook = thread_hook, collection_hook
        for name, filter in filters.items():
            logging.getLogger(name).removeFilter(filter)


def _forget_frames(error: BaseException | None) -> None:
    """Lets go of what the functions that an error and its causes have left knew."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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

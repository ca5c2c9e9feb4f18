"""Prepares the next batches on a thread, so that tokenising and copying overlap with the device's work."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

AHEAD = 2  # number of batches prepared before they are requested


@contextlib.contextmanager
def prefetch(batches: Iterator[Any], place: Callable[[Any], Any]) -> Iterator[Iterator[Any]]:
    """Yields an iterator over `place(batch)`, computed on a thread, which also raises the thread's errors."""
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=AHEAD)
    stopped = threading.Event()

    def put(batch: Any, error: BaseException | None = None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((batch, error), timeout=0.1)
                return

    def work() -> None:
        try:
            for batch in batches:
                put(place(batch))
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    def read() -> Iterator[Any]:
        while True:
            batch, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield batch

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield read()
    finally:
        stopped.set()
        thread.join(timeout=10)

"""Handles SIGTERM and Ctrl-C during training: the run ends after the current step."""

import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxir.core.progress import outliving_reader


class StopSignal:
    """A context that records SIGTERM and SIGINT; a second SIGINT raises KeyboardInterrupt at once.

    Several processes must all stop after the same step. JAX's preemption service, which handles SIGTERM
    itself, then chooses this step. `saves` is whether the caller saves a checkpoint when training ends early.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, *, saves: bool = True):
        self._then = " and saves a checkpoint" if saves else ""
        self.received: signal.Signals | None = None
        self._usual: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            self._usual = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM
        return self.received is not None

    def _note(self, number: int, frame: object) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        with outliving_reader():
            # `print` must not be called here, because the signal may have interrupted another `print`.
            os.write(2, f"\n{self.received.name}: training ends after this step{self._then}\n".encode())

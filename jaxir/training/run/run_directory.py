"""The directory of a run, on a disk or in a bucket.

RUN/run.json        marks the directory as a run, and names the run
RUN/checkpoints/    the newest checkpoints and the best (see `checkpoints`)
RUN/log.jsonl       metrics, also for TensorBoard in RUN/tensorboard/
RUN/jaxir.json      with RUN/tokenizer/, describes the run as a model
RUN/config.gin      all settings, to repeat the run; RUN/recipe.py for a recipe in Python
RUN/COMPLETE        written after the last step, or after early stopping
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxir.interop import model_dir
from jaxir.interop.model_dir import LoadedModel
from jaxir.storage.files import atomic_file, is_bucket, path_of
from jaxir.storage.leases import Lease
from jaxir.storage.locks import Lock, locked
from jaxir.training.run.checkpoints import Checkpoints, Resumed
from jaxir.training.run.logs import RunLog
from jaxir.training.run.marker import check_run_dir
from jaxir.training.step.train_state import TrainState

COMPLETE = "COMPLETE"


class RunDirectory:
    """The directory of one run, locked by this process until the context ends.

    If the context ends before `begin` is called, what `open` made on a disk is removed again. `open` sets the
    attribute `checkpoints`.
    """

    def __init__(self, path: str | Path):
        self.path = path_of(path)
        self.checkpoints: Checkpoints
        self._begun = False
        self._hold: Lock | Lease | None = None  # held only by process 0

    def __enter__(self) -> RunDirectory:
        with contextlib.ExitStack() as closing:
            if jax.process_index() == 0:
                refusal = f"another process trains in {self.path}: wait for it, or give another output_dir"
                hold = Lease(self.path, "trains in") if is_bucket(self.path) else locked(self.path, refusal)
                self._hold = closing.enter_context(hold)
            check_run_dir(self.path)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._closing.close()

    def open(self, settings: Mapping[str, Any], abstract: TrainState, **which: Any) -> Resumed | None:
        """Returns the newest intact checkpoint, None for a new run; takes the arguments of `Checkpoints`."""
        self.checkpoints = Checkpoints(self.path, settings, hold=self._hold, **which)
        self._closing.callback(self.checkpoints.close)
        self._closing.callback(lambda: None if self._begun else self.checkpoints.withdraw())
        return self.checkpoints.open(abstract)

    def begin(self, loaded: LoadedModel, on_start: Callable[[Path], None]) -> None:
        """Writes the files that make the run a model, and calls `on_start` with the directory."""
        self._begun = True
        if jax.process_index() != 0:
            return
        if loaded.tokenizer is not None:
            model_dir.write_description(
                self.path, loaded.model.config, loaded.tokenizer, loaded.settings, base=loaded.base
            )
        on_start(self.path)

    def log(self, start_step: int, trackers: Sequence[str], settings: Mapping[str, Any]) -> RunLog:
        """Opens the logs of a run that starts after `start_step`; the end of the context closes the logs.

        `settings` are for the trackers.
        """
        run = {"run": self.checkpoints.run, "trackers": trackers, "settings": settings}
        log = RunLog(self.path, start_step=start_step, hold=self._hold, **run)
        self._closing.callback(log.close)
        return log

    def mark_complete(self, how: str | None) -> None:
        """Writes `how` the run ended to RUN/COMPLETE, unless the file says so; None removes the file."""
        path = self.path / COMPLETE
        if jax.process_index() != 0:
            return
        if how is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_text() != f"{how}\n":
            with atomic_file(path) as file:
                file.write(f"{how}\n")

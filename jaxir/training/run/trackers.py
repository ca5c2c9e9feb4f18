"""Weights & Biases and trackio, which also get a run's metrics.

A tracker has one row of metrics per step. It finds the run by the name in RUN/run.json, so a resumed run
continues there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxir.core.installation import require

PROJECT = "jaxir"
UPLOAD_SECONDS = 60  # maximum time that the end of a run waits for W&B; by default wandb waits forever
MOST_LISTED = 20  # maximum length of a list of settings; longer lists are data


def check_trackers(names: Sequence[str] | None) -> None:
    """Raises a UserError, only in process 0, if the package of a tracker is not installed."""
    if jax.process_index() == 0:
        for name in names or ():
            require(name, name)


class Tracker(NamedTuple):
    """A run in a tracker: its first missing step, and functions that log (row, step) and end it."""

    first_step: int
    log: Callable[[Mapping[str, float], int], None]
    finish: Callable[[], None]


class Trackers:
    """The trackers of one run. A tracker that fails is not used further; the training goes on.

    Args:
      names: "wandb" or "trackio".
      run_dir: the run's directory, whose name is shown.
      run: the run's name in run.json.
      settings: the run's settings, as `plain` returns them.
    """

    def __init__(self, names: Sequence[str], *, run_dir: Path, run: str, settings: Mapping[str, Any]):
        self._step, self._row = 0, {}
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._surviving(name):
                self._open[name] = _STARTS[name](run_dir.name, run, settings)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds values to the row of a step; the row is sent by `send`, or once a later step has values."""
        if step != self._step:
            self.send()
        self._step = step
        self._row |= values

    def send(self) -> None:
        """Sends the current row, which must be complete."""
        row, self._row = self._row, {}
        for name, tracker in list(self._open.items()) if row else ():
            # A run that resumes after a kill repeats steps that the tracker already has.
            if self._step >= tracker.first_step:
                with self._surviving(name):
                    tracker.log(row, self._step)

    def close(self) -> None:
        """Ends the runs in the trackers.

        After an error the current row may lack its evaluation, so it is not sent: a resumed run would skip
        a step that the tracker already has.
        """
        if sys.exc_info()[0] is None:
            self.send()
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                tracker.finish()

    @contextlib.contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Closes the tracker `name` with a warning if the context raises an error."""
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for the command's result
                yield
        except Exception as error:  # any error of a library or of the network
            self._open.pop(name, None)
            why = str(error) or type(error).__name__
            print(
                f"warning: {name} failed ({why}) and gets no more metrics of this run; log.jsonl has all",
                file=sys.stderr,
            )


def _start_wandb(shown: str, run: str, settings: Mapping[str, Any]) -> Tracker:
    import wandb

    started = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run,
        name=shown,
        resume="allow",
        config=dict(settings),
        # With "create_new", wandb does not touch a run that the caller of `fit` has open.
        settings=wandb.Settings(console="off", finish_timeout=UPLOAD_SECONDS, reinit="create_new"),
    )

    # wandb's own step only counts rows: `wandb sync` renumbers the rows of an offline run that was resumed.
    started.define_metric("step", hidden=True)
    started.define_metric("*", step_metric="step")

    def finish() -> None:
        started.finish(exit_code=int(sys.exc_info()[0] is not None))

    last = started.summary.get("step", -1)
    return Tracker(int(last) + 1, lambda row, step: started.log({**row, "step": step}), finish)


def _start_trackio(shown: str, run: str, settings: Mapping[str, Any]) -> Tracker:
    import trackio

    # trackio finds a run by its shown name.
    started = trackio.init(
        project=PROJECT, name=f"{shown}-{run}", resume="allow", config=dict(settings), embed=False
    )
    return Tracker(started._next_step, lambda row, step: started.log(dict(row), step=step), trackio.finish)


_STARTS = {"wandb": _start_wandb, "trackio": _start_trackio}


def plain(value: Any) -> Any:
    """Returns settings as JSON values: dataclasses and partial functions as dicts, other objects as names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, functools.partial):
        return {"function": plain(value.func)} | plain(value.keywords)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value] if len(value) <= MOST_LISTED else f"{len(value):,} values"
    if dataclasses.is_dataclass(value):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__} | fields
    return getattr(value, "__name__", type(value).__name__)

"""Checkpoints of a run over Orbax: asynchronous, atomic, the last few and the best by a dev metric.

RUN/checkpoints/STEP holds `params`, `opt_state`, `run` (step, settings that must agree, dev metric,
name of the run, checksums) and, where the objective has something beside the model, `auxiliary` and
`statistics`; RUN/checkpoints/best.json names the best step; RUN/run.json marks the directory (`marker`).
A checkpoint appears by a rename once whole, and goes by one (in a bucket, which knows no rename, by the mark
that Orbax puts into it), and is removed only when a later one is whole. One is set aside only if it is known
to be damaged: what may pass (no memory, a bucket out of reach) ends the run and changes nothing.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxir.core.errors import UserError
from jaxir.interop.model.run_dir import COMMITTED, Damaged, checkpoint_steps, read_record, sealed
from jaxir.interop.weights.quiet import quiet_orbax
from jaxir.interop.weights.stores import ORBAX_INDEX
from jaxir.runtime.distributed import all_agree, of_all, wait_for_all
from jaxir.storage.files import atomic_file, is_bucket, move_tree, path_of, remove_tree
from jaxir.storage.leases import Lease
from jaxir.storage.locks import Lock
from jaxir.training.run.damage import is_damage, place_for_broken, reason
from jaxir.training.run.marker import MARKER, begin, go_on
from jaxir.training.run.run_settings import disagreement
from jaxir.training.step.train_state import TrainState, inspect

_LEAST_PART = 1 << 20  # bytes of an array that a device writes of those that all have
REMOVED = ".removed"


class Resumed(NamedTuple):
    """A state read back.

    Attributes:
      state: the state, laid out as asked.
      step: its number of finished steps.
      run: the name of the run; None of runs of earlier versions.
    """

    state: TrainState
    step: int
    run: str | None


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
      run: the name of the run, once it is open.

    Args:
      run_dir: the run's directory; new, empty, or a run to resume.
      settings: what must agree between the parts of a run (batch size, seed, data fingerprint, ...); JSON
        values.
      keep_last: how many of the newest checkpoints to keep; the best one is kept besides.
      metric: the dev metric that tells the best checkpoint; None for none.
      greater_is_better: whether its greatest value is the best, or its smallest.
      hold: on the directory; None in other processes than the first.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: Mapping[str, Any],
        *,
        keep_last: int,
        metric: str | None,
        greater_is_better: bool = True,
        hold: Lock | Lease | None = None,
    ):
        self.run_dir, self.settings = path_of(run_dir), dict(settings)
        self.directory = self.run_dir / "checkpoints"
        self._keep_last, self._metric, self._hold = keep_last, metric, hold
        self._sign = 1.0 if greater_is_better else -1.0
        self._inspect: Callable[[TrainState], tuple[jax.Array, jax.Array]]
        self._saving: int | None = None
        self._values: dict[int, float] = {}
        self.run = ""
        self._manager: ocp.CheckpointManager | None = None
        self._new = False
        self._quiet = contextlib.ExitStack()

    def open(self, abstract: TrainState) -> Resumed | None:
        """Returns the newest whole checkpoint, or None for a run that starts from its first step.

        A damaged checkpoint is reported on standard error and moved to RUN/broken.

        Raises:
          UserError: there are checkpoints but none is whole, the newest has other settings, or one could not
            be read for a reason that may pass.
        """
        wait_for_all("the run's directory is checked")  # before it changes
        self._quiet.enter_context(quiet_orbax())
        self._inspect = jax.jit(inspect).lower(abstract).compile()
        # Given processes, Orbax's threads wait for each other by the coordination service. Else they would
        # run collectives on the devices, in the midst of those of a training step.
        several = jax.process_count() > 1
        processes = set(range(jax.process_count())) if several else None
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._tidy()
        wait_for_all("the directory of checkpoints is there")
        # Of an array that several devices have each would write a part, which a program cuts: for what
        # is small, making the program takes far longer than writing.
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_PART)
        ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)
        self._manager = ocp.CheckpointManager(
            self.directory if is_bucket(self.directory) else self.directory.resolve(),
            options=ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=True,
                multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=processes),
            ),
        )
        broken: dict[int, str] = {}
        resumed = None
        for step in reversed(self.steps()):
            try:
                if resumed is None:
                    resumed = self._restore(step, abstract)
                value = read_record(self.directory / str(step))["dev_value"]
                if value is not None:
                    self._values[step] = value
            except Exception as error:
                if not is_damage(error):
                    raise self._unread(step, error) from error
                broken[step] = reason(error)
        if broken and resumed is None:
            newest = max(broken)
            raise UserError(
                f"no checkpoint of {self.run_dir} is whole (step {newest}: {broken[newest]}); "
                "give another output_dir to start anew"
            )
        for step, why in broken.items():
            self._set_aside(step, why, needed=step > resumed.step)
        wait_for_all("broken checkpoints are set aside")
        self._manager.reload()
        if jax.process_index() == 0:
            if resumed is None:
                self._new = not (self.run_dir / MARKER).exists()
                self.run = begin(self.run_dir, self.settings)
            else:
                self.run = go_on(self.run_dir, resumed.run, self.settings)
                self._write_best()
        return resumed

    def check_begun(self, state: TrainState) -> None:
        """Raises a UserError where the state before the first step is another one in another process."""
        if jax.process_count() == 1:
            return
        _, sums = jax.device_get(self._inspect(state))
        if len(set(of_all(json.dumps(_whole_numbers(sums))))) > 1:
            raise UserError(
                "the processes begin with other parameters: give all of them the same model, and what else"
                " they start from"
            )

    def withdraw(self) -> None:
        """Removes what `open` has made, where the run ends before its first step; in a bucket it stays."""
        if self._new and not is_bucket(self.directory):
            with contextlib.suppress(OSError):  # there is something else by now
                (self.run_dir / MARKER).unlink()
                self.directory.rmdir()

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints there are, oldest first."""
        return checkpoint_steps(self.directory)

    def is_best(self, value: float | None) -> bool:
        """Returns whether a value of the dev metric, if there is one, beats those of all checkpoints kept."""
        return value is not None and all(self._sign * value > self._sign * v for v in self._values.values())

    def best(self) -> tuple[int, float] | None:
        """Returns the best checkpoint's step and its dev metric, or None where nothing was evaluated."""
        if not self._values:
            return None
        step = max(self._values, key=lambda s: (self._sign * self._values[s], -s))
        return step, self._values[step]

    def save(self, step: int, state: TrainState, dev_value: float | None) -> None:
        """Begins to save `state`; returns once its arrays are copied and may be donated.

        The checkpoint before must be settled.

        Raises:
          UserError: the state holds a number that is not finite, it could not be written, or the directory
            is not held any more.
        """
        self._check_held()
        finite, sums = jax.device_get(self._inspect(state))
        if not finite:
            raise UserError(
                f"step {step}: a parameter or a moment of the optimizer is not finite; {self.last_good()}"
            )
        record = {
            "step": step,
            "dev_metric": self._metric,
            "dev_value": dev_value,
            "run": self.run,
            "checksums": _whole_numbers(sums),
            "settings": self.settings,
        }
        self._saving = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()},
                    run=ocp.args.JsonSave(sealed(record)),
                ),
                force=True,
            )
        except Exception as error:
            self._fail(error)
        if dev_value is not None:
            self._values[step] = dev_value

    def poll(self) -> int | None:
        """Settles the checkpoint in writing if it is whole by now; returns its step, else None.

        With several processes it is settled when the next one is saved: they would not all see it whole
        after the same step, and they must settle it together.
        """
        if self._saving is None or jax.process_count() > 1 or self._manager.is_saving_in_progress():
            return None
        return self.settle()

    def settle(self) -> int | None:
        """Waits for the checkpoint in writing, names the best and removes the old; returns its step or None.

        Raises:
          UserError: it could not be written (a full disk, say), or the directory is not held any more. The
            earlier checkpoints stay.
        """
        if self._saving is None:
            return None
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            self._fail(error)
        step, self._saving = self._saving, None
        self._check_held()
        wait_for_all(f"checkpoint {step} is whole")
        there = self.steps()
        self._values = {s: value for s, value in self._values.items() if s in there}
        self._write_best()
        best = self.best()
        wait_for_all(f"the checkpoints at {step} are listed")
        for old in sorted({*there} - {*there[-self._keep_last :], *([best[0]] if best else [])}):
            if jax.process_index() == 0:
                self._remove(old)
            self._values.pop(old, None)
        wait_for_all(f"the checkpoints before {step} are removed")
        self._manager.reload()
        return step if step in there else None

    def close(self) -> None:
        """Settles what can be settled and lets go of Orbax's threads."""
        if self._manager is not None:
            if jax.process_count() == 1:  # a process that fails must not wait for the others
                with contextlib.suppress(UserError):
                    self.settle()
            self._manager.close()
            self._quiet.close()

    def last_good(self) -> str:
        """Says where the last whole checkpoint is."""
        steps = [s for s in self.steps() if s != self._saving]
        return (
            f"the last good checkpoint is {self.directory / str(steps[-1])}"
            if steps
            else "none was saved yet"
        )

    def _restore(self, step: int, abstract: TrainState) -> Resumed:
        item, failure = {}, None
        try:
            record = read_record(self.directory / str(step))
            if wrong := disagreement(record["settings"], self.settings):
                raise UserError(f"{self.run_dir} {wrong}")
            self._check_files(step, _items(abstract))
            item = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardRestore(tree) for name, tree in _items(abstract).items()}
                ),
            )
        except Exception as error:
            failure = error
        if not all_agree(failure is None):
            # What one process could not read for a reason that may pass is damaged to none of them.
            if all_agree(failure is None or is_damage(failure)):
                raise failure or Damaged("another process finds it damaged")
            raise failure or UserError(f"another process could not read checkpoint {step}")
        count = jax.make_array_from_callback((), abstract.step.sharding, lambda _: np.int32(step))
        state = abstract._replace(step=count, **{name: item[name] for name in _items(abstract)})
        finite, sums = jax.device_get(self._inspect(state))
        # Checkpoints had one checksum of all once; it is not compared any more.
        if not finite or record.get("checksums", sums) != _whole_numbers(sums):
            raise Damaged("its checksums do not match its content")
        return Resumed(state, step, record.get("run"))

    def _check_files(self, step: int, items: Iterable[str]) -> None:
        """Raises a Damaged where Orbax would miss an index that is gone by way of what it finds instead."""
        for item in items:
            path = self.directory / str(step) / item / ORBAX_INDEX
            if not path.is_file():
                raise Damaged(f"{path}: no such file")

    def _unread(self, step: int, error: Exception) -> UserError:
        """Says what to do about a checkpoint that could not be read, and may be whole."""
        if isinstance(error, UserError):
            return error
        path = self.directory / str(step)
        return UserError(
            f"{path} could not be read ({reason(error)}); nothing was changed: run the same command again,"
            " or, if that does not help, move it away to go on from an earlier one"
        )

    def _check_held(self) -> None:
        if self._hold is not None:
            self._hold.check()

    def _write_best(self) -> None:
        best, path = self.best(), self.directory / "best.json"
        if jax.process_index() != 0:
            return
        if best is None:
            path.unlink(missing_ok=True)
            return
        text = json.dumps({"step": best[0], "metric": self._metric, "value": best[1]})
        if not path.exists() or path.read_bytes() != text.encode():
            with atomic_file(path) as file:
                file.write(text)

    def _tidy(self) -> None:
        """Removes what a killed process had not written, or not removed, to the end.

        Orbax would do the first, but in a bucket a directory goes with its last object; then it fails.
        """
        if is_bucket(self.directory) and self.directory.exists():
            half = [p for p in self.directory.iterdir() if p.is_dir() and not (p / COMMITTED).exists()]
        else:
            half = list(self.directory.glob(f".*{REMOVED}"))
        for path in half:
            remove_tree(path)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint, so that it is whole or gone at any moment; what fails is tried again."""
        path = self.directory / str(step)
        with contextlib.suppress(Exception):  # of gcsfs, the system
            if is_bucket(path):
                (path / COMMITTED).unlink(missing_ok=True)
            else:
                path = path.rename(path.with_name(f".{step}{REMOVED}"))
            remove_tree(path)

    def _set_aside(self, step: int, why: str, *, needed: bool) -> None:
        target = place_for_broken(self.run_dir, str(step))
        if jax.process_index() == 0:
            then = ", an earlier one is used" if needed else ""
            print(f"warning: checkpoint {step} is broken ({why}); moved to {target}{then}", file=sys.stderr)
            move_tree(self.directory / str(step), target)

    def _fail(self, error: Exception) -> None:
        """Turns what Orbax raised into one sentence and removes what it had written of the checkpoint."""
        step, good = self._saving, self.last_good()
        self._saving = None
        self._values.pop(step, None)
        if jax.process_index() == 0 and not is_bucket(self.directory):  # there the next start does it
            for part in self.directory.glob(f"{step}.*tmp*"):
                shutil.rmtree(part, ignore_errors=True)
        self._check_held()  # reports the cause if the directory itself has gone
        raise UserError(f"checkpoint {step} could not be saved ({reason(error)}); {good}") from error


def _items(state: TrainState) -> dict[str, Any]:
    """Returns what of a state is saved as arrays, by its name in a checkpoint."""
    items = {name: tree for name, tree in state._asdict().items() if name != "step"}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree) or name == "opt_state"}


def _whole_numbers(sums: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    return {item: {name: int(x) for name, x in named.items()} for item, named in sums.items()}

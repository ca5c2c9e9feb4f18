"""Checkpoints of a run, written by Orbax in the background: the newest few, and the best by a dev metric.

RUN/checkpoints/STEP holds `params`, `opt_state`, the record `run` (step, settings, dev metric, evaluations
since the best, name, checksums) and, if the objective has auxiliary parameters, `auxiliary` and `statistics`.
RUN/checkpoints/best.json names the best step.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxir.core.errors import UserError
from jaxir.interop.model.stored_run import COMMITTED, Damaged, checkpoint_steps, read_record, sealed
from jaxir.interop.weights.quiet import quiet_orbax
from jaxir.interop.weights.stores import ORBAX_INDEX
from jaxir.runtime.distributed import all_agree, wait_for_all
from jaxir.storage.files import atomic_file, is_bucket, move_tree, path_of, remove_tree
from jaxir.storage.leases import Lease
from jaxir.storage.locks import Lock
from jaxir.training.run.damage import is_damage, reason
from jaxir.training.run.marker import MARKER, mark
from jaxir.training.run.run_settings import disagreement
from jaxir.training.step.train_state import TrainState, inspect

# Size in bytes. Smaller replicated arrays are written by only one device, because splitting them is slow.
_LEAST_PART = 1 << 20
REMOVED = ".removed"


class Resumed(NamedTuple):
    """A checkpoint that was read: the state, its number of finished steps, and the run's name if recorded."""

    state: TrainState
    step: int
    run: str | None


class Checkpoints:
    """The checkpoints of one run.

    Args:
      run_dir: the run's directory: new, empty, or a run to resume.
      settings: JSON values that must equal those in the checkpoints if the run is resumed.
      keep_last: number of newest checkpoints to keep; the best checkpoint is kept, too.
      metric: the dev metric that chooses the best checkpoint; None if nothing is evaluated.
      greater_is_better: whether the greatest value of the metric is the best.
      hold: the lock or lease on the directory; None except in process 0.
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
        self._saving: int | None = None  # step of the checkpoint that is being written
        self._values: dict[int, float] = {}  # dev metric by step
        self.evaluations_since_best = 0  # number of evaluations in a row without a better dev metric
        self.run = ""  # the run's name, set by `open`
        self._manager: ocp.CheckpointManager | None = None
        self._new = False
        self._quiet = contextlib.ExitStack()

    def open(self, abstract: TrainState) -> Resumed | None:
        """Returns the newest intact checkpoint, or None; moves damaged checkpoints to RUN/broken."""
        wait_for_all("the run's directory is checked")  # before process 0 changes the directory
        self._quiet.enter_context(quiet_orbax())
        self._inspect = jax.jit(inspect).lower(abstract).compile()
        first = jax.process_index() == 0
        if first:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
        wait_for_all("the directory of checkpoints is there")
        self._manager = _manager(self.directory)
        resumed, broken = self._newest_whole(abstract)
        if first:
            for step, why in broken.items():
                self._set_aside(step, why, earlier_used=step > resumed.step)
        wait_for_all("broken checkpoints are set aside")
        self._manager.reload()
        if first:
            self._new = not (self.run_dir / MARKER).exists()
            self.run = mark(self.run_dir, self.settings, resumed and resumed.run)
            if resumed:
                self._write_best()
        return resumed

    def _newest_whole(self, abstract: TrainState) -> tuple[Resumed | None, dict[int, str]]:
        """Returns the newest intact checkpoint, and {step: what is wrong} of damaged checkpoints."""
        resumed, broken = None, {}
        for step in reversed(self.steps()):
            try:
                if resumed is None:
                    resumed = self._restore(step, abstract)
                value = read_record(self.directory / str(step))["dev_value"]
                if value is not None:
                    self._values[step] = value
            except Exception as error:
                if is_damage(error):
                    broken[step] = reason(error)
                    continue
                if isinstance(error, UserError):
                    raise
                raise UserError(
                    f"{self.directory / str(step)} could not be read ({reason(error)}); nothing was changed:"
                    " run the same command again, or, if that does not help, move this checkpoint away to"
                    " resume from an earlier one"
                ) from error
        if broken and resumed is None:
            newest = max(broken)
            raise UserError(
                f"no checkpoint of {self.run_dir} is intact (step {newest}: {broken[newest]}); copy the run"
                " again, or give another output_dir to start a new run"
            )
        return resumed, broken

    def withdraw(self) -> None:
        """Removes what `open` made on a disk; called if the run ends before its first step."""
        if self._new and not is_bucket(self.directory):
            with contextlib.suppress(OSError):  # the directory is no longer empty
                (self.run_dir / MARKER).unlink()
                self.directory.rmdir()

    def steps(self) -> list[int]:
        """Returns the steps of the existing checkpoints, oldest first."""
        return checkpoint_steps(self.directory)

    def is_best(self, value: float | None) -> bool:
        """Returns whether a dev metric (None: not measured) is better than those of all kept checkpoints."""
        return value is not None and all(self._sign * value > self._sign * v for v in self._values.values())

    def count(self, value: float | None) -> bool:
        """Updates `evaluations_since_best` by a new dev metric; returns what `is_best` returns."""
        best = self.is_best(value)
        if value is not None:
            self.evaluations_since_best = 0 if best else self.evaluations_since_best + 1
        return best

    def best(self) -> tuple[int, float] | None:
        """Returns the best checkpoint's step and dev metric, or None if nothing was evaluated."""
        if not self._values:
            return None
        step = max(self._values, key=lambda s: (self._sign * self._values[s], -s))
        return step, self._values[step]

    def save(self, step: int, state: TrainState, dev_value: float | None) -> None:
        """Starts to save `state` in the background; returns once its arrays are copied and may be donated.

        `settle` must be called before the next `save`. Raises a UserError if `state` is not finite.
        """
        self._check_held()
        finite, sums = jax.device_get(self._inspect(state))
        if not finite:
            raise UserError(
                f"step {step}: a parameter or a moment of the optimizer is not finite: lower the learning"
                f" rate; {self.last_good()}"
            )
        record = {
            "step": step,
            "dev_metric": self._metric,
            "dev_value": dev_value,
            "evaluations_since_best": self.evaluations_since_best,
            "run": self.run,
            "checksums": _whole_numbers(sums),
            "settings": self.settings,
        }
        self._saving = step
        items = {name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()}
        try:
            args = ocp.args.Composite(**items, run=ocp.args.JsonSave(sealed(record)))
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            self._fail(error)
        if dev_value is not None:
            self._values[step] = dev_value

    def poll(self) -> int | None:
        """Calls `settle` if the checkpoint being written is complete; returns its step, else None.

        With several processes, always returns None: they must call `settle` together, but may see the
        checkpoint complete after different steps. They call it before they save the next checkpoint.
        """
        if self._saving is None or jax.process_count() > 1 or self._manager.is_saving_in_progress():
            return None
        return self.settle()

    def settle(self) -> int | None:
        """Waits for the checkpoint being written, updates best.json, removes old ones; returns its step."""
        if self._saving is None:
            return None
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            self._fail(error)
        step, self._saving = self._saving, None
        self._check_held()
        wait_for_all(f"checkpoint {step} is complete")
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
        return step

    def close(self) -> None:
        """Waits for the checkpoint being written, if this is the only process, and ends Orbax's threads."""
        if self._manager is not None:
            if jax.process_count() == 1:  # a process that fails must not wait for the others
                with contextlib.suppress(UserError):
                    self.settle()
            self._manager.close()
            self._quiet.close()

    def last_good(self) -> str:
        """Returns a phrase for error messages that names the last complete checkpoint."""
        steps = [s for s in self.steps() if s != self._saving]
        if not steps:
            return "no checkpoint was saved yet"
        return f"the last good checkpoint is {self.directory / str(steps[-1])}"

    def _restore(self, step: int, abstract: TrainState) -> Resumed:
        path, failure, restored = self.directory / str(step), None, {}
        try:
            record = read_record(path)
            if wrong := disagreement(record["settings"], self.settings):
                raise UserError(f"{self.run_dir} {wrong}")
            for item in _items(abstract):  # without an index, Orbax would read the item in another format
                if not (path / item / ORBAX_INDEX).is_file():
                    raise Damaged(f"{path / item / ORBAX_INDEX}: no such file")
            items = {name: ocp.args.StandardRestore(tree) for name, tree in _items(abstract).items()}
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            failure = error
        if not all_agree(failure is None):
            # If any process failed for a transient reason, the checkpoint is unreadable, not damaged.
            damaged = all_agree(failure is None or is_damage(failure))
            other = (
                Damaged("another process found it damaged")
                if damaged
                else UserError(f"{path} could not be read by another process: see its error")
            )
            raise failure or other
        count = jax.make_array_from_callback((), abstract.step.sharding, lambda _: np.int32(step))
        state = abstract._replace(step=count, **{name: restored[name] for name in _items(abstract)})
        finite, sums = jax.device_get(self._inspect(state))
        # Earlier versions of jaxir recorded one checksum under another name, which is not compared.
        if not finite or record.get("checksums", sums) != _whole_numbers(sums):
            raise Damaged("its checksums do not match its content")
        # Earlier versions did not record this number.
        self.evaluations_since_best = record.get("evaluations_since_best", 0)
        return Resumed(state, step, record.get("run"))

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

    def _remove_leftovers(self) -> None:
        """Removes checkpoints that a killed process had not completely written or removed.

        Orbax also removes half-written checkpoints, but fails in a bucket, where a directory disappears with
        its last file.
        """
        if is_bucket(self.directory) and self.directory.exists():
            half = [p for p in self.directory.iterdir() if p.is_dir() and not (p / COMMITTED).exists()]
        else:
            half = list(self.directory.glob(f".*{REMOVED}"))
        for path in half:
            remove_tree(path)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint atomically: it is complete or gone. The next `settle` retries a failure."""
        path = self.directory / str(step)
        with contextlib.suppress(Exception):  # any error of gcsfs or of the operating system
            if is_bucket(path):
                (path / COMMITTED).unlink(missing_ok=True)
            else:
                path = path.rename(path.with_name(f".{step}{REMOVED}"))
            remove_tree(path)

    def _set_aside(self, step: int, why: str, *, earlier_used: bool) -> None:
        target, number = self.run_dir / "broken" / str(step), itertools.count(2)
        while target.exists():
            target = target.with_name(f"{step}-{next(number)}")
        then = "; an earlier checkpoint is used" if earlier_used else ""
        print(f"warning: checkpoint {step} is damaged ({why}): moved to {target}{then}", file=sys.stderr)
        move_tree(self.directory / str(step), target)

    def _fail(self, error: Exception) -> None:
        """Removes the half-written checkpoint, and raises Orbax's error as a UserError of one sentence."""
        step, good = self._saving, self.last_good()
        self._saving = None
        self._values.pop(step, None)
        # In a bucket, the next start of the run removes the half-written checkpoint.
        if jax.process_index() == 0 and not is_bucket(self.directory):
            for part in self.directory.glob(f"{step}.*tmp*"):
                remove_tree(part)
        self._check_held()  # if the run's directory was removed, this raises an error that says so
        raise UserError(
            f"checkpoint {step} could not be saved ({reason(error)}); {good}; remove the cause and run the"
            " same command again"
        ) from error


def _manager(directory: Path) -> ocp.CheckpointManager:
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_PART)
    ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)
    # With `active_processes`, Orbax's threads wait for each other through JAX's coordination service.
    # Otherwise the threads would run collectives on the devices, between a training step's collectives.
    processes = set(range(jax.process_count())) if jax.process_count() > 1 else None
    return ocp.CheckpointManager(
        directory if is_bucket(directory) else directory.resolve(),
        options=ocp.CheckpointManagerOptions(
            create=False,
            cleanup_tmp_directories=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=processes),
        ),
    )


def _items(state: TrainState) -> dict[str, Any]:
    """Returns the trees of arrays in a checkpoint, by name."""
    items = {name: tree for name, tree in state._asdict().items() if name != "step"}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree) or name == "opt_state"}


def _whole_numbers(sums: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    return {item: {name: int(x) for name, x in named.items()} for item, named in sums.items()}

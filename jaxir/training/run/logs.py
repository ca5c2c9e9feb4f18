"""RUN/log.jsonl, TensorBoard, trackers, and progress on standard error.

Objects in a bucket cannot be appended to. There, logs are written to a temporary directory and copied at each
checkpoint and at the end.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxir.core.errors import UserError
from jaxir.core.progress import outliving_reader, progress
from jaxir.storage.files import atomic_file, is_bucket, path_of
from jaxir.storage.leases import Lease
from jaxir.storage.locks import Lock
from jaxir.storage.temporary_outputs import temporary_directory
from jaxir.training.run.trackers import Trackers

LOG, BOARD = "log.jsonl", "tensorboard"
MOST_SHOWN = 5  # maximum number of the objective's metrics per printed line; log.jsonl has all
# Metrics not printed by `_formatted`: the line already has them or their sum, or a warning reports them.
NOT_SHOWN = {
    "loss",
    "grad_norm",
    "learning_rate",
    "rows_without_negatives",
    "loss_query_to_passage",
    "loss_passage_to_query",
}


class RunLog:
    """The log of one run, written by process 0 only.

    Args:
      run_dir: the run's directory.
      start_step: the step that the run resumes from; lines about later steps are dropped.
      run: the run's name, written with the first line after each start of the run.
      hold: the lock or lease on the directory.
      trackers: names of trackers, which also get the metrics.
      settings: the run's settings, for the trackers.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        start_step: int,
        run: str,
        hold: Lock | Lease | None = None,
        trackers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ):
        self._file, self._board, self._hold = None, None, hold
        self._name = {"run": run}
        self._closing = contextlib.ExitStack()
        if jax.process_index() != 0:
            return
        from tensorboardX import SummaryWriter  # imports Google's storage client, where that is installed

        self._run_dir = self._place = path_of(run_dir)
        if is_bucket(run_dir):
            self._place = self._closing.enter_context(temporary_directory())
            if (self._run_dir / LOG).exists():
                (self._place / LOG).write_bytes((self._run_dir / LOG).read_bytes())
        if (self._place / LOG).exists():
            kept = lines_until((self._place / LOG).read_bytes(), start_step)
            with atomic_file(self._place / LOG) as file:
                file.writelines(kept)
        self._file = (self._place / LOG).open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(self._place / BOARD), purge_step=start_step + 1, filename_suffix=f".{start_step}"
        )
        self._trackers = Trackers(trackers, run_dir=self._run_dir, run=run, settings=settings or {})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line {"step", values..., "time"}, and each value to TensorBoard and the trackers."""
        if self._file is None:
            return
        line = {"step": step, **{k: float(v) for k, v in values.items()}, "time": round(time.time(), 3)}
        self._write_line(line)
        named = {name if "/" in name else f"train/{name}": float(value) for name, value in values.items()}
        for name, value in named.items():
            self._board.add_scalar(name, value, step)
        self._trackers.write(step, named)

    def checkpoint(self, step: int | None) -> None:
        """Writes a line that says that the checkpoint of `step` is complete; None writes nothing."""
        if self._file is not None and step is not None:
            self._write_line({"step": step, "checkpoint": True, "time": round(time.time(), 3)})
            self.bring()

    def bring(self) -> None:
        """Sends metrics to the trackers, and copies the logs to the run's directory, if it is in a bucket.

        Called before a checkpoint is saved, since a run that resumes from it only has the logs in the bucket.
        """
        if self._file is not None:
            self._board.flush()
            self._trackers.send()
            self._copy()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()
            self._copy()
            self._trackers.close()
            self._closing.close()

    def _copy(self) -> None:
        """Copies the logs to the run's bucket; a failure is only a warning."""
        if self._place == self._run_dir:
            return
        try:
            if self._hold is not None:
                self._hold.check()
            for path in [self._place / LOG, *(self._place / BOARD).iterdir()]:
                with atomic_file(self._run_dir / path.relative_to(self._place), "wb") as file:
                    file.write(path.read_bytes())
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)

    def _write_line(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({**line, **self._name}) + "\n")
        self._file.flush()
        self._name = {}


def lines_until(log: bytes, step: int) -> list[str]:
    """Returns the readable lines of a log about `step` and earlier ones; later steps will be done again."""
    kept = []
    for line in log.splitlines():
        with contextlib.suppress(ValueError):  # a killed process may have written half a line
            text = line.decode()
            record = json.loads(text)
            if isinstance(record, dict) and record.get("step", step + 1) <= step:
                kept.append(text + "\n")
    return kept


class Narrator:
    """Shows progress: one line for each logged step and, on a terminal, a bar below them.

    `evaluations_from` maps a step to the number of evaluations due at that step and later ones.
    """

    def __init__(
        self,
        *,
        steps: int,
        start_step: int,
        batch_size: int,
        evaluations_from: Callable[[int], int] = lambda _: 0,
    ):
        self._steps, self._batch_size, self._evaluations_from = steps, batch_size, evaluations_from
        self._evaluations: list[float] = []  # seconds that each evaluation took
        self._start = self._shown = self._lap_step = start_step
        self._mark = self._first_done = time.perf_counter()  # moved forward by the time spent in `paused`
        first = jax.process_index() == 0
        self._bar = (
            progress(total=steps, what="train", unit="step", initial=start_step, lines=False)
            if first
            else tqdm(total=steps, initial=start_step, disable=True)
        )

    def step(self, step: int, loss: float) -> None:
        """Moves the bar to `step` finished steps; after the second, prints how long the rest will take."""
        self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self._bar.update(step - self._shown)
        self._shown = step
        now = time.perf_counter()
        if step == self._start + 1:
            self._first_done = now
        elif step == self._start + 2:
            seconds, left = now - self._first_done, self._steps - step
            if left:
                each = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
                rest = f"{each} s per step: about {clock(seconds * left)} for the other {left:,} steps"
                due = self._evaluations_from(step)
                self.say(rest + (f", and {due:,} evaluation{'s'[: due != 1]}" if due else ""))

    def lap(self, step: int) -> float:
        """Returns examples per second since the last lap, without the time spent in `paused`."""
        now = time.perf_counter()
        rate = (step - self._lap_step) * self._batch_size / max(now - self._mark, 1e-9)
        self._mark, self._lap_step = now, step
        return rate

    def show_step(
        self, step: int, values: Mapping[str, float], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Prints the loss, learning rate and speed in `values`, and the objective's own `metrics`."""
        rate = values["examples_per_second"]
        left = (self._steps - step) * self._batch_size / max(rate, 1e-9)
        if self._evaluations:
            left += statistics.mean(self._evaluations) * self._evaluations_from(step)
        self.say(
            f"step {step}/{self._steps}  loss {values['loss']:.4f}{_formatted(metrics or {})}"
            f"  lr {values['learning_rate']:.3g}  {rate:.4g} examples/s  {clock(left)} left"
        )

    def show_evaluation(
        self, step: int, scores: Mapping[str, float], others: Mapping[str, float] | None = None
    ) -> None:
        """Prints `scores`, the metrics that may choose the best checkpoint, and the first of the `others`."""
        values = "".join(f"  {name} {value:.4f}" for name, value in scores.items())
        self.say(f"step {step}/{self._steps}  dev{values}{_formatted(others or {})}")

    def say(self, text: str) -> None:
        """Prints one line, above the bar."""
        if jax.process_index() == 0:
            with outliving_reader():
                self._bar.write(text, file=sys.stderr)

    @contextlib.contextmanager
    def paused(self, *, evaluating: bool = False) -> Iterator[None]:
        """Excludes the time spent inside (an evaluation, a checkpoint) from examples per second."""
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        if evaluating:
            self._evaluations.append(spent)
        self._mark += spent
        self._first_done += spent

    def close(self) -> None:
        self._bar.close()


def _formatted(metrics: Mapping[str, float]) -> str:
    own = {k: v for k, v in metrics.items() if k.rpartition("/")[2] not in NOT_SHOWN or k.endswith("/loss")}
    return "".join([f"  {name} {value:.4g}" for name, value in own.items()][:MOST_SHOWN])


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Prints `what` to standard error when the context begins, and its duration when it ends."""
    if jax.process_index() != 0:
        yield
        return
    begin, terminal = time.perf_counter(), sys.stderr.isatty()
    print(f"{what} ...", end="" if terminal else "\n", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        if terminal:
            print(file=sys.stderr)
        raise
    took = clock(time.perf_counter() - begin)
    print(f" {took}" if terminal else f"{what}: {took}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Returns a duration as text, such as 1h02m, 3m05s or 12s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"

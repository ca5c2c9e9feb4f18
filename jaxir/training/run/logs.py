"""What a run says: RUN/log.jsonl, TensorBoard, and a bar (or plain lines) on standard error.

Nothing can be appended to an object in a bucket: there the logs are kept on this machine, and copied to the
bucket at each checkpoint and at the end. What a killed process had not copied is logged again with the steps
that are done again.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxir.core.errors import UserError
from jaxir.core.progress import outliving_reader, progress
from jaxir.core.values import fits
from jaxir.storage.files import atomic_file, is_bucket, path_of
from jaxir.storage.leases import Lease
from jaxir.storage.locks import Lock
from jaxir.storage.temporary_outputs import temporary_directory

LOG, BOARD = "log.jsonl", "tensorboard"
MOST_SHOWN = 5  # metrics of the objective in one line; all are in the log
# Metrics that the terminal does not show, since it shows what they add up to or warns of them.
NOT_SHOWN = {
    "loss",
    "grad_norm",
    "learning_rate",
    "rows_without_negatives",
    "loss_query_to_passage",
    "loss_passage_to_query",
}


class RunLog:
    """The log of one run, of process 0; other processes write nothing.

    Args:
      run_dir: the run's directory.
      start_step: the step the run resumes from; what was logged beyond it is dropped, so no step appears
        twice.
      run: the name of the run, which the first line of each process has.
      hold: on the directory.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        start_step: int,
        run: str,
        hold: Lock | Lease | None = None,
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
            kept = own_lines((self._place / LOG).read_bytes(), start_step, run)
            with atomic_file(self._place / LOG) as file:
                file.writelines(kept)
        self._file = (self._place / LOG).open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(self._place / BOARD), purge_step=start_step + 1, filename_suffix=f".{start_step}"
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line {"step", values..., "time"} and one TensorBoard scalar per value."""
        if self._file is None:
            return
        line = {"step": step, **{k: float(v) for k, v in values.items()}, "time": round(time.time(), 3)}
        self._write_line(line)
        for name, value in values.items():
            self._board.add_scalar(name if "/" in name else f"train/{name}", float(value), step)

    def checkpoint(self, step: int | None) -> None:
        """Writes that the checkpoint of `step` is whole; None is for none."""
        if self._file is not None and step is not None:
            self._write_line({"step": step, "checkpoint": True, "time": round(time.time(), 3)})
            self.bring()

    def bring(self) -> None:
        """Brings the logs to the run's bucket, if it is in one.

        Also before a checkpoint is saved: a run that goes on from it has no other place to know of the steps.
        """
        if self._file is not None:
            self._board.flush()
            self._copy()

    def close(self) -> None:
        """Flushes and closes both logs."""
        if self._file is not None:
            self._file.close()
            self._board.close()
            self._copy()
            self._closing.close()

    def _copy(self) -> None:
        """Copies the logs to the bucket of the run, if it is in one. They are not worth ending it for."""
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


def own_lines(log: bytes, step: int, run: str) -> list[str]:
    """Returns the lines of a log that belong to a run which goes on at `step`.

    Left out are lines about later steps, which will be done again, and those that cannot be read.

    Args:
      log: what the file holds.
      step: from which the run goes on.
      run: its name. Lines belong to the run that was named last; of earlier versions none is named.
    """
    kept, ours = [], True
    for line in log.splitlines():
        if told := _told(line):
            ours = told.get("run", run if ours else None) == run
            if ours and told["step"] <= step:
                kept.append(line.decode().rstrip() + "\n")
    return kept


def _told(line: bytes) -> dict[str, Any] | None:
    """Returns what a line of a log says, None where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(line.decode())
        if fits(told, dict[str, Any]) and fits(told.get("step"), int):
            return told
    return None


class Narrator:
    """Tells how far training is: one line per logged step and, on a terminal, a bar below them.

    Args:
      steps: the run's steps.
      start_step: those already done.
      batch_size: examples per step.
      evaluations_from: how many evaluations are due at a step and later ones.
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
        self._evaluations: list[float] = []  # seconds that each took
        self._start = self._shown = self._lap_step = start_step
        self._mark = self._first_done = time.perf_counter()
        first = jax.process_index() == 0
        self._bar = (
            progress(total=steps, what="train", unit="step", initial=start_step, lines=False)
            if first
            else tqdm(total=steps, initial=start_step, disable=True)
        )

    def step(self, step: int, loss: float) -> None:
        """Moves the bar to the number of finished steps; the second one says how long the rest will take."""
        self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self._bar.update(step - self._shown)
        self._shown = step
        now = time.perf_counter()
        if step == self._start + 1:
            self._first_done = now
        elif step == self._start + 2:
            seconds, left = now - self._first_done, self._steps - step
            if left:
                told = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
                rest = f"{told} s a step: about {clock(seconds * left)} for the other {left:,}"
                due = self._evaluations_from(step)
                self.say(rest + (f", and {due:,} evaluation{'s'[: due != 1]}" if due else ""))

    def lap(self, step: int) -> float:
        """Returns examples per second since the last lap, time spent in `paused` left out."""
        now = time.perf_counter()
        rate = (step - self._lap_step) * self._batch_size / max(now - self._mark, 1e-9)
        self._mark, self._lap_step = now, step
        return rate

    def tell(
        self, step: int, values: Mapping[str, float], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Shows a logged step.

        Args:
          step: the number of finished steps.
          values: the loss, the learning rate and the examples per second.
          metrics: the metrics of that step, of which the objective's own are shown.
        """
        rate = values["examples_per_second"]
        left = (self._steps - step) * self._batch_size / max(rate, 1e-9)
        if self._evaluations:
            left += statistics.mean(self._evaluations) * self._evaluations_from(step)
        self.say(
            f"step {step}/{self._steps}  loss {values['loss']:.4f}{_formatted(metrics or {})}"
            f"  lr {values['learning_rate']:.3g}  {rate:.4g} examples/s  {clock(left)} left"
        )

    def tell_dev(
        self, step: int, scores: Mapping[str, float], others: Mapping[str, float] | None = None
    ) -> None:
        """Shows an evaluation.

        Args:
          step: the number of finished steps.
          scores: the metrics that evaluators name. All are shown.
          others: what evaluators measure beside them, such as the objective's own metrics.
        """
        values = "".join(f"  {name} {value:.4f}" for name, value in scores.items())
        self.say(f"step {step}/{self._steps}  dev{values}{_formatted(others or {})}")

    def say(self, text: str) -> None:
        """Prints one line, above the bar."""
        if jax.process_index() == 0:
            with outliving_reader():
                self._bar.write(text, file=sys.stderr)

    @contextlib.contextmanager
    def paused(self, *, evaluating: bool = False) -> Iterator[None]:
        """Leaves what happens inside (an evaluation, a checkpoint) out of the examples per second."""
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        if evaluating:
            self._evaluations.append(spent)
        self._mark += spent
        self._first_done += spent

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()


def _formatted(metrics: Mapping[str, float]) -> str:
    """Returns "  NAME VALUE" of each of at most `MOST_SHOWN` metrics that the objective itself reports."""
    own = {k: v for k, v in metrics.items() if k.rpartition("/")[2] not in NOT_SHOWN or k.endswith("/loss")}
    return "".join([f"  {name} {value:.4g}" for name, value in own.items()][:MOST_SHOWN])


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Says on standard error that work begins which may take minutes, and, afterwards, how long it took."""
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
    """Returns a time span such as 1h02m, 3m05s or 12s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"

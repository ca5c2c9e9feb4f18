"""Runs the cells of a grid one after the other, each in processes of its own, and takes up what was left."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.experiments.grid_cells import Cell
from jaxir.experiments.table import read_judges, read_scores
from jaxir.interop.model.run_dir import checkpoint_steps
from jaxir.storage.files import atomic_file
from jaxir.storage.json_files import read_json
from jaxir.storage.locks import descriptors

POLL_SECONDS = 0.2
COMMANDS, INPUTS = "commands.txt", "inputs.json"


class Interrupted(Exception):
    """The experiment was told to stop. Args: the signal."""

    def say(self, directory: Path) -> int:
        """Says so, and returns the exit status."""
        number = self.args[0]
        print(f"{directory}: stopped by {number.name}; run the same command again to go on", file=sys.stderr)
        return 128 + number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A cell that did not finish.

    Attributes:
      cell: which.
      reason: what its command said last.
      log: where everything it said is.
    """

    cell: Cell
    reason: str
    log: Path


def run_cells(cells: Sequence[Cell], *, steps: int, on_result: Callable[[], None]) -> list[Failure]:
    """Trains and tests every cell that has no result yet; when one fails, the others go on.

    Args:
      cells: what to run, in this order.
      steps: training steps of a cell, for the bar.
      on_result: called without arguments after each cell that finished.

    Returns:
      The cells that failed.

    Raises:
      Interrupted: on SIGINT or SIGTERM, once the command at work has saved what it had.
      UserError: a cell was begun with other commands, or read other data.
    """
    for cell in cells:
        check_begun(cell.directory, cell.identity, cell.inputs)
        check_judges(cell)
    failures = []
    left = [cell for cell in cells if not cell.finished]
    done = len(cells) - len(left)
    with progress(total=len(cells) * steps, what="grid", unit="steps", initial=done * steps) as bar:
        if done:
            bar.write(f"{done} of {len(cells)} cells are finished already", file=sys.stderr)
        for number, cell in enumerate(left, done + 1):
            bar.set_postfix_str(cell.name)
            bar.write(f"[{number}/{len(cells)}] {cell.name}", file=sys.stderr)
            started, before = time.monotonic(), bar.n
            try:
                run_cell(cell, on_steps=lambda n, before=before: bar.update(before + n - bar.n))
            except CommandFailed as error:
                failure = Failure(cell=cell, reason=str(error), log=cell.directory / "log.txt")
                bar.write(f"    failed: {failure.reason} (see {failure.log})", file=sys.stderr)
                failures.append(failure)
            else:
                scores = read_scores(cell.result)["metrics"] | read_judges(cell)
                values = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
                minutes = (time.monotonic() - started) / 60
                bar.write(f"    {values}  ({minutes:.1f} min)", file=sys.stderr)
                on_result()
            bar.update(before + steps - bar.n)
    return failures


class CommandFailed(Exception):
    """A command of a cell ended with an error. Args: the last thing it said."""


def run_cell(cell: Cell, *, on_steps: Callable[[int], None]) -> None:
    """Runs the commands of a cell that are still to be run.

    Args:
      cell: which.
      on_steps: called with the number of training steps that are done.

    Raises:
      CommandFailed: one of them failed.
      Interrupted: a signal came.
    """
    begin(cell.directory, cell.identity, inputs_of(cell))
    before, log = 0, cell.directory / "log.txt"
    for run, arguments in cell.commands.training:
        if not (run / "COMPLETE").exists():
            log_run(arguments, log, lambda run=run, before=before: on_steps(before + last_step(run)))
        before += last_step(run)
        on_steps(before)
    tests = {cell.result: cell.commands.testing}
    tests |= {path: cell.commands.judging[name] for name, path in cell.judged.items()}
    for result, arguments in tests.items():
        if not result.exists():
            log_run(arguments, log)


def log_run(arguments: Sequence[str], log: Path, meanwhile: Callable[[], None] | None = None) -> None:
    """Runs `python` with `arguments` and passes signals on to it.

    Args:
      arguments: of the command.
      log: file to which all that it says is added.
      meanwhile: called now and then until it ends.

    Raises:
      CommandFailed: it ended with an error.
      Interrupted: SIGINT or SIGTERM came to this process, or the command was stopped from outside.
    """
    with log.open("ab") as file:
        file.write(f"\n$ {shlex.join(['python', *arguments])}\n".encode())
        file.flush()
        code = run_attended(arguments, meanwhile, stdout=file, stderr=subprocess.STDOUT)
    if code:
        raise CommandFailed(f"killed by {signal.Signals(-code).name}" if code < 0 else last_words(log))


def run_attended(
    arguments: Sequence[str],
    meanwhile: Callable[[], None] | None = None,
    *,
    typed: str = "",
    **streams: Any,
) -> int:
    """Runs `python` with `arguments`, passes signals on to it, and returns its exit code.

    Args:
      arguments: of the command.
      meanwhile: called now and then until it ends.
      typed: what it reads from standard input; short.
      **streams: its stdout and stderr; by default ours.

    Raises:
      Interrupted: SIGINT or SIGTERM came to this process, or the command was stopped from outside.
    """
    with signals() as received:
        # Its own session: Ctrl-C reaches it through us, once. If we are killed, it saves what it has,
        # ends, and holds our directory until then.
        process = subprocess.Popen(
            [*_dying_with_parent(), sys.executable, *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors(),
            **streams,
        )
        stopped = None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(typed.encode())
            while process.poll() is None:
                while received:
                    stopped = received.pop(0)
                    process.send_signal(stopped)
                if meanwhile is not None:
                    meanwhile()
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    code = process.returncode
    stopped = received[0] if received else stopped  # it came as the command ended
    killed = -code if code < 0 else code - 128
    if stopped or killed in (signal.SIGINT, signal.SIGTERM):
        raise Interrupted(stopped or signal.Signals(killed))
    return code


def _dying_with_parent() -> list[str]:
    """Returns what, put before a command, has Linux send it SIGTERM when this process is killed.

    Nobody would be left to stop it.
    """
    setpriv = shutil.which("setpriv")  # of util-linux
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


@contextlib.contextmanager
def signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGINT and SIGTERM in the list that it yields, in place of what they do."""
    received: list[signal.Signals] = []

    def note(number: int, _: object) -> None:
        received.append(signal.Signals(number))

    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def last_step(run: Path) -> int:
    """Returns the last step in a run's log; 0 before the first."""
    with contextlib.suppress(FileNotFoundError), (run / "log.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return 0


def last_words(log: Path) -> str:
    """Returns the last line of a log, without `error: ` before it."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()  # which takes a bar's \r for \n
    return text.rpartition("\n")[2].removeprefix("error: ")


def begin(directory: Path, identity: Sequence[str], inputs: Mapping[str, str]) -> None:
    """Makes the directory of an experiment and writes there how its results are made.

    Args:
      directory: of the experiment.
      identity: its commands.
      inputs: what they read, by name (see `experiments.inputs`).
    """
    with atomic_file(directory / COMMANDS) as file:
        file.writelines(line + "\n" for line in identity)
    with atomic_file(directory / INPUTS) as file:
        json.dump(_recorded(directory) | dict(inputs), file, indent=2)
        file.write("\n")


def check_begun(directory: Path, identity: Sequence[str], inputs: Mapping[str, str]) -> None:
    """Raises a UserError where a directory was begun with other commands or with files of other content.

    No table must mix experiments. Of a directory of before it is not known what was read. One in which
    nothing was made, because its first command failed, may be begun with others.
    """
    if not _has_results(directory):
        return
    path, now = directory / COMMANDS, tuple(identity)
    before = tuple(path.read_text(encoding="utf-8").splitlines()) if path.exists() else now
    if before != now:
        words = [set(shlex.split(" ".join(lines))) for lines in (before, now)]
        differing = " ".join(sorted(words[0] - words[1])) or "fewer settings"
        raise UserError(
            f"{directory} was begun with {differing}; give another output_dir, or remove that directory"
        )
    read = _recorded(directory)
    for name, content in inputs.items():
        if read.get(name, content) != content:
            raise UserError(
                f"{directory} was begun when {name} had other content; give another output_dir, or remove"
                " that directory"
            )


def _has_results(directory: Path) -> bool:
    """Returns whether there is more in a directory than notes, logs and runs without a checkpoint."""
    for place, folders, files in os.walk(directory):
        if "run.json" in files and not checkpoint_steps(Path(place, "checkpoints")):
            folders.clear()
        elif any(name not in (COMMANDS, INPUTS, "log.txt") and not name.startswith(".") for name in files):
            return True
    return False


def typed_runs(cells: Sequence[Cell]) -> list[Sequence[str]]:
    """Returns the commands of complete runs that no grid has trained, as those that `--dry_run` prints."""
    unknown = (cell for cell in cells if not (cell.directory / COMMANDS).exists())
    training = itertools.chain.from_iterable(cell.commands.training for cell in unknown)
    return [arguments for run, arguments in training if (run / "COMPLETE").exists()]


def check_judges(cell: Cell) -> None:
    """Raises a UserError where a judge has judged a cell by other data than it has now."""
    read = _recorded(cell.directory)
    for name, content in cell.judged_by.items():
        path = cell.judged[name]
        if path.exists() and read.get(_judge(name), content) != content:
            raise UserError(
                f"{path} was made when judge {name} had other data: give it another name, or remove that file"
            )


def inputs_of(cell: Cell) -> dict[str, str]:
    """Returns what the commands of a cell and its judges read, by name and content."""
    return {**cell.inputs, **{_judge(name): content for name, content in cell.judged_by.items()}}


def _judge(name: str) -> str:
    return f"judge {name}"


def _recorded(directory: Path) -> dict[str, str]:
    path = directory / INPUTS
    return read_json(path, dict[str, str]) if path.exists() else {}

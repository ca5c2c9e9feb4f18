"""Runs the cells of a grid in turn, each command in its own process, and resumes unfinished cells."""

from __future__ import annotations

import contextlib
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
from jaxir.interop.model.stored_run import checkpoint_steps
from jaxir.storage.files import atomic_file
from jaxir.storage.json_files import read_json
from jaxir.storage.locks import descriptors

POLL_SECONDS = 0.2
COMMANDS, INPUTS = "commands.txt", "inputs.json"


class Interrupted(Exception):
    """The experiment was stopped. Its argument is the signal."""

    def report(self, directory: Path) -> int:
        """Prints why the experiment stopped, and returns the exit status."""
        number = self.args[0]
        print(
            f"{directory}: stopped by {number.name}; run the same command again to continue", file=sys.stderr
        )
        return 128 + number


def run_cells(cells: Sequence[Cell], *, steps: int, on_result: Callable[[], None]) -> list[tuple[Cell, str]]:
    """Trains and tests every cell without a result; returns the cells that failed, with the reasons.

    The progress bar counts `steps` for each cell; `on_result` is called after each finished cell.
    Raises `Interrupted` on SIGINT or SIGTERM, after the running command has saved its state.
    """
    for cell in cells:
        check_begun(cell.directory, cell.identity, cell.inputs)
        check_judges(cell)
    failures = []
    left = [cell for cell in cells if not cell.finished]
    done = len(cells) - len(left)
    with progress(total=len(cells) * steps, what="grid", unit="steps", initial=done * steps) as bar:
        if done:
            bar.write(f"{done} of {len(cells)} cells are already finished", file=sys.stderr)
        for number, cell in enumerate(left, done + 1):
            bar.set_postfix_str(cell.name)
            bar.write(f"[{number}/{len(cells)}] {cell.name}", file=sys.stderr)
            started, before = time.monotonic(), bar.n
            try:
                run_cell(cell, on_steps=lambda n, before=before: bar.update(before + n - bar.n))
            except CommandFailed as error:
                bar.write(f"    failed: {error} (see {cell.log})", file=sys.stderr)
                failures.append((cell, str(error)))
            else:
                scores = read_scores(cell.result)["metrics"] | read_judges(cell)
                values = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
                minutes = (time.monotonic() - started) / 60
                bar.write(f"    {values}  ({minutes:.1f} min)", file=sys.stderr)
                on_result()
            bar.update(before + steps - bar.n)
    return failures


class CommandFailed(Exception):
    """A command of a cell failed. Its argument is the last line of its output."""


def run_cell(cell: Cell, *, on_steps: Callable[[int], None]) -> None:
    """Runs the remaining commands of a cell; reports finished training steps to `on_steps`."""
    begin(cell.directory, cell.identity, inputs_of(cell))
    before, log = 0, cell.log
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
    """Runs `python ARGUMENTS` and appends its output to `log`; raises `CommandFailed` or `Interrupted`."""
    with log.open("ab") as file:
        file.write(f"\n$ {shlex.join(['python', *arguments])}\n".encode())
        file.flush()
        code = run_attended(arguments, meanwhile, stdout=file, stderr=subprocess.STDOUT)
    if code:
        raise CommandFailed(f"killed by {signal.Signals(-code).name}" if code < 0 else last_line(log))


def run_attended(
    arguments: Sequence[str],
    meanwhile: Callable[[], None] | None = None,
    *,
    typed: str = "",
    **streams: Any,
) -> int:
    """Runs `python ARGUMENTS`, forwards signals to it, and returns its exit code.

    Calls `meanwhile` repeatedly. `typed` is a short text to write to its standard input. Raises `Interrupted`
    if this process received SIGINT or SIGTERM, or the command was stopped from outside.
    """
    with signals() as received:
        # In its own session Ctrl-C reaches the command only through this process. If this process is
        # killed, the command saves its state, ends, and holds the directory's lock until then.
        process = subprocess.Popen(
            [*_terminated_with_parent(), sys.executable, *arguments],
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
    stopped = received[0] if received else stopped  # also notice a signal that arrived as the command ended
    killed = -code if code < 0 else code - 128
    if stopped or killed in (signal.SIGINT, signal.SIGTERM):
        raise Interrupted(stopped or signal.Signals(killed))
    return code


def _terminated_with_parent() -> list[str]:
    """Returns a command prefix that has Linux send SIGTERM to the command if this process is killed."""
    setpriv = shutil.which("setpriv")  # part of util-linux; missing on some machines
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


@contextlib.contextmanager
def signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGINT and SIGTERM in the list that it yields, instead of handling them."""
    received: list[signal.Signals] = []

    def record(number: int, _: object) -> None:
        received.append(signal.Signals(number))

    usual = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def last_step(run: Path) -> int:
    """Returns the last step in a run's log; 0 before the first step."""
    with contextlib.suppress(FileNotFoundError), (run / "log.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return 0


def last_line(log: Path) -> str:
    """Returns the last line of a log, without its `error: ` prefix."""
    text = log.read_text(
        encoding="utf-8", errors="replace"
    ).strip()  # read_text turns a progress bar's \r into \n
    return text.rpartition("\n")[2].removeprefix("error: ")


def begin(directory: Path, identity: Sequence[str], inputs: Mapping[str, str]) -> None:
    """Makes the directory of an experiment and records its commands and inputs there."""
    with atomic_file(directory / COMMANDS) as file:
        file.writelines(line + "\n" for line in identity)
    with atomic_file(directory / INPUTS) as file:
        json.dump(_recorded(directory) | dict(inputs), file, indent=2)
        file.write("\n")


def check_begun(directory: Path, identity: Sequence[str], inputs: Mapping[str, str]) -> None:
    """Refuses a directory that was started with other commands or with files of other content.

    Directories without records pass. So do directories without results, since their first command failed.
    """
    if not _has_results(directory):
        return
    path, now = directory / COMMANDS, tuple(identity)
    before = tuple(path.read_text(encoding="utf-8").splitlines()) if path.exists() else now
    if before != now:
        words = [set(shlex.split(" ".join(lines))) for lines in (before, now)]
        differing = " ".join(sorted(words[0] - words[1])) or "fewer settings"
        raise UserError(
            f"{directory} was started with {differing}; give another output_dir, or remove that directory"
        )
    read = _recorded(directory)
    for name, content in inputs.items():
        if read.get(name, content) != content:
            raise UserError(
                f"{directory} was started when {name} had other content; give another output_dir, or remove"
                " that directory"
            )


def _has_results(directory: Path) -> bool:
    """Returns whether a directory has more than records, logs and runs without a checkpoint."""
    for place, folders, files in os.walk(directory):
        if "run.json" in files and not checkpoint_steps(Path(place, "checkpoints")):
            folders.clear()
        elif any(name not in (COMMANDS, INPUTS, "log.txt") and not name.startswith(".") for name in files):
            return True
    return False


def manual_runs(cells: Sequence[Cell]) -> list[Sequence[str]]:
    """Returns the training commands of complete runs in the cells that no grid has trained."""
    unknown = (cell for cell in cells if not (cell.directory / COMMANDS).exists())
    training = itertools.chain.from_iterable(cell.commands.training for cell in unknown)
    return [arguments for run, arguments in training if (run / "COMPLETE").exists()]


def check_judges(cell: Cell) -> None:
    """Raises a UserError if a judge has scored the cell on other data than it has now."""
    read = _recorded(cell.directory)
    for name, content in cell.judged_by.items():
        path = cell.judged[name]
        if path.exists() and read.get(_judge(name), content) != content:
            raise UserError(
                f"{path} holds an evaluation on other data than --judges={name} reads now: give the judge"
                " another name, or remove that file"
            )


def inputs_of(cell: Cell) -> dict[str, str]:
    """Returns the inputs of a cell and its judges: name -> hash of the content."""
    return {**cell.inputs, **{_judge(name): content for name, content in cell.judged_by.items()}}


def _judge(name: str) -> str:
    return f"judge {name}"


def _recorded(directory: Path) -> dict[str, str]:
    path = directory / INPUTS
    return read_json(path, dict[str, str]) if path.exists() else {}

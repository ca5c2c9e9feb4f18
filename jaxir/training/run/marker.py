"""RUN/run.json, which marks a directory as that of a run of ours, and names the run.

It says nothing that the checkpoints do not say too: where it is missing or damaged, it is written anew.
"""

import contextlib
import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxir.core.errors import UserError
from jaxir.core.values import check_value
from jaxir.interop.model.run_dir import Damaged, check_seal, checkpoint_steps, read_record, sealed
from jaxir.storage.files import atomic_file, check_bucket, path_of
from jaxir.storage.json_files import read_json
from jaxir.storage.leases import LEASE
from jaxir.training.run.logs import LOG

MARKER = "run.json"


def begin(run_dir: Path, settings: Mapping[str, Any]) -> str:
    """Marks a directory as that of a run with these settings; returns the run's name.

    It keeps the name of a run that ended before its first checkpoint, for then it has a log of that name.
    """
    before = read_marker(run_dir) if (run_dir / MARKER).exists() else None
    name = before or secrets.token_hex(8)
    _write(run_dir, name, settings)
    return name


def go_on(run_dir: Path, named: str | None, settings: Mapping[str, Any]) -> str:
    """Returns the name of a run that goes on, and writes run.json if it does not have this name.

    Args:
      run_dir: the run's directory.
      named: the name in the checkpoint that the run goes on from; None of runs of earlier versions.
      settings: those of the run.
    """
    try:
        own = read_marker(run_dir)
    except Damaged as error:
        own = None
        print(f"warning: {error}; it is written anew", file=sys.stderr)
    name = named or own or secrets.token_hex(8)
    if own != name:
        _write(run_dir, name, settings)
    return name


def read_marker(run_dir: Path) -> str | None:
    """Returns the name of a run by its run.json; None of runs of earlier versions.

    Raises:
      Damaged: it is missing, or not what was written.
      OSError: it cannot be read now.
    """
    path = run_dir / MARKER
    if not path.is_file():
        raise Damaged(f"{path} is missing")
    try:
        content = read_json(path, dict[str, Any])
        check_value(f"{path} is damaged: 'settings'", content.get("settings"), dict[str, Any])
        check_value(f"{path} is damaged: 'run'", content.get("run"), str | None)
    except UserError as error:
        raise Damaged(str(error)) from error
    check_seal(content, path)
    return content.get("run")


def check_run_dir(run_dir: str | Path) -> None:
    """Checks that a run can start or go on in `run_dir`; changes nothing.

    Of several processes the first one looks: it changes the directory, and another might look meanwhile.

    Raises:
      UserError: `run_dir` holds something else than a run, or a run whose checkpoints are gone, or is in a
        bucket that cannot be written to.
    """
    if jax.process_index() != 0:
        return
    run_dir = path_of(run_dir)
    check_bucket(run_dir, writing=True)
    checkpoints = run_dir / "checkpoints"
    if not run_dir.exists() or (run_dir.is_dir() and all(map(_is_of_no_run_yet, run_dir.iterdir()))):
        return
    steps = checkpoint_steps(checkpoints)
    if not steps or not (run_dir / MARKER).is_file():
        _check_marked(run_dir, steps)
    log = run_dir / LOG
    if not steps and log.is_file() and b'"checkpoint"' in log.read_bytes():
        raise UserError(f"the checkpoints of {run_dir} are gone; give another output_dir to start anew")


def _is_of_no_run_yet(path: Path) -> bool:
    """Whether a path in a run's directory is there before the run is marked."""
    return path.name == LEASE or (path.name == "checkpoints" and path.is_dir() and not any(path.iterdir()))


def _check_marked(run_dir: Path, steps: list[int]) -> None:
    """Raises a UserError where neither run.json nor a checkpoint says that a directory is a run's."""
    if (run_dir / MARKER).is_file():
        try:
            read_marker(run_dir)
        except Damaged as error:
            raise UserError(f"{error}; {run_dir} may be no training run: give another output_dir") from error
        return
    for step in steps:
        with contextlib.suppress(Damaged):
            read_record(run_dir / "checkpoints" / str(step))
            return
    raise UserError(
        f"{run_dir} is not empty and is not a training run (it has no {MARKER}); give another output_dir"
    )


def _write(run_dir: Path, name: str, settings: Mapping[str, Any]) -> None:
    with atomic_file(run_dir / MARKER) as file:
        json.dump(sealed({"run": name, "settings": settings}), file, indent=2)

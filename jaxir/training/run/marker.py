"""RUN/run.json, which marks a directory as that of a run of ours, and names the run.

It says nothing that the checkpoints do not say too. So where it is damaged, or of another run, while a
checkpoint is whole, it is set aside and written anew.
"""

import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxir.core.errors import UserError
from jaxir.core.values import check_value
from jaxir.interop.model.run_dir import Damaged, check_seal, checkpoint_steps, read_record, sealed
from jaxir.storage.files import atomic_file, check_bucket, path_of
from jaxir.storage.json_files import read_json
from jaxir.storage.leases import LEASE
from jaxir.training.run.damage import keep_aside
from jaxir.training.run.logs import LOG
from jaxir.training.run.run_settings import disagreement

MARKER = "run.json"


class Marker(NamedTuple):
    """What run.json says.

    Attributes:
      run: the name of the run, given at its beginning by chance; None of runs of earlier versions.
      settings: what must agree between the parts of the run.
    """

    run: str | None
    settings: Mapping[str, Any]


def begin(run_dir: Path, settings: Mapping[str, Any]) -> str:
    """Marks a directory as that of a run with these settings; returns the run's name.

    It keeps the name of a run that ended before its first checkpoint, for then it has a log of that name.
    """
    before = read_marker(run_dir).run if (run_dir / MARKER).exists() else None
    name = before or secrets.token_hex(8)
    _write(run_dir, Marker(name, settings))
    return name


def go_on(run_dir: Path, named: str | None, settings: Mapping[str, Any]) -> str:
    """Has run.json say what run goes on; returns its name. What said something else is kept, and told.

    Args:
      run_dir: the run's directory.
      named: the name in the checkpoint that the run goes on from; None of runs of earlier versions.
      settings: those of the run.
    """
    path, wrong, marker = run_dir / MARKER, None, None
    try:
        marker = read_marker(run_dir)
        if named is not None and marker.run != named:
            wrong = f"{path} is of another run than the checkpoints"
        elif told := disagreement(marker.settings, settings):
            wrong = f"{path} is of another run than the checkpoints: it {told.partition(';')[0]}"
    except Damaged as error:
        wrong = str(error)
    own = marker.run if marker is not None and wrong is None else None
    name = named or own or secrets.token_hex(8)
    if wrong is not None:
        kept = keep_aside(run_dir, MARKER)
        what = f"it is kept as {kept}, and written anew" if kept else "it is written anew"
        print(f"warning: {wrong}; {what}", file=sys.stderr)
    if own is None:
        _write(run_dir, Marker(name, settings))
    return name


def read_marker(run_dir: Path) -> Marker:
    """Returns what run.json says.

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
    return Marker(content.get("run"), content["settings"])


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
    if run_dir.is_dir():
        if all(path.name == LEASE or (path == checkpoints and _is_empty(path)) for path in run_dir.iterdir()):
            return  # new, or killed before it was marked
    elif not run_dir.exists():
        return
    steps = checkpoint_steps(checkpoints)
    if not steps or not (run_dir / MARKER).is_file():
        _check_marked(run_dir, steps)
    log = run_dir / LOG
    saved = log.is_file() and b'"checkpoint"' in log.read_bytes()
    if saved and not steps:
        raise UserError(f"the checkpoints of {run_dir} are gone; give another output_dir to start anew")


def _check_marked(run_dir: Path, steps: list[int]) -> None:
    """Raises a UserError where neither run.json nor a checkpoint says that a directory is a run's."""
    if not (run_dir / MARKER).is_file():
        for step in steps:
            try:
                read_record(run_dir / "checkpoints" / str(step))
                return
            except Damaged:
                continue
        raise UserError(
            f"{run_dir} is not empty and is not a training run (it has no {MARKER}); give another output_dir"
        )
    try:
        read_marker(run_dir)
    except Damaged as error:
        raise UserError(
            f"{error}; there is no checkpoint either, so {run_dir} may be no run of ours: give another"
            " output_dir"
        ) from error


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _write(run_dir: Path, marker: Marker) -> None:
    with atomic_file(run_dir / MARKER) as file:
        json.dump(sealed(marker._asdict()), file, indent=2)

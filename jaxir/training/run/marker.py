"""RUN/run.json, which marks a directory as a run and names the run; it can be restored from a checkpoint."""

import contextlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxir.core.errors import UserError
from jaxir.interop.model.stored_run import Damaged, check_seal, checkpoint_steps, read_record, sealed
from jaxir.storage.files import atomic_file, check_bucket, path_of
from jaxir.storage.json_files import read_json
from jaxir.storage.leases import LEASE
from jaxir.training.run.logs import LOG

MARKER = "run.json"


def mark(run_dir: Path, settings: Mapping[str, Any], name: str | None) -> str:
    """Writes RUN/run.json, unless it is up to date, and returns the run's name.

    Args:
      run_dir: the run's directory.
      settings: the run's settings, as JSON values.
      name: the name in the checkpoint that the run resumes from; None keeps the name in run.json.
    """
    name = name or (_content(run_dir) or {}).get("run") or secrets.token_hex(8)
    path, text = run_dir / MARKER, json.dumps(sealed({"run": name, "settings": settings}), indent=2)
    if not path.is_file() or path.read_bytes() != text.encode():
        with atomic_file(path) as file:
            file.write(text)
    return name


def check_run_dir(run_dir: str | Path) -> None:
    """Raises a UserError, only in process 0, unless a directory is new, empty or a run to resume."""
    if jax.process_index() != 0:  # another process could see files that process 0 wrote after its check
        return
    run_dir = path_of(run_dir)
    check_bucket(run_dir, writing=True)
    if not run_dir.exists() or (run_dir.is_dir() and all(map(_precedes_marker, run_dir.iterdir()))):
        return
    steps, marker, log = checkpoint_steps(run_dir / "checkpoints"), run_dir / MARKER, run_dir / LOG
    if not marker.is_file():
        if not any(_is_checkpoint(run_dir / "checkpoints" / str(step)) for step in steps):
            raise UserError(
                f"{run_dir} is not empty and is not a training run (it has no {MARKER}); give another"
                " output_dir"
            )
    elif not steps and _content(run_dir) is None:
        raise UserError(f"{marker} is damaged or was not written by a training run; give another output_dir")
    if not steps and log.is_file() and b'"checkpoint"' in log.read_bytes():
        raise UserError(f"the checkpoints of {run_dir} are gone; give another output_dir for a new run")


def _content(run_dir: Path) -> dict[str, Any] | None:
    """Returns what run.json holds; None if it is missing, damaged or not jaxir's."""
    path = run_dir / MARKER
    try:
        content = read_json(path, dict[str, Any])
        check_seal(content, path)
    except UserError:
        return None
    return content if isinstance(content.get("settings"), dict) else None


def _precedes_marker(path: Path) -> bool:
    """Returns whether a path in a run's directory may exist before run.json is written."""
    return path.name == LEASE or (path.name == "checkpoints" and path.is_dir() and not any(path.iterdir()))


def _is_checkpoint(path: Path) -> bool:
    with contextlib.suppress(Damaged):
        read_record(path)
        return True
    return False

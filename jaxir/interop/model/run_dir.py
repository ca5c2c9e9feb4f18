"""A training run's directory as a model: which checkpoint it stands for, and what that says of itself."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.values import fits
from jaxir.interop.weights.weights import read_json, require
from jaxir.storage.files import is_bucket, path_of
from jaxir.storage.open_files import read_text

CONFIG = "jaxir.json"
COMMITTED = "commit_success.txt"
ATTEMPTS = 5


class Damaged(UserError):
    """A checkpoint is known to be damaged: what is missing of it or does not decode will not come back."""


def checkpoint_of(spec: str | Path) -> Path | None:
    """Returns RUN/checkpoints/STEP, the checkpoint that a run's directory stands for; None of other models.

    Raises:
      UserError: the run has no checkpoint, or not the one that it calls its best.
    """
    directory = path_of(spec)
    if (directory / "params").is_dir() or not (directory / CONFIG).is_file():
        return None
    checkpoints = directory / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(f"{directory}: neither params nor checkpoints in it")
    best = checkpoints / "best.json"
    for left in reversed(range(ATTEMPTS)):
        steps = checkpoint_steps(checkpoints)
        if not steps:
            raise UserError(f"{checkpoints}: no checkpoint in it yet")
        if not (best.exists() or os.path.lexists(best)):
            *older, newest = (checkpoints / str(step) for step in steps)
            # Of the newest alone a trainer may not have written it yet.
            if any(map(_was_evaluated, older)):
                _say_once(
                    f"warning: {best} is missing: {newest}, the newest checkpoint, is taken, be it the best"
                    " by the dev metric or not"
                )
            return newest
        told = read_json(best)
        step = require(told, "step", best)
        if step in steps and not isinstance(step, bool):
            try:
                record = read_record(checkpoints / str(step))
                break
            except Damaged:
                if not left:
                    raise
        elif not left:
            raise UserError(f"{best} names step {step!r:.40}, but there is no such checkpoint")
        time.sleep(0.02)  # a trainer may have named another one, and removed this one, just now
    if told.get("value") != record.get("dev_value"):
        raise UserError(f"{best} is damaged: checkpoint {step} has another dev metric than it says")
    return checkpoints / str(step)


def _was_evaluated(checkpoint: Path) -> bool:
    try:
        return read_record(checkpoint)["dev_value"] is not None
    except (UserError, OSError, KeyError):  # its trainer has removed it
        return False


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def checkpoint_steps(directory: Path) -> list[int]:
    """Returns the steps of the whole checkpoints in RUN/checkpoints, oldest first; none where it is missing.

    On a disk a checkpoint appears by a rename; in a bucket it is whole once Orbax has put its mark into it.
    """
    try:
        found = [p for p in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", p.name) and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        # Asked before, it might have been there: in a bucket a directory goes with its last file, which
        # Orbax removes where a first checkpoint was not finished.
        return []
    return sorted(int(p.name) for p in found if not is_bucket(p) or (p / COMMITTED).exists())


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of a checkpoint with a hash of itself, by which `read_record` knows it again."""
    text = json.dumps({k: v for k, v in record.items() if k != "sha256"}, sort_keys=True)
    return {**record, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_seal(record: Mapping[str, Any], path: Path) -> None:
    """Checks that a record which has a hash of itself is what it was.

    Raises:
      Damaged: it is not. Records of older versions have no hash.
    """
    if "sha256" in record and record != sealed(record):
        raise Damaged(f"{path}: not what was written there; if you changed it on purpose, remove its sha256")


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Returns what a checkpoint says of itself: step, settings, dev metric, checksums.

    Raises:
      Damaged: it is missing, or not what `training.checkpoints` writes.
      OSError: it cannot be read now.
    """
    path = checkpoint / "run" / "metadata"  # where Orbax puts what is saved as JSON
    try:
        record = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Damaged(f"{path}: no such file") from error
    except ValueError as error:
        raise Damaged(f"{path}: not valid JSON ({error})") from error
    whole = isinstance(record, dict) and isinstance(record.get("settings"), dict)
    if not whole or not fits(record.get("dev_value"), float | None):
        raise Damaged(f"{path}: not the record of a checkpoint")
    if record != sealed(record) and "checksums" in record:  # those of older versions have neither
        raise Damaged(f"{path}: not what was written there")
    if record.get("step") != int(checkpoint.name):
        raise Damaged(f"{path}: of another step")
    return record

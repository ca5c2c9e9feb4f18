"""A training run's directory as a model: which checkpoint it stands for, and that checkpoint's record."""

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
    """A checkpoint is known to be damaged: its missing or undecodable parts will not come back."""


def checkpoint_of(spec: str | Path) -> Path | None:
    """Returns the checkpoint (RUN/checkpoints/STEP) that a run stands for; None for other models."""
    directory = path_of(spec)
    if (directory / "params").is_dir() or not (directory / CONFIG).is_file():
        return None
    checkpoints = directory / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(f"{directory}: it has neither params nor checkpoints")
    best = checkpoints / "best.json"
    for left in reversed(range(ATTEMPTS)):
        steps = checkpoint_steps(checkpoints)
        if not steps:
            raise UserError(f"{checkpoints}: no checkpoint in it yet")
        if not (best.exists() or os.path.lexists(best)):
            *older, newest = (checkpoints / str(step) for step in steps)
            # A trainer may not have written best.json for the newest checkpoint yet.
            if any(map(_was_evaluated, older)):
                _say_once(
                    f"warning: {best} is missing: the newest checkpoint, {newest}, is used, which may not be"
                    " the best by the dev metric"
                )
            return newest
        named = read_json(best)
        step = require(named, "step", best)
        if step in steps and not isinstance(step, bool):
            try:
                record = read_record(checkpoints / str(step))
                break
            except Damaged:
                if not left:
                    raise
        elif not left:
            raise UserError(f"{best} names step {step!r:.40}, but there is no such checkpoint")
        time.sleep(0.02)  # a trainer may just have named another checkpoint and removed this one
    if named.get("value") != record.get("dev_value"):
        raise UserError(f"{best} is damaged: checkpoint {step} has another dev metric")
    return checkpoints / str(step)


def _was_evaluated(checkpoint: Path) -> bool:
    try:
        return read_record(checkpoint)["dev_value"] is not None
    except (UserError, OSError, KeyError):  # the trainer has removed it
        return False


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def checkpoint_steps(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in RUN/checkpoints, oldest first; none if it is missing.

    On a disk a checkpoint appears by a rename; in a bucket it is complete once it has Orbax's commit file.
    """
    try:
        found = [p for p in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", p.name) and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(p.name) for p in found if not is_bucket(p) or (p / COMMITTED).exists())


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's record with its own SHA-256, which `check_seal` and `read_record` compare."""
    text = json.dumps({k: v for k, v in record.items() if k != "sha256"}, sort_keys=True)
    return {**record, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_seal(record: Mapping[str, Any], path: Path) -> None:
    """Checks a record by its own SHA-256; records of older versions have none.

    Raises:
      Damaged: the record has changed.
    """
    if "sha256" in record and record != sealed(record):
        raise Damaged(f"{path}: not what was written there; if you changed it on purpose, remove its sha256")


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Returns a checkpoint's record: step, settings, dev metric, checksums.

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
    if record != sealed(record) and "checksums" in record:  # records of older versions have neither
        raise Damaged(f"{path}: not what was written there")
    if record.get("step") != int(checkpoint.name):
        raise Damaged(f"{path}: of another step")
    return record


def sums_of(checkpoint: Path, item: str) -> Mapping[str, int] | None:
    """Returns the checksums of an item of a checkpoint by the arrays' names; None in older checkpoints."""
    return (read_record(checkpoint).get("checksums") or {}).get(item)

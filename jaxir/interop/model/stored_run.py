"""Opens a training run's directory as a model: chooses its checkpoint and reads the checkpoint's record."""

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
COMMITTED = "commit_success.txt"  # Orbax writes it last into a checkpoint in a bucket
ATTEMPTS = 5  # attempts to read best.json and its checkpoint, which a trainer may replace meanwhile


class Damaged(UserError):
    """A checkpoint is certainly damaged: parts are missing or undecodable, so a retry would not help."""


def checkpoint_of(spec: str | Path) -> Path | None:
    """Returns the directory of a run's best checkpoint, or of its latest without dev metric; else None."""
    directory = path_of(spec)
    if (directory / "params").is_dir() or not (directory / CONFIG).is_file():
        return None
    checkpoints = directory / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(
            f"{directory}: it has neither params nor checkpoints; wait for its run, or copy it again"
        )
    best = checkpoints / "best.json"
    for left in reversed(range(ATTEMPTS)):
        steps = checkpoint_steps(checkpoints)
        if not steps:
            if left:  # list again: a listing may miss a checkpoint that is replaced meanwhile
                time.sleep(0.02)
                continue
            raise UserError(f"{checkpoints}: no checkpoint in it yet; wait for the run, or resume it")
        if not (best.exists() or os.path.lexists(best)):
            *older, newest = (checkpoints / str(step) for step in steps)
            # For the newest checkpoint, the trainer may not have written best.json yet, so look at older
            # ones.
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
            raise UserError(
                f"{best} names step {step!r:.40}, but there is no such checkpoint; copy the run again"
            )
        time.sleep(0.02)  # a trainer may just have named another checkpoint and removed this one
    if named.get("value") != record.get("dev_value"):
        raise UserError(f"{best} is damaged: checkpoint {step} has another dev metric; copy the run again")
    return checkpoints / str(step)


def _was_evaluated(checkpoint: Path) -> bool:
    try:
        return read_record(checkpoint)["dev_value"] is not None
    except (UserError, OSError, KeyError):  # the trainer has removed the checkpoint
        return False


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def checkpoint_steps(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in RUN/checkpoints, oldest first; [] if there is none.

    On a disk a checkpoint appears by a rename; in a bucket it is complete once it has Orbax's commit file.
    """
    try:
        found = [p for p in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", p.name) and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(p.name) for p in found if not is_bucket(p) or (p / COMMITTED).exists())


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `record` with its own SHA-256 added, which `check_seal` and `read_record` verify."""
    text = json.dumps({k: v for k, v in record.items() if k != "sha256"}, sort_keys=True)
    return {**record, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_seal(record: Mapping[str, Any], path: Path) -> None:
    """Checks a record by its own SHA-256; records of older versions have none.

    Raises:
      Damaged: the record has changed.
    """
    if "sha256" in record and record != sealed(record):
        raise Damaged(
            f"{path} is damaged: it does not match its sha256; copy it again, or remove its sha256"
            " if you changed it on purpose"
        )


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Returns a checkpoint's record: step, settings, dev metric, checksums.

    Raises:
      Damaged: the record is missing, or is not what `training.checkpoints` writes.
      OSError: the record cannot be read now; a retry may help.
    """
    path = checkpoint / "run" / "metadata"  # the file in which Orbax stores JSON
    try:
        record = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Damaged(f"{path}: no such file; copy the checkpoint again") from error
    except ValueError as error:
        raise Damaged(f"{path} is damaged: not valid JSON ({error}); copy the checkpoint again") from error
    whole = isinstance(record, dict) and isinstance(record.get("settings"), dict)
    if not whole or not fits(record.get("dev_value"), float | None):
        raise Damaged(f"{path} is damaged: not the record of a checkpoint; copy the checkpoint again")
    # Older versions wrote neither checksums nor this SHA-256.
    if record != sealed(record) and "checksums" in record:
        raise Damaged(f"{path} is damaged: it does not match its sha256; copy the checkpoint again")
    if record.get("step") != int(checkpoint.name):
        raise Damaged(f"{path} is damaged: it is the record of another step; copy the checkpoint again")
    return record


def sums_of(checkpoint: Path, item: str) -> Mapping[str, int] | None:
    """Returns the checksum of each array of a checkpoint's `item`; None if an older version wrote it."""
    return (read_record(checkpoint).get("checksums") or {}).get(item)

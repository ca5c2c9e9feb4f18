"""Errors that a user can mend. Commands print their one sentence and exit 1; anything else is a bug."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HASH = re.compile(r",? ?(?:\bhash )?\b[0-9a-f]{12,}\b")


class Terminated(BaseException):
    """SIGTERM has come. Raised where Ctrl-C raises KeyboardInterrupt, so that all is left in good order."""


class UserError(Exception):
    """Bad input, settings or environment. The message is one clear sentence that says what to do."""


class BadInputError(UserError):
    """A malformed record in a file.

    Args:
      path: the file.
      line: its 1-based line number, or None where the whole file is at fault.
      reason: what is wrong with it, in a few words.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str):
        self.path, self.line, self.reason = str(path), line, reason
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {reason}")


class DamagedError(UserError):
    """A file that jaxir has written is not what it was.

    Args:
      path: the file.
      reason: what is wrong, in a sentence that does not name the path: clients of a service may read it.
    """

    def __init__(self, path: str | Path, reason: str):
        self.path, self.reason = str(path), reason
        super().__init__(f"{path} is damaged: {reason}")


class UsageError(UserError):
    """A command line that cannot be understood; the exit status is 2."""


class BadValueError(UserError, ValueError):
    """A value of the wrong type, or one that makes no sense for what it is given to."""


def without_hashes(text: str) -> str:
    """Returns a text without fingerprints, which say nothing to a reader: "8 queries, hash 5cef26ee87d1"."""
    return _HASH.sub("", text).strip()


def changed(name: str, before: Any, now: Any) -> str:
    """Returns e.g. "another window (5, now 4)" for a setting that was one value and is another now."""
    values = [without_hashes(repr(value)) for value in (before, now)]
    if values != [repr(before), repr(now)]:
        return f"another {name}"
    return f"another {name} ({before!r:.40}, now {now!r:.40})"


# What other tools call what we call otherwise.
SYNONYMS = {
    **dict.fromkeys(("lr", "lr_rate", "learn_rate", "learningrate", "peak_lr"), "learning_rate"),
    **dict.fromkeys(
        ("bs", "bsz", "batch", "batchsize", "train_batch_size", "global_batch_size"), "batch_size"
    ),
    **dict.fromkeys(("per_device_train_batch_size", "per_gpu_batch_size"), "batch_size"),
    **dict.fromkeys(("epoch", "num_epochs", "n_epochs", "num_train_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "n_steps", "train_steps", "iterations", "iters"), "steps"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(("temp", "tau"), "temperature"),
    **dict.fromkeys(("max_len", "max_length", "max_seq_len", "max_seq_length", "seq_len"), "passage_length"),
    **dict.fromkeys(("out", "outdir", "out_dir", "save_dir", "run_dir"), "output_dir"),
    **dict.fromkeys(("config", "gin", "gin_config", "recipe"), "gin_file"),
    **dict.fromkeys(("topk", "top_k", "num_results"), "k"),
    **dict.fromkeys(("dataset", "data_dir", "train_data"), "data"),
    **dict.fromkeys(("model_name", "model_name_or_path", "checkpoint"), "model"),
}


def suggest(wrong: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Returns `; did you mean 'x'?` for the name nearest to `wrong` in any case, or an empty string.

    Hyphens count as underscores, and what other tools call a setting (`SYNONYMS`) as its name here.

    Args:
      wrong: what was written.
      known: what might have been meant.
      likeness: from 0 to 1, difflib's ratio; 0.8 is a misspelling, 0.6 a name of the same kind.
    """
    names: dict[str, list[str]] = {}
    for name in known:
        names.setdefault(_plain(name), []).append(name)
    plain = _plain(wrong)
    near = [name for name in (plain, SYNONYMS.get(plain)) if name in names]
    near = near[:1] or difflib.get_close_matches(plain, names, n=1, cutoff=likeness)
    # Of names that differ in case alone, the one that does so least.
    meant = [max(names[n], key=lambda x: difflib.SequenceMatcher(None, wrong, x).ratio()) for n in near]
    return f"; did you mean {meant[0]!r}?" if meant else ""


def _plain(name: str) -> str:
    """Returns a name as names are compared: without the dashes of a flag, which make short ones alike."""
    return re.sub(r"^--?(gin\.)?", "", name.lower()).replace("-", "_")

"""Errors that a user can fix: commands print their sentence and exit with 1. Other errors are bugs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_HASH = re.compile(r",? ?(?:\bhash )?\b[0-9a-f]{12,}\b")


class Terminated(BaseException):
    """Raised when SIGTERM arrives, as KeyboardInterrupt on Ctrl-C, so that context managers clean up."""


class UserError(Exception):
    """Bad input, settings or environment. The message is one sentence that says what to do."""


class BadInputError(UserError):
    """A malformed record in a file.

    Args:
      path: the file.
      line: the 1-based line number; None if the whole file is malformed.
      reason: what is wrong with it, in a few words.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str):
        self.path, self.line, self.reason = str(path), line, reason
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {reason}")


class DamagedError(UserError):
    """A file that jaxir wrote is incomplete or has changed since.

    Args:
      path: the file.
      reason: what is wrong, without the path, because clients of a service may read it.
    """

    def __init__(self, path: str | Path, reason: str):
        self.path, self.reason = str(path), reason
        super().__init__(f"{path} is damaged: {reason}")


class UsageError(UserError):
    """A malformed command line; the exit status is 2."""


class BadValueError(UserError, ValueError):
    """A value of the wrong type, or outside of the allowed range."""


def causes(error: BaseException, *, implicit: bool = False) -> Iterator[BaseException]:
    """Yields an error, then its cause, the cause's cause and so on.

    If `implicit`, errors in whose handling another one was raised are causes, too.
    """
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (found.__context__ if implicit else None)


def root_reason(error: BaseException, *, implicit: bool = False) -> str:
    """Returns the root cause of an error in one line: the system's message if it has one."""
    *_, root = causes(error, implicit=implicit)
    text = next((line.strip() for line in str(root).splitlines() if line.strip()), type(root).__name__)
    if found := re.search(r"\[Errno -?\d+\] ([\w /-]+)", text):
        return found[1].strip().lower()
    if isinstance(root, OSError) and root.strerror:
        return root.strerror.lower()
    return text if len(text) <= 160 else f"{text[:160]}..."


def without_hashes(text: str) -> str:
    """Returns a text without fingerprints, such as "8 queries, hash 5cef26ee87d1"."""
    return _HASH.sub("", text).strip()


def changed(name: str, before: Any, now: Any) -> str:
    """Returns, for example, "another window (5, now 4)" for a setting that has changed."""
    values = [without_hashes(repr(value)) for value in (before, now)]
    if values != [repr(before), repr(now)]:
        return f"another {name}"
    return f"another {name} ({before!r:.40}, now {now!r:.40})"


# Other tools' names of settings, and jaxir's names of these settings.
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
    """Returns `; did you mean 'x'?` for the known name most like `wrong`, or an empty string.

    Ignores case, treats hyphens as underscores and other tools' names (`SYNONYMS`) as jaxir's. `likeness` is
    the lowest accepted difflib ratio, from 0 to 1: 0.8 accepts misspellings, 0.6 similar names too.
    """
    names: dict[str, list[str]] = {}
    for name in known:
        names.setdefault(_plain(name), []).append(name)
    plain = _plain(wrong)
    near = [name for name in (plain, SYNONYMS.get(plain)) if name in names]
    near = near[:1] or difflib.get_close_matches(plain, names, n=1, cutoff=likeness)
    # Among names that differ only in case, choose the one most like `wrong`.
    meant = [max(names[n], key=lambda x: difflib.SequenceMatcher(None, wrong, x).ratio()) for n in near]
    return f"; did you mean {meant[0]!r}?" if meant else ""


def _plain(name: str) -> str:
    """Normalises a name for comparison; without flags' leading dashes, which make short names alike."""
    return re.sub(r"^--?(gin\.)?", "", name.lower()).replace("-", "_")

"""Which errors tell that a checkpoint is damaged, and which only that it could not be read this time.

And RUN/broken, where what is damaged is kept.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.interop.model.run_dir import Damaged
from jaxir.interop.weights import stores

_GONE = (Damaged, FileNotFoundError, NotADirectoryError, IsADirectoryError)
_SENSELESS = (json.JSONDecodeError, UnicodeDecodeError, KeyError)
# How TensorStore begins messages on what is missing, cut off or fails its checksum, and what it says of what
# it cannot decompress. What may pass, and what is no fault of the files, it calls ABORTED, UNAVAILABLE,
# RESOURCE_EXHAUSTED, PERMISSION_DENIED and so on.
_STATUS = re.compile(r"(NOT_FOUND|OUT_OF_RANGE|DATA_LOSS): |.*(\bError decoding |zstd)", re.DOTALL | re.I)


def is_damage(error: BaseException) -> bool:
    """Returns whether an error of reading a checkpoint is known to come from damage.

    A lack of memory, of file handles or of rights, a network, bucket or disk that fails, and whatever else is
    not known are not: the same checkpoint may be read tomorrow.
    """
    return any(
        isinstance(e, _GONE + _SENSELESS) or (type(e) is ValueError and _STATUS.match(str(e)) is not None)
        for e in _causes(error)
    )


def reason(error: BaseException) -> str:
    """Returns the system's own words where there are some, else the beginning of the message at the root."""
    if isinstance(error, UserError):
        return str(error)
    *_, root = _causes(error)
    if words := stores.words_of_system(root):
        return words
    if isinstance(root, OSError) and root.strerror:
        return root.strerror.lower()
    text = " ".join(str(root).split()) or type(root).__name__
    return text if len(text) <= 160 else f"{text[:160]}..."


def place_for_broken(run_dir: Path, name: str) -> Path:
    """Returns where a broken part of a run is to be kept: RUN/broken/NAME, or with a number that is free."""
    target, number = run_dir / "broken" / name, itertools.count(2)
    while target.exists():
        target = target.with_name(f"{Path(name).stem}-{next(number)}{Path(name).suffix}")
    return target


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__

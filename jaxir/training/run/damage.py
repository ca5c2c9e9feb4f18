"""Distinguishes errors that prove a checkpoint damaged from errors of reading that may be transient."""

import json
import re

from jaxir.core.errors import UserError, causes, root_reason
from jaxir.interop.model.stored_run import Damaged
from jaxir.interop.weights import stores

_DAMAGE = (
    *(Damaged, FileNotFoundError, NotADirectoryError, IsADirectoryError),
    *(json.JSONDecodeError, UnicodeDecodeError, KeyError),
)
# TensorStore's messages on files that are missing, truncated, fail a checksum or cannot be decompressed.
# TensorStore calls transient errors ABORTED, UNAVAILABLE, RESOURCE_EXHAUSTED, PERMISSION_DENIED and so on.
_STATUS = re.compile(r"(NOT_FOUND|OUT_OF_RANGE|DATA_LOSS): |.*(\bError decoding |zstd)", re.DOTALL | re.I)


def is_damage(error: BaseException) -> bool:
    """Returns whether an error, raised by reading a checkpoint, proves that the checkpoint is damaged."""
    return any(
        isinstance(e, _DAMAGE) or (type(e) is ValueError and _STATUS.match(str(e)) is not None)
        for e in causes(error)
    )


def reason(error: BaseException) -> str:
    """Returns the operating system's message for an error, or the beginning of its root cause's message."""
    if isinstance(error, UserError):
        return str(error)
    *_, root = causes(error)
    return stores.words_of_system(root) or root_reason(root)

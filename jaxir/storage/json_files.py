"""JSON files as their readers want them: what is damaged or holds something else costs one sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxir.core.errors import BadValueError, UserError, suggest
from jaxir.core.values import check_value, hints_of
from jaxir.storage.open_files import read_text

Made = TypeVar("Made")


def read_json(path: Path, kind: Any = Any) -> Any:
    """Reads a JSON file.

    Args:
      path: the file.
      kind: a hint of what it must hold, such as `list[str]` (see `values.fits`).

    Raises:
      UserError: it is missing, cannot be read, is malformed, or holds something else.
    """
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # malformed JSON, not UTF-8, or brackets without end
        raise UserError(f"{path}: not valid JSON ({error})") from error
    check_value(f"{path}: the file is damaged: what it holds", content, kind)
    return content


def made(cls: type[Made], content: Mapping[str, Any], path: Path) -> Made:
    """Returns the dataclass that an object of JSON, read from `path`, holds the fields of.

    Raises:
      UserError: a field is missing, unknown, or has a value that it cannot have.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in content.keys() - fields.keys():
        raise UserError(f"{path}: {name!r:.80} is unknown{suggest(name, fields)}")
    for name, field in fields.items():
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and name not in content:
            raise UserError(f"{path}: {name!r} is missing")
    try:
        hints = hints_of(cls)
        for name, value in content.items():
            check_value(name, value, hints.get(name, Any))
        return cls(**content)
    except BadValueError as error:
        raise UserError(f"{path}: {error}") from None

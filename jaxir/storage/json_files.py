"""Reads JSON files and lines of .jsonl files; damaged or unexpected content raises a UserError."""

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
    """Reads a JSON file, whose content must fit the type hint `kind` (see `values.fits`)."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; copy it again, or correct the path") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or too deeply nested
        raise UserError(f"{path}: not valid JSON ({error}); correct it, or copy it again") from error
    check_value(f"{path} is damaged: its content", content, kind)
    return content


def json_line(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def made(cls: type[Made], content: Mapping[str, Any], path: Path) -> Made:
    """Returns an instance of the dataclass `cls` with the values of a JSON object, read from `path`."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in content.keys() - fields.keys():
        raise UserError(f"{path}: the key {name!r:.80} is unknown{suggest(name, fields) or '; remove it'}")
    for name, field in fields.items():
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and name not in content:
            raise UserError(f"{path}: the key {name!r} is missing; copy the file again, or make it again")
    try:
        hints = hints_of(cls)
        for name, value in content.items():
            check_value(name, value, hints.get(name, Any))
        return cls(**content)
    except BadValueError as error:
        raise UserError(f"{path}: {error}") from None

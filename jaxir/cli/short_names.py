"""Short names of what recipes set: `--learning_rate=1e-4` is `--gin.LEARNING_RATE=1e-4`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxir.cli.gin_files import macros_in, shipped_macros
from jaxir.core.errors import UsageError


def split(arguments: Sequence[str], gin_files: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits arguments that no flag takes into settings of recipes, such as --learning_rate, and others.

    Args:
      arguments: as they were typed: `--name=value`, or `--name` and `value`.
      gin_files: what they may set, beside jaxir's own recipes.

    Returns:
      {NAME: value} for macros NAME of recipes; the other arguments.
    """
    if not any(argument.startswith("--") for argument in arguments):
        return {}, list(arguments)
    macros = shipped_macros() | macros_in(gin_files)
    short, others, left = {}, [], list(arguments)
    while left:
        argument = left.pop(0)
        flag, has_value, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_").upper()
        if not flag.startswith("--") or name not in macros or flag != flag.lower():
            others.append(argument)
            continue
        if not has_value:
            if not left or left[0].startswith("--"):
                raise UsageError(f"{flag} has no value; write {flag}=...")
            value = left.pop(0)
        if name in short:
            raise UsageError(f"{flag} is given twice; keep one of them")
        short[name] = value
    return short, others


def joined(bindings: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """Returns bindings with those that short names make."""
    typed = {binding.partition("=")[0].strip() for binding in bindings}
    for name in short:
        if name in typed:
            raise UsageError(
                f"{name} is given twice, by --{name.lower()} and by --gin.{name}; keep one of them"
            )
    return [*bindings, *(f"{name}={value}" for name, value in short.items())]

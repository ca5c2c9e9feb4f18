"""From a function to a command: flags, gin, and errors of one sentence.

A command is one documented function. Its simple parameters become flags, its docstring becomes `--help`, its
defaults are the flags' defaults, and gin may bind any of its parameters. So the command, the library call and
the gin binding have the same names. A flag overrides what a gin file says; the same thing by a flag and by
`--gin.` is an error.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import docstring_parser

from jaxir.compile_cache import keep_compiled_programs
from jaxir.errors import UserError

GIN_HELP = "gin file (may be repeated); --gin.NAME=VALUE binds one parameter or macro"


def one_of(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes ways to say one thing: to type one sets aside what a gin file says of the others."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        function.one_of = names
        return function

    return note


def also_called(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes second spellings: with `also_called(output_dir="output")` --output does as --output_dir."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        function.also_called = names
        return function

    return note


def main(name: str, argv: Sequence[str] | None = None, *, example: str = "") -> int:
    """Runs the command `name` ("package.module:function") and returns the exit status.

    The function is imported by name, never taken from `__main__`, so that gin files and the command speak
    of the same object. A UserError, a full disk or an interrupt costs one sentence on standard error.
    """
    module_name, function_name = name.split(":")
    keep_compiled_programs()
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        return run(
            function, sys.argv[1:] if argv is None else argv, prog=f"python -m {module_name}", example=example
        )
    except UserError as error:
        print(f"error: {_sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EFBIG,
            errno.EACCES,
            errno.EROFS,
            errno.EPERM,
            errno.ENOENT,
        ):
            raise
        print(f"error: {error.filename or 'output'}: {error.strerror.lower()}", file=sys.stderr)
        return 1


def run(function: Callable[..., Any], argv: Sequence[str], *, prog: str, example: str) -> int:
    """Parses `argv` for `function`, binds gin where asked, and calls it."""
    parser = build_parser(function, prog=prog, example=example)
    bindings = [a.removeprefix("--gin.") for a in argv if a.startswith("--gin.")]
    for binding in bindings:
        if "=" not in binding:
            raise UserError(f"--gin.{binding} has no value; write --gin.NAME=VALUE")
    flags = vars(parser.parse_args([a for a in argv if not a.startswith("--gin.")]))
    gin_files = flags.pop("gin_file", [])
    call, bound = function, set()
    if gin_files or bindings:
        from jaxir import gin_config

        call, bound = gin_config.bind(function, gin_files, bindings, flags)
    check_required(function, bound | flags.keys(), prog)
    result = call(**flags)
    return result if isinstance(result, int) else 0


def check_required(function: Callable[..., Any], given: set[str], prog: str) -> None:
    """Raises a UserError that names the parameters still to be given, and how."""
    hints = typing.get_type_hints(function)
    missing = [n for n, p in _parameters(function).items() if p.default is p.empty and n not in given]
    objects = [n for n in missing if _simple_type(hints.get(n, str)) is None]
    flags = [f"--{n}" for n in missing if n not in objects]
    alternatives = getattr(function, "one_of", ())
    if alternatives and not given & set(alternatives):
        flags.append(" or ".join(f"--{n}" for n in alternatives))
    parts = [f"{', '.join(flags)} must be given"] if flags else []
    parts += [f"{', '.join(objects)} must be bound by a gin file (--gin_file)"] if objects else []
    if parts:
        raise UserError(f"{'; '.join(parts)} (see {prog} --help)")


def build_parser(function: Callable[..., Any], *, prog: str, example: str) -> argparse.ArgumentParser:
    """Makes a parser whose flags are the parameters of `function` that have simple types."""
    doc = docstring_parser.parse(function.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    described = {p.arg_name: " ".join((p.description or "").split()) for p in doc.params}
    description = "\n\n".join(filter(None, [doc.short_description, doc.long_description]))
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"example:\n  {example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints, others = typing.get_type_hints(function), getattr(function, "also_called", {})
    for name, parameter in _parameters(function).items():
        kind = _simple_type(hints.get(name, str))
        if kind is None:
            continue
        help_text = described.get(name, "")
        if parameter.default is not parameter.empty and parameter.default is not None:
            help_text += f" (default: {parameter.default})"
        options: dict[str, Any] = {"help": help_text.replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind is bool:
            options["type"] = _parse_bool
            options |= {"nargs": "?", "const": True, "metavar": "true|false"}
        elif typing.get_origin(kind) is typing.Literal:
            options["choices"] = typing.get_args(kind)
        elif typing.get_origin(kind) in (list, tuple):
            options |= {"type": lambda text: [part for part in text.split(",") if part], "action": "extend"}
            options["metavar"] = "A,B,..."
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        spellings = [name, *([other] if (other := others.get(name)) else [])]
        parser.add_argument(*(f"--{spelling}" for spelling in spellings), dest=name, **options)
    parser.add_argument(
        "--gin_file", action="append", default=argparse.SUPPRESS, metavar="FILE", help=GIN_HELP
    )
    return parser


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _simple_type(hint: Any) -> Any | None:
    """Returns the type a flag can hold, `None` for anything that only gin or Python can give."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = [a for a in typing.get_args(hint) if a is not type(None)]
        simple = [s for s in map(_simple_type, arms) if s is not None]
        if set(simple) == {int, float}:
            return number
        return simple[0] if len(simple) == len(arms) else None
    if hint in (str, int, float, bool) or typing.get_origin(hint) is typing.Literal:
        return hint
    if (
        typing.get_origin(hint) in (list, tuple, typing.get_origin(Sequence[str]))
        and typing.get_args(hint)[0] is str
    ):
        return list[str]
    return None


def number(text: str) -> int | float:
    """Returns a whole number as an int, any other as a float; named as errors and --help name it."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _sentence(error: BaseException) -> str:
    """Returns the message without the call stack that gin appends to it."""
    return str(error).split("\n  In call to configurable")[0]

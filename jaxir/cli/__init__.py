"""Turns a function into a command with flags, gin files and error messages.

A command is one documented function. Its parameters of simple types become flags, its docstring becomes
`--help`, and gin may bind any of its parameters. A flag overrides a gin file. Setting one thing both by a
flag and by `--gin.` is an error.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import inspect
import os
import re
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NoReturn

import docstring_parser

from jaxir.core import error_report, values
from jaxir.core.choices import rules_of
from jaxir.core.errors import BadValueError, Terminated, UsageError, UserError, causes, suggest
from jaxir.core.process_signals import hearing_terminals_end, unwinding_on_sigterm
from jaxir.core.progress import drop
from jaxir.core.values import simple
from jaxir.runtime.compile_cache import keep_compiled_programs

# Number of new objects after which Python collects garbage. With its default of 700, commands start 12 %
# slower, because imports and tracing create millions of objects that stay alive.
YOUNG_OBJECTS = 10_000
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit statuses after Ctrl-C and SIGTERM
# The words of the running command line, from "python" on, for messages that suggest a command.
TYPED: list[str] = []
GIN_HELP = (
    "gin file (may be repeated); --NAME=VALUE sets the parameter of that name of any object in the gin"
    " files, --gin.OBJECT.PARAMETER=VALUE sets the parameter of one object"
)


def main(name: str, argv: Sequence[str] | None = None, *, example: str = "", action: str = "") -> int:
    """Runs the command `name` ("package.module:function") and returns its exit status.

    The status is 1 after an error that a user can fix, 2 after a malformed command line, 70 after a bug. It
    is 130 after Ctrl-C, 143 after SIGTERM, and 141 if the reader of the output is gone. `action` is the word
    before the flags if a module has several commands. The function is imported by its name, not taken from
    `__main__`, so that gin files bind the same object.
    """
    module_name = name.partition(":")[0]
    arguments = sys.argv[1:] if argv is None else argv
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        with unwinding_on_sigterm(), hearing_terminals_end():
            keep_compiled_programs()
            prog = f"python -m {module_name} {action}".rstrip()
            status = run(_load(name), arguments, prog=prog, example=example)
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return _stopped("interrupted", signal.SIGINT)
    except Terminated:
        return _stopped("stopped by SIGTERM", signal.SIGTERM)
    except BrokenPipeError:
        drop(sys.stdout.fileno())
        return 141
    except Exception as error:
        # gin raises copies of errors, which lack errno and path; find the original error.
        error = next(e for e in causes(error, implicit=True) if "In call to configurable" not in str(e))
        if isinstance(error, OSError) and error.errno in error_report.OF_OUTPUTS:
            drop(sys.stdout.fileno())  # discard stdout's buffer, because writing it would fail again at exit
        sentence, status = error_report.explain(error)
        print(f"error: {sentence}", file=sys.stderr)
        return status


def start(name: str, examples: str) -> NoReturn:
    """Runs the command `name` ("package.module:function") and ends the process; see `command_lines`."""
    end(main(name, example=command_lines(name.partition(":")[0], examples)))


def command_lines(module: str, examples: str) -> str:
    """Returns the example commands for --help; each line of `examples` has the arguments of one command."""
    return "\n  ".join(f"python -m {module} {arguments}" for arguments in examples.splitlines())


def end(status: int) -> NoReturn:
    """Ends the process of a command with the status that `main` returned.

    A stopped command skips the interpreter's shutdown, which would wait for JAX's compilation thread and then
    crash, because JAX's client is destroyed first.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if Ctrl-C arrives during shutdown
    gc.collect(1)  # runs the finalizers of recent objects in reference cycles; all take 0.1 s
    if status in STOPPED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    gc.freeze()  # saves 0.3 s of collections during shutdown
    raise SystemExit(status)


def _stopped(words: str, number: signal.Signals) -> int:
    # Python would warn about coroutines that libraries did not await.
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    print(words, file=sys.stderr)
    return 128 + number


def _load(name: str) -> Callable[..., Any]:
    module_name, function_name = name.split(":")
    return getattr(importlib.import_module(module_name), function_name)


def run(function: Callable[..., Any], argv: Sequence[str], *, prog: str, example: str) -> int:
    """Parses `argv` for `function`, binds gin files and settings if any are given, and calls the function."""
    TYPED[:] = [*prog.split(), *argv]
    parser = build_parser(function, prog=prog, example=example)
    bindings = [a.removeprefix("--gin.") for a in argv if a.startswith("--gin.")]
    for binding in bindings:
        if "=" not in binding:
            raise UserError(f"--gin.{binding} has no value; write --gin.NAME=VALUE")
    parsed, unknown = parser.parse_known_args([a for a in argv if not a.startswith("--gin.")])
    rules, flags, short = rules_of(function), vars(parsed), []
    if rules.bound_as or rules.instead_of_gin or "gin_file" in flags:
        from jaxir.cli import short_names

        short, unknown = short_names.split(unknown)
    if unknown:
        raise UsageError(_unknown(unknown[0], parser, prog))
    for flag, value in flags.items():
        values.check_not_empty(f"--{flag}", value)
    gin_files = flags.pop("gin_file", [])
    if flag := next((name for name in rules.hands_over if name in flags), None):
        function, prog = _load(rules.hands_over[flag]), f"{prog} --{flag}"
        rules, (first, *others) = rules_of(function), _parameters(function)
        flags = {first: flags[flag]} | {name: flags[name] for name in others if name in flags}
    call, bound = functools.partial(function, **flags), flags.keys()
    if rules.instead_of_gin in flags:
        _check_no_gin(f"--{rules.instead_of_gin}", prog, [*gin_files, *bindings], short)
    elif gin_files or bindings or short:
        from jaxir.cli import gin_config
        from jaxir.cli.short_names import UnknownFlagError

        of = _load(rules.bound_as) if rules.bound_as else function
        try:
            call, bound = gin_config.bind(of, gin_files, [*bindings, *short], flags, command=function)
        except UnknownFlagError as error:
            if error.short:
                raise
            raise UsageError(_unknown(error.flag, parser, prog, error.known)) from None
    check_required(function, bound, prog)
    result = call()
    return result if isinstance(result, int) else 0


def _check_no_gin(flag: str, prog: str, gin: Sequence[str], short: Sequence[str]) -> None:
    if gin:
        raise UsageError(f"{flag} is a complete recipe in Python: leave out gin files and --gin. bindings")
    for setting in short:
        name = setting.partition("=")[0]
        raise UsageError(f"{name} only applies to gin files, not to {prog} {flag}: set it in the recipe")


def _unknown(argument: str, parser: argparse.ArgumentParser, prog: str, settings: Sequence[str] = ()) -> str:
    """Returns the message for an unknown argument; `settings` are flags that set a recipe's parameters."""
    flag = argument.split("=")[0]
    if not flag.startswith("-"):
        return f"{argument!r:.80} follows no flag; write flags as --NAME=VALUE (see {prog} --help)"
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    meant = (
        # Finds the flag that a misspelling, or another tool's name of a flag, stands for.
        suggest(flag, [*known, *settings], likeness=1.0)
        or suggest(flag, known)
        or suggest(flag, settings, likeness=0.8)
    )
    return f"there is no flag {flag:.80}{meant or f' (see {prog} --help)'}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[^/:]+)[^:]*: ", r"\1 ", message)
        message = re.sub(
            r"^(--\S+) expected (one|at least one) argument$", r"\1 has no value; write \1=...", message
        )
        raise UsageError(message)


def check_required(function: Callable[..., Any], given: Collection[str], prog: str) -> None:
    """Raises a UserError if required parameters are missing; the message says how to give them."""
    rules, hints = rules_of(function), typing.get_type_hints(function, include_extras=True)
    missing = [n for n, p in _parameters(function).items() if p.default is p.empty and n not in given]
    alternatives = rules.one_of
    if rules.instead_of_gin in given:
        missing, alternatives = [n for n in missing if n not in function.of_settings], ()
    objects = [n for n in missing if simple(hints.get(n, str)) is None]
    flags = [f"--{n}" for n in missing if n not in objects]
    if alternatives and not any(name in given for name in alternatives):
        flags.append(" or ".join(f"--{n}" for n in alternatives))
    parts = [f"{', '.join(flags)} must be given"] if flags else []
    parts += [f"{', '.join(objects)} must be bound by a gin file (--gin_file)"] if objects else []
    if parts:
        raise UserError(f"{'; '.join(parts)} (see {prog} --help)")


def build_parser(function: Callable[..., Any], *, prog: str, example: str) -> argparse.ArgumentParser:
    """Returns a parser whose flags are the parameters of `function` that have simple types."""
    doc = docstring_parser.parse(function.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    described = {p.arg_name: " ".join((p.description or "").split()) for p in doc.params}
    parser = _Parser(
        prog=prog,
        description="\n\n".join(filter(None, [doc.short_description, doc.long_description])),
        epilog=f"example:\n  {example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(function, include_extras=True)
    rules = rules_of(function)
    for name, parameter in _parameters(function).items():
        kind = simple(hints.get(name, str))
        if kind is None:
            continue
        help_text = described.get(name, "")
        if parameter.default is not parameter.empty and parameter.default is not None:
            help_text += f" (default: {parameter.default})"
        options: dict[str, Any] = {"help": help_text.replace("%", "%%"), "default": argparse.SUPPRESS}
        options["type"] = functools.partial(_parse, hint=hints.get(name, str))
        if kind is bool:
            options |= {"nargs": "?", "const": True, "metavar": "true|false"}
        elif typing.get_origin(kind) is Literal:
            options["metavar"] = "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        elif kind == list[str]:
            options |= {"action": "extend", "metavar": "A,B,..."}
        else:
            options["metavar"] = kind.__name__.upper()
        spellings = filter(None, (name, rules.also_called.get(name)))
        parser.add_argument(*(f"--{spelling}" for spelling in spellings), dest=name, **options)
    for flag, name in rules.hands_over.items():
        other = _load(name)
        summary = docstring_parser.parse(other.__doc__).short_description
        help_text = f"runs `python -m {name.partition(':')[0]} --{next(iter(_parameters(other)))}`: {summary}"
        parser.add_argument(f"--{flag}", default=argparse.SUPPRESS, metavar="STR", help=help_text)
    parser.add_argument(
        "--gin_file", action="append", default=argparse.SUPPRESS, metavar="FILE", help=GIN_HELP
    )
    return parser


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _parse(text: str, hint: Any) -> Any:
    try:
        return values.parse(text, hint)
    except BadValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

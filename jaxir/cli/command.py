"""From a function to a command: flags, gin, and errors of one sentence.

A command is one documented function. Its simple parameters become flags, its docstring becomes `--help`, its
defaults are the flags' defaults, and gin may bind any of its parameters. So the command, the library call and
the gin binding have the same names. A flag overrides what a gin file says; the same thing by a flag and by
`--gin.` is an error.
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

from jaxir.core import choices, error_report, values
from jaxir.core.errors import BadValueError, Terminated, UsageError, UserError, suggest
from jaxir.core.process_signals import hearing_terminals_end, open_streams, unwinding_on_sigterm
from jaxir.core.progress import drop
from jaxir.core.values import simple
from jaxir.runtime.compile_cache import keep_compiled_programs

# Python looks for cycles after each 700 new objects. Imports and traces make millions, which stay: a command
# that looks less often starts an eighth sooner.
YOUNG_OBJECTS = 10_000
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
TYPED: list[str] = []  # the command line that `run` works on, from "python" on
GIN_HELP = (
    "gin file (may be repeated); --name=VALUE sets the parameter of this name that its objects have,"
    " --gin.object.parameter=VALUE any"
)


def _note(**attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that gives a command's function these attributes."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        vars(function).update(attributes)
        return function

    return note


def one_of(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes ways to say one thing: to type one sets aside what a gin file says of the others."""
    return _note(one_of=names)


def gives_way(**to: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes that a gin file's value of a parameter does not limit what is typed.

    With `gives_way(min_steps="epochs")` a typed --epochs sets min_steps to the function's own default, unless
    min_steps is typed too.
    """
    return _note(gives_way=to)


def also_called(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes second spellings: with `also_called(output_dir="output")` --output does as --output_dir."""
    return _note(also_called=names)


def hands_over(**commands: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes flags with which another command ("package.module:function") is what is asked for.

    The flag's value is that of the command's own first parameter; of the other flags it has those it knows.
    """
    return _note(hands_over=commands)


def bound_as(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes that gin files speak of another command's parameters ("package.module:function")."""
    return _note(bound_as=name)


def takes(
    settings: type, *, only: Collection[str] | None = None, **fixed: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a command take the fields of a dataclass as parameters, and gives it an object of them.

    Args:
      settings: the dataclass; its `Attributes:` become those of the command's documentation.
      only: which fields; None for all.
      **fixed: values of others that have no default.
    """
    fields = inspect.signature(settings).parameters
    chosen = {name: p for name, p in fields.items() if only is None or name in only}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _, *own = inspect.signature(function).parameters.values()

        def command(**given: Any) -> Any:
            of_settings = {name: given.pop(name) for name in list(given) if name in chosen}
            return function(settings(**fixed, **of_settings), **given)

        command.has_recipes = True
        return choices.with_parameters(command, function, own, chosen.values(), [settings])

    return decorate


def main(name: str, argv: Sequence[str] | None = None, *, example: str = "", action: str = "") -> int:
    """Runs the command `name` ("package.module:function") and returns the exit status.

    `action` is what stands before the flags, where a module has several commands.

    The function is imported by name, never taken from `__main__`, so that gin files and the command speak
    of the same object. Whatever goes wrong costs one sentence on standard error (see `error_report`): the
    status is 1 for what a user can mend, 2 for a command line that is none, 70 for a fault of ours, 130 for
    Ctrl-C, 141 for a reader of the output that has gone, 143 for SIGTERM.
    """
    module_name = name.partition(":")[0]
    arguments = sys.argv[1:] if argv is None else argv
    open_streams()
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        with unwinding_on_sigterm(), hearing_terminals_end():
            keep_compiled_programs()
            function = _load(name)
            prog = f"python -m {module_name} {action}".rstrip()
            status = run(function, arguments, prog=prog, example=example)
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return _stopped("interrupted", signal.SIGINT)
    except Terminated:
        return _stopped("stopped by SIGTERM", signal.SIGTERM)
    except BrokenPipeError:
        _drop_output()
        return 141
    except Exception as raised:
        error = _as_raised(raised)
        if isinstance(error, OSError) and error.errno in error_report.OF_OUTPUTS:
            _drop_output()  # it may be standard output: what is in its buffer would fail again at the end
        sentence, status = error_report.explain(error)
        print(f"error: {sentence}", file=sys.stderr)
        return status


def _as_raised(error: BaseException) -> BaseException:
    """Returns what a bound function has raised, of which gin raises a copy that has no errno and no path."""
    while error.__context__ is not None and "In call to configurable" in str(error):
        error = error.__context__
    return error


def end(status: int) -> NoReturn:
    """Ends the process of a command with the status that `main` returned.

    A command that was stopped leaves without the interpreter's farewell. JAX compiles on a thread of its own,
    which no signal reaches: the process would wait for it, and die of a segmentation fault, for JAX's client
    goes first. What the command held is closed by then: its stack was unwound.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends what is done by now without a traceback
    gc.collect()  # what closes itself when it goes, and is part of a cycle
    if status in STOPPED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    gc.freeze()  # or the interpreter looks for cycles in all of JAX, time and again: 0.3 s
    raise SystemExit(status)


def _stopped(words: str, number: signal.Signals) -> int:
    """Says that a command was stopped by a signal, and nothing else; returns the status."""
    # What a library was about to await goes now, of which Python would complain.
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    print(words, file=sys.stderr)
    return 128 + number


def _load(name: str) -> Callable[..., Any]:
    module_name, function_name = name.split(":")
    return getattr(importlib.import_module(module_name), function_name)


def _drop_output() -> None:
    """Has what is still to be written to standard output go nowhere."""
    drop(sys.stdout.fileno())


def run(function: Callable[..., Any], argv: Sequence[str], *, prog: str, example: str) -> int:
    """Parses `argv` for `function`, binds gin where asked, and calls it."""
    TYPED[:] = [*prog.split(), *argv]
    parser = build_parser(function, prog=prog, example=example)
    bindings = [a.removeprefix("--gin.") for a in argv if a.startswith("--gin.")]
    for binding in bindings:
        if "=" not in binding:
            raise UserError(f"--gin.{binding} has no value; write --gin.NAME=VALUE")
    parsed, unknown = parser.parse_known_args([a for a in argv if not a.startswith("--gin.")])
    short: list[str] = []
    if hasattr(function, "has_recipes") or hasattr(function, "bound_as") or "gin_file" in parsed:
        from jaxir.cli import short_names

        short, unknown = short_names.split(unknown)
    if unknown:
        raise UsageError(_unknown(unknown[0], parser, prog))
    flags = vars(parsed)
    for flag, value in flags.items():
        values.check_not_empty(f"--{flag}", value)
    gin_files = flags.pop("gin_file", [])
    asked, prog, flags = _handed_over(function, prog, flags)
    if short and asked is not function and not hasattr(asked, "bound_as"):
        flag = short[0].partition("=")[0]
        raise UsageError(f"{flag} sets what a gin file names, and {prog} reads none: set it there")
    function = asked
    call, bound = function, set()
    if gin_files or bindings or short:
        from jaxir.cli import gin_config
        from jaxir.cli.short_names import UnknownFlagError

        try:
            if hasattr(function, "bound_as"):
                known = _parameters(function)
                of = _load(function.bound_as)
                flags |= gin_config.arguments(of, gin_files, [*bindings, *short], flags, known)
            else:
                call, bound = gin_config.bind(function, gin_files, [*bindings, *short], flags)
        except UnknownFlagError as error:
            raise UsageError(_unknown(error.flag, parser, prog, error.known)) from None
    check_required(function, bound | flags.keys(), prog)
    result = call(**flags)
    return result if isinstance(result, int) else 0


def _handed_over(
    function: Callable[..., Any], prog: str, flags: dict[str, Any]
) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    """Returns the command that the flags ask for, its name and its flags; see `hands_over`."""
    while flag := next((name for name in getattr(function, "hands_over", {}) if name in flags), None):
        function, prog = _load(function.hands_over[flag]), f"{prog} --{flag}"
        first, *others = _parameters(function)
        known = {*others, *getattr(function, "hands_over", {})}
        flags = {first: flags[flag]} | {name: value for name, value in flags.items() if name in known}
    return function, prog, flags


def _unknown(argument: str, parser: argparse.ArgumentParser, prog: str, settings: Sequence[str] = ()) -> str:
    """Returns what to say of an argument that no flag takes; `settings` are flags of the recipe's."""
    flag = argument.split("=")[0]
    if not flag.startswith("-"):
        return f"{argument!r:.80} belongs to no flag; flags are written --NAME=VALUE (see {prog} --help)"
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    meant = (
        suggest(flag, [*known, *settings], likeness=1.0)  # another spelling, or another tool's name
        or suggest(flag, known)
        or suggest(flag, settings, likeness=0.8)
    )
    return f"there is no flag {flag:.80}{meant or f' (see {prog} --help)'}"


class _Parser(argparse.ArgumentParser):
    """argparse, with errors of one sentence."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "--" in arg_strings:  # which argparse would drop, and give the flag an empty list
            raise argparse.ArgumentError(action, "cannot be '--'")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[^/:]+)[^:]*: ", r"\1 ", message)
        message = re.sub(
            r"^(--\S+) expected (one|at least one) argument$", r"\1 has no value; write \1=...", message
        )
        raise UsageError(message)


def check_required(function: Callable[..., Any], given: set[str], prog: str) -> None:
    """Raises a UserError that names the parameters still to be given, and how."""
    hints = typing.get_type_hints(function, include_extras=True)
    missing = [n for n, p in _parameters(function).items() if p.default is p.empty and n not in given]
    objects = [n for n in missing if simple(hints.get(n, str)) is None]
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
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=f"example:\n  {example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(function, include_extras=True)
    others = getattr(function, "also_called", {})
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
        spellings = [name, *([other] if (other := others.get(name)) else [])]
        parser.add_argument(*(f"--{spelling}" for spelling in spellings), dest=name, **options)
    for flag, name in getattr(function, "hands_over", {}).items():
        other = _load(name)
        summary = docstring_parser.parse(other.__doc__).short_description
        help_text = f"as `python -m {name.partition(':')[0]} --{next(iter(_parameters(other)))}`: {summary}"
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

"""`jaxir`, or `python -m jaxir`: lists the commands, or runs one of them.

`jaxir train ...` replaces this process by `python -m jaxir.train ...`. To list the commands fast, their
descriptions are read from the sources without importing them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import textwrap

from jaxir.core.errors import suggest
from jaxir.core.installation import PACKAGE
from jaxir.version import __version__

COMMANDS = {
    "To begin with": ("quickstart",),
    "Data": ("prepare", "sample", "pydocs"),
    "Training": ("train", "plan", "mine", "rounds", "grid"),
    "Search": ("encode", "index", "search", "rerank", "read", "fuse", "expand", "serve", "sidecar"),
    "Evaluation": ("evaluate", "mteb", "analyze"),
    "Models in and out": ("convert", "whiten", "export"),
}


def main() -> int:
    """Answers `--help`, `--version` and mistakes; otherwise replaces this process by the command."""
    command, *arguments = sys.argv[1:] or ["help"]
    prog = "python -m jaxir" if sys.argv[0].endswith("__main__.py") else "jaxir"
    if command == "--version":
        print(f"jaxir {__version__}")
        return 0
    helps = ("help", "--help", "-h")
    if command in helps:
        if not arguments or arguments[0] in helps:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback if the output goes to `head`
            print(overview(prog))
            return 0
        # Turn `jaxir help expand generate` into `jaxir expand generate --help`.
        command, arguments = arguments[0], [*arguments[1:], "--help"]
    command = command.removeprefix("jaxir.")
    names = [name for group in COMMANDS.values() for name in group]
    if command not in names:
        more = (
            suggest(command, [*names, "help", "--version"], likeness=0.65) or f" (`{prog} help` lists them)"
        )
        print(f"error: there is no command {command!r}{more}", file=sys.stderr)
        return 2
    import subprocess  # imported here, because listing the commands does not need it

    options = subprocess._args_from_interpreter_flags()  # keeps Python's options, such as -X utf8
    sys.stdout.flush()
    return os.execv(sys.executable, [sys.executable, *options, "-m", f"jaxir.{command}", *arguments])


def overview(prog: str) -> str:
    """Returns a line for each command, wrapped to the terminal's width."""
    width = shutil.get_terminal_size().columns
    lines = [f"usage: {prog} COMMAND [--FLAG=VALUE ...]"]
    for title, names in COMMANDS.items():
        lines += ["", f"{title}:"]
        for name in names:
            text = f"{name:11} {summary(name)}"
            lines.append(textwrap.fill(text, width, initial_indent="  ", subsequent_indent=" " * 14))
    lines += ["", f"`{prog} help COMMAND` has its flags and an example. This is jaxir {__version__}."]
    return "\n".join(lines)


def summary(command: str) -> str:
    """Returns the first line of a command's docstring, without importing it."""
    path, function = PACKAGE / f"{command}.py", command
    if command == "sidecar":
        path, function = PACKAGE / "sidecar" / "install.py", "install"
    elif command == "expand":
        function = "main"
    source = path.read_text(encoding="utf-8")
    return re.search(rf'^def {function}\(.*?"""(.*?)(?:"""|$)', source, re.DOTALL | re.MULTILINE)[1]


if __name__ == "__main__":
    raise SystemExit(main())

"""The example that ends each command's --help: its flags are those of the command that it names."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent / "jaxir"


def examples() -> dict[str, str]:
    """Returns what each `cli.main("jaxir.NAME:function", example=...)` says; other calls are no commands."""
    found = {}
    for path in sorted(ROOT.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "cli.main":
                for given in (word.value for word in node.keywords if word.arg == "example"):
                    command = ast.literal_eval(node.args[0])
                    named = isinstance(given, ast.Name)
                    module = importlib.import_module(command.partition(":")[0]) if named else None
                    found[command] = getattr(module, given.id) if named else ast.literal_eval(given)
    return found


EXAMPLES = examples()


def test_every_command_has_one():
    assert len(EXAMPLES) >= 17 and all(EXAMPLES.values())


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_has_flags_that_there_are(command):
    module, _, name = command.partition(":")
    known = {*inspect.signature(getattr(importlib.import_module(module), name)).parameters, "gin_file"}
    words = EXAMPLES[command].split()
    assert f"python -m {module}" in " ".join(words)
    assert {
        flag[1] for word in words if (flag := re.match(r"--(\w+)", word)) and "--gin." not in word
    } <= known

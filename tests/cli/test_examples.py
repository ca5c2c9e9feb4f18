import importlib
import inspect
import re

import pytest

from tests.documentation import EXAMPLES


@pytest.mark.parametrize("command", EXAMPLES)
def test_flags_of_an_example_exist(command):
    module, _, name = command.partition(":")
    known = {*inspect.signature(getattr(importlib.import_module(module), name)).parameters, "gin_file"}
    words = EXAMPLES[command].split()
    flags = {flag[1] for word in words if (flag := re.match(r"--(\w+)", word)) and "--gin." not in word}
    assert flags <= known and EXAMPLES[command].startswith(f"python -m {module.removesuffix('.install')}")

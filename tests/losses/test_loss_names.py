"""The losses are functions of `jaxir.losses`, although modules there have the same names."""

import importlib
import subprocess
import sys

import jaxir
from jaxir import losses

CODE = """
import jaxir.losses.samtone
assert callable(jaxir.losses.samtone) and callable(jaxir.losses.gist), "a module has replaced the function"
"""


def test_losses_are_functions_of_the_package():
    assert all(callable(getattr(losses, name)) for name in losses.__all__)
    assert losses.samtone is jaxir.samtone
    # In a new process, importing a module first does not replace the function of the same name.
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)


def test_gin_still_imports_the_modules():
    for name in ("samtone", "gist", "pair", "bce", "nt_xent", "matryoshka"):
        assert getattr(importlib.import_module(f"jaxir.losses.{name}"), name) is getattr(losses, name)

"""All commands and their outputs."""

import importlib

from jaxir.__main__ import COMMANDS

COMMAND_NAMES = [name for names in COMMANDS.values() for name in names]
OF_EXPAND = ["expand retrieve", "expand rerank", "expand choose", "expand targets", "expand folds"]


def function_of(command):
    others = {"sidecar": "jaxir.sidecar.install:install", "expand": "jaxir.expand:generate"}
    others |= {name: f"jaxir.{name.replace(' ', ':')}" for name in OF_EXPAND}
    module = others.get(command, f"jaxir.{command}:{command}")
    path, name = module.split(":")
    return module, getattr(importlib.import_module(path), name)


OUTPUTS = [
    (command, name, kind)
    for command in [*COMMAND_NAMES, *OF_EXPAND]
    for name, kind in getattr(function_of(command)[1], "outputs", {}).items()
]

"""Settings as texts that are the same in every process, and in what two of them differ."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any


class Described(str):
    """A text `Name(field=value, ...)` that knows which of its fields have their defaults.

    Attributes:
      defaults: texts `Name.field=value`, of the fields within fields too.
    """

    defaults: Collection[str] = ()


def describe(value: Any, bindings: Callable[[Any], Mapping[str, Any]] = lambda _: {}) -> Described:
    """Returns a text that is the same in every process for equal settings: names, fields and defaults.

    Args:
      value: a settings object, a function, or a plain value, nested at will.
      bindings: the arguments of a function that are bound elsewhere (by gin, say).
    """
    found: set[str] = set()

    def call(function: Any, given: Mapping[str, Any]) -> str:
        parameters = inspect.signature(function).parameters
        defaults = {n: p.default for n, p in parameters.items() if p.default not in (p.empty, None)}
        name = f"{function.__module__}.{function.__qualname__}"
        return listed(name, defaults | dict(bindings(function)) | dict(given), defaults)

    def listed(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
        texts = {k: text(v) for k, v in values.items()}
        found.update(f"{name}.{k}={texts[k]}" for k, v in defaults.items() if text(v) == texts[k])
        return f"{name}({', '.join(f'{k}={v}' for k, v in texts.items())})"

    def text(value: Any) -> str:
        if isinstance(value, functools.partial):
            parameters = inspect.signature(value.func).parameters
            return call(value.func, dict(zip(parameters, value.args, strict=False)) | value.keywords)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return call(value, {})
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return listed(type(value).__qualname__, fields, _defaults(value))
        if isinstance(value, Mapping):
            return listed("dict", {str(k): v for k, v in value.items()}, {})
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, str | int | float | bool | None):
            return repr(value)
        return listed(type(value).__qualname__, {k: v for k, v in vars(value).items() if k[0] != "_"}, {})

    described = Described(text(value))
    described.defaults = frozenset(found)
    return described


def _defaults(value: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass's fields, of those that have one."""
    fields = dataclasses.fields(value)
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return made | {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def difference(name: str, was: str, now: str) -> str | None:
    """Says in which setting two texts of `describe` differ; None where they do not.

    A field that `was` does not know, and that has its default now, is no difference: it came later.

    Args:
      name: what they describe.
      was: of a run, as it was written.
      now: the settings that are given; with `defaults` where it is a `Described`.
    """
    if was == now:
        return None
    try:
        trees = [ast.parse(text, mode="eval").body for text in (was, now)]
    except SyntaxError:  # of a local class, say
        return f"{name}={was}, not {now}"
    return next(_differences(name, *trees, getattr(now, "defaults", ())), None)


def _differences(name: str, was: ast.expr, now: ast.expr, defaults: Collection[str]) -> Iterator[str]:
    if isinstance(was, ast.List) and isinstance(now, ast.List) and len(was.elts) == len(now.elts):
        for place, pair in enumerate(zip(was.elts, now.elts, strict=True)):
            yield from _differences(f"{name}[{place}]", *pair, defaults)
        return
    kinds = [ast.unparse(x.func) if isinstance(x, ast.Call) else None for x in (was, now)]
    if kinds[0] is None or kinds[0] != kinds[1]:
        if ast.dump(was) != ast.dump(now):
            yield f"{name}={ast.unparse(was)}, not {ast.unparse(now)}"
        return
    old, new = ({word.arg: word.value for word in x.keywords} for x in (was, now))
    for field in [*old, *(field for field in new if field not in old)]:
        if field in old and field in new:
            yield from _differences(f"{name}.{field}", old[field], new[field], defaults)
        elif field in old:
            yield f"{name}.{field}={ast.unparse(old[field])}, which there is no more"
        elif f"{kinds[0]}.{field}={ast.unparse(new[field])}" not in _normal(defaults):
            yield f"no {name}.{field}, not with {ast.unparse(new[field])}"


def _normal(defaults: Collection[str]) -> set[str]:
    """Returns texts `Name.field=value` as Python writes them."""
    named = (text.partition("=") for text in defaults)
    return {f"{name}={ast.unparse(ast.parse(value, mode='eval'))}" for name, _, value in named}

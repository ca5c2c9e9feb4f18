"""Describes settings as texts that are the same in every process, and finds the difference of two texts."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxir.training.run.class_settings import beyond_fields
from jaxir.training.run.function_code import code_of, enclosed, innermost, is_installed

CODE = "__code__"  # name under which a function's arguments include the hash of its code
# Parts of the names of local functions, and their replacements while a text is parsed as Python.
_LOCAL = {"<lambda>": "__lambda__", "<locals>": "__locals__"}


class Described(str):
    """A text `Name(field=value, ...)`.

    Attributes:
      defaults: a text `Name.field=value` for each field, also of nested objects, that has its default value.
    """

    defaults: Collection[str] = ()


def describe(
    value: Any,
    bindings: Callable[[Any], Mapping[str, Any]] = lambda _: {},
    *,
    class_attributes: bool = True,
) -> Described:
    """Returns a text that is the same in every process for equal settings: names, fields and defaults.

    Args:
      value: a settings object, a function, or a plain value; they may be nested.
      bindings: maps a function to its arguments that gin or other code binds.
      class_attributes: whether to include the plain attributes of user-defined classes.
    """
    describer = _Describer(bindings, class_attributes)
    described = Described(describer.text(value))
    described.defaults = frozenset(describer.defaults)
    return described


class _Describer:
    """Describes values, and collects in `defaults` the fields that have their default value."""

    def __init__(self, bindings: Callable[[Any], Mapping[str, Any]], class_attributes: bool):
        self._bindings, self._class_attributes = bindings, class_attributes
        self.defaults: set[str] = set()
        self._open: set[int] = set()  # ids of the enclosing values that are being described

    def text(self, value: Any) -> str:
        if isinstance(value, str | int | float | bool | None) and not isinstance(value, enum.Enum):
            return repr(value)
        if id(value) in self._open:  # the value contains itself, as a recursive local function does
            return "..."
        self._open.add(id(value))
        try:
            return self._of_object(value)
        finally:
            self._open.remove(id(value))

    def _of_object(self, value: Any) -> str:
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, type | types.ModuleType):
            return _name(value)
        if isinstance(value, types.MethodType):
            return self._listed(_name(value.__func__), {"self": value.__self__}, {})
        if callable(value) and isinstance(getattr(value, "__name__", None), str):  # true for jax.jit(...)
            return self._call(value, {})
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            # Earlier versions only recorded fields. Count other settings as defaults, which a resumed run may
            # add.
            later = beyond_fields(value, class_attributes=self._class_attributes)
            return self._listed(type(value).__qualname__, later | fields, later | _defaults(value))
        if isinstance(value, Mapping):
            return self._listed("dict", {str(k): v for k, v in value.items()}, {})
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, set | frozenset):
            return f"[{', '.join(sorted(map(self.text, value)))}]"
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, np.generic):
            return repr(value.item())
        if isinstance(value, np.ndarray | jax.Array):
            return _array(value)
        if isinstance(value, bytes | complex | range | re.Pattern | types.EllipsisType):
            return repr(value)
        if isinstance(value, np.dtype | os.PathLike):
            return repr(str(value))
        fields = _slots(value) | getattr(value, "__dict__", {})
        public = {k: v for k, v in fields.items() if k[0] != "_"}
        later = beyond_fields(value, class_attributes=self._class_attributes)
        own = {k: later[k] for k in later.keys() - public}
        return self._listed(type(value).__qualname__, later | public, own)

    def _partial(self, value: functools.partial) -> str:
        try:
            names = list(inspect.signature(value.func).parameters)
        except ValueError:
            names = []
        names += [f"argument_{n}" for n in range(len(names), len(value.args))]
        return self._call(value.func, dict(zip(names, value.args, strict=False)) | value.keywords)

    def _call(self, function: Any, given: Mapping[str, Any]) -> str:
        core = innermost(function)
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # the function is implemented in C
            parameters = {}
        defaults = {n: p.default for n, p in parameters.items() if p.default not in (p.empty, None)}
        values, later = defaults | dict(self._bindings(function)) | dict(given), {}
        if isinstance(core, types.FunctionType):
            later = enclosed(core)
            if not is_installed(core):
                later[CODE] = code_of(core, self.text)
        # Earlier versions recorded neither closures nor code. Count them as defaults, which may be added.
        return self._listed(_name(core), later | values, defaults | later)

    def _listed(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
        texts = {k: self.text(v) for k, v in values.items()}
        usual = {k for k, v in defaults.items() if v is values[k] or self.text(v) == texts[k]}
        self.defaults.update(f"{name}.{k}={texts[k]}" for k in usual)
        return f"{name}({', '.join(f'{k}={v}' for k, v in texts.items())})"


def _name(value: Any) -> str:
    called = getattr(value, "__qualname__", value.__name__)
    module = getattr(value, "__module__", None)
    return f"{module}.{called}" if isinstance(module, str) else called


def _slots(value: Any) -> dict[str, Any]:
    slots = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = [name for found in slots for name in ([found] if isinstance(found, str) else found)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _array(value: np.ndarray | jax.Array) -> str:
    """Returns an array's shape, type and, if this process has all of the array, a hash of its content."""
    shape = f"array(shape={list(value.shape)}, dtype={str(value.dtype)!r}"
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            return f"{shape})"
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    digest = hashlib.sha256(np.ascontiguousarray(jax.device_get(value)).tobytes()).hexdigest()
    return f"{shape}, content={digest[:16]!r})"


def _defaults(value: Any) -> dict[str, Any]:
    fields = dataclasses.fields(value)
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return made | {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def difference(name: str, was: str, now: str) -> str | None:
    """Returns the first difference between two texts of `describe`, recorded and new; None if equal.

    A field that only `now` has is ignored if it has its default value: later code added the field.
    """
    if was == now:
        return None
    try:
        trees = [ast.parse(_as_python(text), mode="eval").body for text in (was, now)]
    except SyntaxError:  # raised, for example, if a key of a dict is not an identifier
        return f"{name}={was}, not {now}"
    found = next(_differences(name, *trees, _normal(getattr(now, "defaults", ()))), None)
    for local, replacement in _LOCAL.items():
        found = found and found.replace(replacement, local)
    return found


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
        if field == CODE:
            if field in old and field in new and _other_code(old[field], new[field]):
                yield f"other code in {name} ({kinds[0]})"
            continue
        if field in old and field in new:
            yield from _differences(f"{name}.{field}", old[field], new[field], defaults)
        elif field in old:
            yield f"{name}.{field}={ast.unparse(old[field])}, a setting that no longer exists"
        elif f"{kinds[0]}.{field}={ast.unparse(new[field])}" not in defaults:
            yield f"no setting {name}.{field}, which is now {ast.unparse(new[field])}"


def _normal(defaults: Collection[str]) -> set[str]:
    """Returns texts `Name.field=value`, with values formatted as `ast.unparse` formats them."""
    named = (_as_python(text).partition("=") for text in defaults)
    return {f"{name}={ast.unparse(ast.parse(value, mode='eval'))}" for name, _, value in named}


def _other_code(was: ast.expr, now: ast.expr) -> bool:
    """Returns whether two texts of `code_of` differ; False if they are from two versions of Python."""
    (version, digest), (other_version, other_digest) = (ast.literal_eval(x).split() for x in (was, now))
    return version == other_version and digest != other_digest


def _as_python(text: str) -> str:
    """Replaces `<lambda>` and `<locals>` in names of local functions by words that Python can parse."""
    for name, word in _LOCAL.items():
        text = text.replace(name, word)
    return text

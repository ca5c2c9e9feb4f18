"""The values that gin files and the command line bind to parameters, and the objects made from them.

gin files are read with gin's own parser (`gin.config_parser`). Values stay data here: a `Reference` to an
object or function, or a `Macro`. gin gets the result as one text (`Bindings.text`) and makes the objects.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pprint
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Deferred, hints_of

MACRO = "gin.macro"
UNKNOWN = inspect.Parameter.empty  # stands for the unknown result of a call
LINE_LENGTH = 100  # maximum line length of the text that is passed to gin


class Key(NamedTuple):
    """A parameter of a function or class within a scope, or a macro: (NAME, "gin.macro", "value")."""

    scope: str
    selector: str
    parameter: str

    @classmethod
    def of_macro(cls, name: str) -> Key:
        return cls(name, MACRO, "value")

    @property
    def is_macro(self) -> bool:
        return self.selector == MACRO

    @property
    def owner(self) -> str:
        """The name of the function or class, without its module."""
        return self.selector.rpartition(".")[2]

    def __str__(self) -> str:
        if self.is_macro:
            return self.scope
        return f"{self.scope and f'{self.scope}/'}{self.owner}.{self.parameter}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """A macro as a value: `%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


REQUIRED = Macro("gin.REQUIRED")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A function or class as a value: `@scope/SELECTOR()` (`called`) or `@scope/SELECTOR`."""

    scope: str
    selector: str
    called: bool

    def __repr__(self) -> str:
        return f"@{self.scope and f'{self.scope}/'}{self.selector}{'()' if self.called else ''}"


class Bindings:
    """The last value of each bound parameter, and the functions and classes that have these parameters.

    Attributes:
      command: selector (module and name) of the function that is called.
      values: the value of each key.
      typed: the keys that the command line sets, with their spelling there.
      objects: functions and classes by selector.
      modules: the names of the functions' and classes' modules by selector.
      imported: the modules that gin files import, by their names there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.command = f"{function.__module__}.{function.__name__}"
        self.values: dict[Key, Any] = {}
        self.typed: dict[Key, str] = {}
        self.objects: dict[str, Any] = {self.command: function}
        self.modules = {self.command: function.__module__}
        self.imported: dict[str, types.ModuleType] = {}

    def find(self, name: str, imported: dict[str, types.ModuleType]) -> str:
        """Returns the selector of a function or class that a gin file names.

        The name begins with one of the `imported` modules, or is the end of a known selector.
        """
        first, *rest = name.split(".")
        if rest and first in imported:
            found, module, path = imported[first], imported[first], []
            for part in rest:
                parent, found = found, getattr(found, part, None)
                if found is None:
                    raise UserError(f"{module.__name__} has no {part!r}{suggest(part, vars(parent))}")
                module, path = (found, []) if inspect.ismodule(found) else (module, [*path, part])
            if not callable(found):
                raise UserError(f"{name} is neither a function nor a class: bind one of these")
            same = (selector for selector, known in self.objects.items() if known is found)
            selector = next(same, f"{module.__name__}.{'.'.join(path)}")
            self.modules.setdefault(selector, module.__name__)
            self.objects[selector] = found
            return selector
        matches = [selector for selector in self.objects if f".{selector}".endswith(f".{name}")]
        if len(matches) > 1:
            raise UserError(f"{name!r} may be any of {', '.join(matches)}: add the module's name before it")
        if not matches:
            known = {".".join(s.split(".")[-n:]) for s in self.objects for n in (1, 2)}
            meant = suggest(name, known) or "; import its module in the gin file that binds it"
            raise UserError(f"no function or class is called {name!r}{meant}")
        return matches[0]

    def parameters_of(self, selector: str) -> dict[str, inspect.Parameter]:
        return _parameters(self.objects[selector])

    def key(self, scope: str, selector: str, parameter: str) -> Key:
        """Returns the key of a parameter; raises a UserError for an unknown name."""
        known = self.parameters_of(selector)
        if parameter not in known and all(p.kind is not p.VAR_KEYWORD for p in known.values()):
            name = ".".join(selector.split(".")[-2:])
            raise UserError(f"{name} has no parameter {parameter!r}{suggest(parameter, known)}")
        return Key(scope, selector, parameter)

    def of_command(self, parameter: str) -> Key:
        return Key("", self.command, parameter)

    def chain(self, key: Key) -> list[Key]:
        """Returns `key`, then the macro that it is bound to, then the macro of that macro, and so on."""
        chain = [key]
        while isinstance(macro := self.values.get(chain[-1]), Macro):
            if (following := Key.of_macro(macro.name)) in chain:
                break
            chain.append(following)
        return chain

    def macros_behind(self, keys: Iterable[Key]) -> set[str]:
        """Returns the macros that keys are bound to, directly or through other macros; refuses cycles."""
        found: set[str] = set()

        def follow(value: Any, within: tuple[str, ...]) -> None:
            for part in _parts(value):
                if not isinstance(part, Macro) or part == REQUIRED:
                    continue
                if part.name in within:
                    way = " -> ".join([*within[within.index(part.name) :], part.name])
                    raise UserError(f"macro {part.name} refers to itself ({way}): set it to a value")
                found.add(part.name)
                follow(self.values.get(Key.of_macro(part.name)), (*within, part.name))

        for key in keys:
            follow(self.values.get(key), (key.scope,) if key.is_macro else ())
        return found

    def references(self, value: Any) -> Iterator[Reference]:
        """Yields the objects and functions that a value refers to, directly or through macros."""
        for part in _parts(value):
            if isinstance(part, Reference):
                yield part
            elif isinstance(part, Macro):
                yield from self.references(self.values.get(Key.of_macro(part.name)))

    def innermost(self, scope: str, selector: str) -> dict[str, Key]:
        """Returns {parameter: key} of a function or class within a scope; inner scopes have priority."""
        parts = scope.split("/") if scope else []
        scopes = ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
        bound = [key for key in self.values if key.selector == selector and key.scope in scopes]
        return {key.parameter: key for key in sorted(bound, key=lambda key: len(key.scope))}

    def made(self) -> dict[tuple[str, str], int]:
        """Returns {(scope, selector): distance from the command} of the command and all objects it makes.

        Leaves out objects that another binding has replaced. Refuses an object that needs itself.
        """
        depths = {("", self.command): 0}

        def follow(scope: str, selector: str, within: tuple[tuple[str, str], ...]) -> None:
            for key in self.innermost(scope, selector).values():
                for reference in self.references(self.values[key]):
                    made = (reference.scope or scope, reference.selector)
                    if made in within and reference.called:
                        circle = [*within[within.index(made) :], made]
                        way = " -> ".join(name.rpartition(".")[2] for _, name in circle)
                        raise UserError(f"an object refers to itself ({way}): remove one of these references")
                    if made not in depths or depths[made] > len(within):
                        depths[made] = len(within)
                        follow(*made, (*within, made))

        follow("", self.command, (("", self.command),))
        return depths

    def read(self) -> list[Key]:
        """Returns the bound parameters of all objects in `made`, and of the user's `gin.configurable`
        functions.

        gin passes bindings to a `gin.configurable` wherever it is called.
        """
        keys = [key for made in self.made() for key in self.innermost(*made).values()]
        decorated = {s for s, found in self.objects.items() if _is_decorated(found)}
        return list(dict.fromkeys([*keys, *(key for key in self.values if key.selector in decorated)]))

    def hint(self, key: Key) -> Any:
        return hints_of(self.objects[key.selector]).get(key.parameter, Any)

    def resolved(self, value: Any) -> Any:
        """Returns a value without macros; `Deferred` or `UNKNOWN` replaces what a call will return."""

        def resolved(part: Any) -> Any:
            if isinstance(part, Macro):
                known = "." not in part.name
                return self.resolved(self.values.get(Key.of_macro(part.name))) if known else UNKNOWN
            if not isinstance(part, Reference):
                return part
            made, name = self.objects[part.selector], f"@{part.selector.rpartition('.')[2]}"
            if not part.called:
                return Deferred(name, type(made))
            return Deferred(f"{name}()", made) if inspect.isclass(made) else UNKNOWN

        return with_parts(value, resolved)

    def settings(self) -> Iterator[tuple[Key, Key, Any]]:
        """Yields bindings of the objects in `made`, if their values differ from the parameters' defaults.

        Yields for each binding its key, the key at the end of its chain of macros, and its value without
        macros.
        """
        for made in self.made():
            parameters = self.parameters_of(made[1])
            for name, key in self.innermost(*made).items():
                last = self.chain(key)[-1]
                value = self.resolved(self.values[last])
                if name not in parameters or repr(value) != repr(parameters[name].default):
                    yield key, last, value

    def text(self) -> str:
        """Returns the bindings that are read, as the text of a gin file that makes the same objects."""
        keys = sorted(self.read(), key=lambda key: (key.selector.split(".")[::-1], key))
        macros = sorted(map(Key.of_macro, self.macros_behind(keys)))
        used = {r.selector for key in keys for r in self.references(self.values[key])}
        modules = sorted({self.modules[selector] for selector in used | {key.selector for key in keys}})
        leaves = [module.rpartition(".")[2] for module in modules]
        names = {
            module: leaf if leaves.count(leaf) == 1 else module.replace(".", "_")
            for module, leaf in zip(modules, leaves, strict=True)
        }

        def name(selector: str) -> str:
            module = self.modules[selector]
            return names[module] + selector.removeprefix(module)

        lines = ["from __gin__ import dynamic_registration"]
        for module in modules:
            parent, _, leaf = module.rpartition(".")
            alias = f" as {names[module]}" if names[module] != leaf else ""
            lines.append(f"{f'from {parent} ' if parent else ''}import {leaf}{alias}")
        lines.append("")
        for key in [*macros, *keys]:
            scope = key.scope and f"{key.scope}/"
            left = key.scope if key.is_macro else f"{scope}{name(key.selector)}.{key.parameter}"
            value = with_selectors(self.values[key], name)
            right = pprint.pformat(value, width=LINE_LENGTH, sort_dicts=False)
            lines.append(f"{left} = \\\n{right}" if "\n" in right else f"{left} = {right}")
        return "\n".join([*lines, ""])


@functools.cache
def _parameters(made: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(made).parameters)


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `change` of a value, or of each value in a list, tuple or dict, at any depth."""
    if isinstance(value, list | tuple):
        return type(value)(with_parts(part, change) for part in value)
    if isinstance(value, dict):
        return {with_parts(k, change): with_parts(v, change) for k, v in value.items()}
    return change(value)


def with_selectors(value: Any, rename: Callable[[str], str]) -> Any:
    """Returns a value in which `rename` has changed the selector of each reference."""

    def renamed(part: Any) -> Any:
        is_reference = isinstance(part, Reference)
        return dataclasses.replace(part, selector=rename(part.selector)) if is_reference else part

    return with_parts(value, renamed)


def _parts(value: Any) -> list[Any]:
    parts: list[Any] = []
    with_parts(value, parts.append)
    return parts


def given_twice(what: object, first: str, second: str) -> UserError:
    return UserError(f"{what} is given twice, by {first} and by {second}; keep one of them")


def has_reference(value: Any) -> bool:
    """Whether a value refers to an object or function, directly or in a list, tuple or dict."""
    return any(isinstance(part, Reference) for part in _parts(value))


def _is_decorated(found: Any) -> bool:
    """Whether a function or class is decorated with `gin.configurable`."""
    import gin

    call = found.__init__ if inspect.isclass(found) else found
    code = getattr(call, "__code__", None)
    return code is not None and code.co_filename == gin.configurable.__code__.co_filename

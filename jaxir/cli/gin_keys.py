"""What is bound in gin's configuration, and what hangs on what: keys, macros, references."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gin import config as gin_internals

from jaxir.core.values import Later

MACRO = "gin.macro"
UNKNOWN = inspect.Parameter.empty  # a value that only a call gives


class Key(NamedTuple):
    """A parameter of a configurable, or a macro: (NAME, "gin.macro", "value")."""

    scope: str
    selector: str
    parameter: str

    @classmethod
    def of_macro(cls, name: str) -> Key:
        """Returns the key of a macro."""
        return cls(name, MACRO, "value")

    @property
    def value(self) -> Any:
        """What is bound to it; None where nothing is."""
        return gin_internals._CONFIG.get(self[:2], {}).get(self.parameter)

    @property
    def flags(self) -> list[str]:
        """The flags that set it, the best one first."""
        return [f"--{self.scope.lower()}"] * (self.selector == MACRO) + [f"--gin.{self}"]

    def __str__(self) -> str:
        name = self.selector.rpartition(".")[2]
        return self.scope if self.selector == MACRO else f"{name}.{self.parameter}"


def parameter_of(function: Callable[..., Any], name: str) -> Key:
    """Returns the key of a parameter of a function that gin knows by its module and name."""
    return Key("", f"{function.__module__}.{function.__name__}", name)


def chain_of(key: Key) -> list[Key]:
    """Returns `key`, the macro that it is bound to, the macro that this one is bound to, and so on."""
    chain = [key]
    while (name := macro_of(chain[-1].value)) and Key.of_macro(name) not in chain:
        chain.append(Key.of_macro(name))
    return chain


def flags_of(name: str, parameter: str) -> list[str]:
    """Returns the flags that set a parameter of the class or function of this name, the best one first.

    That is `--macro` where a gin file binds the parameter to MACRO, else `--gin.NAME.PARAMETER`.
    """
    own = [k for k in parameters_bound() if (k.selector.rpartition(".")[2], k.parameter) == (name, parameter)]
    chain = chain_of(own[0]) if own else []
    return [flag for key in reversed(chain) for flag in key.flags] or [f"--gin.{name}.{parameter}"]


def macro_of(value: Any) -> str | None:
    """Returns the name of the macro that a bound value refers to; None where it refers to none."""
    selector = getattr(value, "scoped_selector", "")
    return selector.removesuffix(f"/{MACRO}") if selector.endswith(f"/{MACRO}") else None


def is_required(value: Any) -> bool:
    """Whether a bound value is `%gin.REQUIRED`: one that is to be set."""
    return getattr(value, "scoped_selector", None) == "gin.REQUIRED/gin.constant"


def referred_macros() -> list[str]:
    """Returns the macro of each place where one is used."""
    references = gin_internals.iterate_references(gin_internals._CONFIG)
    return [name for reference in references if (name := macro_of(reference))]


def parameters_bound() -> list[Key]:
    """Returns all parameters that anything is bound to, whether or not a command hangs on them."""
    config = gin_internals._CONFIG.items()
    return [Key(*key, name) for key, bound in config if key[1] != MACRO for name in bound]


def is_imported(key: Key) -> bool:
    """Whether a configurable is of a gin file's import; if not, a user's own code has decorated it."""
    configurable = gin_internals._REGISTRY.get_match(key.selector)
    return bool(getattr(configurable, "import_source", None))


def bound_in(scope: str, selector: str) -> list[Key]:
    """Returns the innermost binding within a scope of each parameter of a configurable."""
    parts, found = scope.split("/") if scope else [], {}
    for depth in range(len(parts) + 1):
        outer = "/".join(parts[:depth])
        for parameter in gin_internals._CONFIG.get((outer, selector), {}):
            found[parameter] = Key(outer, selector, parameter)
    return list(found.values())


def references_of(keys: Sequence[Key]) -> Iterator[Any]:
    """Yields the objects and functions that bindings refer to, be it by way of macros."""
    values = [key.value for key in keys]
    while values:
        for reference in gin_internals.iterate_references(values.pop()):
            if macro := macro_of(reference):
                values.append(Key.of_macro(macro).value)
            else:
                yield reference


def macros_behind(keys: Iterable[Key]) -> set[str]:
    """Returns the macros that parameters hang on, be it by way of others."""
    found: set[str] = set()
    values = [key.value for key in keys]
    while values:
        macros = {macro_of(reference) for reference in gin_internals.iterate_references(values.pop())}
        values += [Key.of_macro(name).value for name in macros - found if name]
        found.update(filter(None, macros))
    return found


def reached_by(command: str) -> set[Key]:
    """Returns the bindings that a command hangs on: not those of what other files put in another's place."""
    found: set[Key] = set()
    made = [("", command)]
    for scope, selector in made:  # which grows meanwhile
        keys = bound_in(scope, selector)
        found.update(keys)
        others = [(scope_of(r) or scope, r.configurable.selector) for r in references_of(keys)]
        made += [other for other in dict.fromkeys(others) if other not in made]
    return found


def read_by(command: str) -> set[Key]:
    """Returns the bindings that are read: what a command hangs on, and what a user's own code has decorated.

    That takes its bindings wherever it is called.
    """
    return reached_by(command) | {key for key in parameters_bound() if not is_imported(key)}


def resolved(value: Any) -> Any:
    """Returns a bound value with that of its macros, and `Later` or `UNKNOWN` where a call gives it."""
    if isinstance(value, list | tuple):
        return type(value)(map(resolved, value))
    if isinstance(value, dict):
        return {resolved(k): resolved(v) for k, v in value.items()}
    if macro := macro_of(value):
        return resolved(Key.of_macro(macro).value)
    if not isinstance(value, gin_internals.ConfigurableReference):
        return value
    made, name = value.configurable.wrapped, f"@{value.configurable.name}"
    if not value.evaluate:
        return Later(name, type(made))
    return Later(f"{name}()", made) if inspect.isclass(made) else UNKNOWN


def scope_of(reference: Any) -> str:
    """Returns the scope that a reference names (`a/b` of `@a/b/f()`); an empty text where it names none."""
    return reference.scoped_selector.rpartition("/")[0]

"""Checks of a recipe's bindings, before any object is made from them."""

from __future__ import annotations

from jaxir.cli.gin_bindings import REQUIRED, Bindings, Key
from jaxir.cli.short_names import holders, short_name
from jaxir.core.errors import UserError, suggest
from jaxir.core.values import check_not_empty, check_value


def check_read(bindings: Bindings) -> None:
    """Refuses typed parameters and macros of objects that the command does not make."""
    read = bindings.read()
    macros = bindings.macros_behind(read)
    for key in bindings.typed:
        if key in read or (key.is_macro and key.scope in macros):
            continue
        others = holders(bindings, key) if key.is_macro else [k for k in read if k.parameter == key.parameter]
        more = f"; {'it is of' if key.is_macro else 'there are'} {', '.join(sorted(map(str, others)))}"
        raise UserError(
            f"{key} is set but nothing reads it: this command makes no such object{more if others else ''}"
        )


def check_set(bindings: Bindings) -> None:
    """Refuses macros and required parameters that have no value."""
    read = bindings.read()
    macros = [Key.of_macro(name) for name in sorted(bindings.macros_behind(read))]
    defined = {key.scope for key in bindings.values if key.is_macro}
    for key in [*macros, *read]:
        if key not in bindings.values and "." not in key.scope:
            raise UserError(f"macro {key} is used but never set{suggest(str(key), defined)}")
        if bindings.values.get(key) == REQUIRED:
            raise UserError(f"{key} must be set: --{short_name(key)}=...")


def check_values(bindings: Bindings) -> None:
    """Refuses values that do not fit their parameters, and empty texts of the command's own parameters."""
    for made in bindings.made():
        parameters = bindings.parameters_of(made[1])
        for name, key in bindings.innermost(*made).items():
            last = bindings.chain(key)[-1]
            value = bindings.resolved(bindings.values[last])
            if name in parameters and value is parameters[name].default:
                continue
            called = bindings.typed.get(last, str(last)).removeprefix("--gin.")
            check_value(called, value, bindings.hint(key))
            if key.selector == bindings.command:
                check_not_empty(called, value)

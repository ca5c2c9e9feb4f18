"""What is refused of a recipe's bindings before anything is made of them."""

from __future__ import annotations

from jaxir.cli.gin_bindings import REQUIRED, Bindings, Key
from jaxir.cli.short_names import short_name
from jaxir.core.errors import UserError, suggest
from jaxir.core.values import check_not_empty, check_value


def check_read(bindings: Bindings) -> None:
    """Refuses parameters and macros that are typed of something that the command does not make."""
    read = bindings.read()
    macros = bindings.macros_behind(read)
    for key in bindings.typed:
        if key in read or (key.is_macro and key.scope in macros):
            continue
        if key.is_macro:
            names = [str(k) for k in bindings.values if key.scope in bindings.macros_behind([k])]
            more = "; it is of {}"
        else:
            names = [k.in_full() for k in read if k.parameter == key.parameter]
            more = "; there are {}"
        raise UserError(
            f"{key} is set but nothing reads it: this command makes no such object"
            + (more.format(", ".join(sorted(names))) if names else "")
        )


def check_set(bindings: Bindings) -> None:
    """Refuses macros without a value, and required values that are left open."""
    read = bindings.read()
    macros = [Key.of_macro(name) for name in sorted(bindings.macros_behind(read))]
    defined = {key.scope for key in bindings.values if key.is_macro}
    for key in macros:
        if key not in bindings.values and "." not in key.scope:
            raise UserError(f"macro {key} is used but never set{suggest(str(key), defined)}")
    for key in [*macros, *read]:
        if bindings.values.get(key) == REQUIRED:
            raise UserError(f"{key} must be set: --{short_name(key)}=...")


def check_values(bindings: Bindings) -> None:
    """Refuses values that a parameter cannot have, and empty texts of the command, by the name it goes by."""
    for scope, selector in bindings.made():
        parameters = bindings.parameters_of(selector)
        for name, key in bindings.innermost(scope, selector).items():
            *_, last = bindings.chain(key)
            value = bindings.resolved(bindings.values[last])
            if name in parameters and value is parameters[name].default:
                continue
            check_value(str(last), value, bindings.hint(key))
            if selector == bindings.command:
                check_not_empty(str(last), value)

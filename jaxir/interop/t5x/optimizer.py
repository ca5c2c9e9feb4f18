"""Reads a run's Adafactor state in T5X's form: slots m, v, v_row and v_col of each parameter.

optax's and T5X's second moments follow the same equations and have the same shapes, so T5X can continue with
them: `v_row` omits the largest dimension, `v_col` the second largest; `v` is for unfactored parameters. `m`
is unused, because there is no momentum.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.interop.model.stored_run import sums_of
from jaxir.interop.weights import stores

# T5X factors second moments if the two largest dimensions are at least this long.
FACTORED_FROM = 128
_SLOTS = ("v", "v_row", "v_col")


def read(checkpoint: Path, params: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Reads the used slots of each parameter of RUN/checkpoints/STEP, by its canonical name."""
    directory = checkpoint / "opt_state"
    specs = stores.orbax_specs(directory)
    if specs is None:
        raise UserError(f"{directory}: no optimizer state in it; omit --optimizer_state")
    # A key holds positions in the optimizer's chain, then the slot's name, then the parameter's name.
    places = {keys: i for keys in specs for i, key in enumerate(keys) if key in _SLOTS and i + 1 < len(keys)}
    if not places:
        raise UserError(f"{checkpoint}: its optimizer is not Adafactor, as T5X needs; omit --optimizer_state")
    by_name = {".".join(keys): spec for keys, spec in specs.items()}
    opened = stores.open_arrays(str(directory), by_name, sums_of(checkpoint, "opt_state"))
    slots: dict[str, dict[str, np.ndarray]] = {name: {} for name in params}
    for slot in _SLOTS:
        found = {".".join(k[i + 1 :]): opened[".".join(k)] for k, i in places.items() if k[i] == slot}
        for name, value in stored.canonical({name: np.asarray(x) for name, x in found.items()}).items():
            if value.shape != (1,):  # an unused slot is an array of one number
                slots.setdefault(name, {})[slot] = value
    for name, value in params.items():
        _check(str(checkpoint), name, tuple(value.shape), {s: v.shape for s, v in slots[name].items()})
    return slots


def _check(where: str, name: str, shape: tuple[int, ...], found: dict[str, tuple[int, ...]]) -> None:
    expected = {"v": shape}
    if len(shape) == 2 and min(shape) >= FACTORED_FROM:
        second, largest = (int(axis) for axis in np.argsort(shape)[-2:])
        expected = {"v_row": (shape[1 - largest],), "v_col": (shape[1 - second],)}
    if found != expected:
        raise UserError(
            f"{where}: Adafactor's state of {name} {shape} is {found}, but T5X needs {expected}: it factors"
            f" dimensions from {FACTORED_FROM} on, without momentum; omit --optimizer_state"
        )

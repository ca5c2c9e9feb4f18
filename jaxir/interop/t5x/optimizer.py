"""The state of Adafactor in a training run, as T5X keeps it: slots m, v, v_row and v_col of each parameter.

optax's and T5X's second moments follow the same equations and have the same shapes, so T5X can go on with
them: `v_row` leaves out the largest dimension, `v_col` the second largest, and `v` is for a parameter that is
not factored. `m` stays unused: neither has momentum here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.interop.model.run_dir import read_record
from jaxir.interop.weights import stores

# T5X factors where both of the two largest dimensions are at least this long.
FACTORED_FROM = 128
_SLOTS = ("v", "v_row", "v_col")


def read(checkpoint: Path, params: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Reads the slots in use of each parameter, by its canonical name.

    Args:
      checkpoint: RUN/checkpoints/STEP.
      params: the parameters of the same checkpoint, by canonical name.

    Raises:
      UserError: the run's optimizer is not Adafactor with T5X's settings, or its state is damaged.
    """
    directory = str(checkpoint / "opt_state")
    content = stores.read(directory, stores.ORBAX_INDEX)
    if content is None:
        raise UserError(f"{directory}: no state of an optimizer in it")
    specs = stores.orbax_specs(directory, content)
    # The optimizer is a chain: numbers, the name of a slot, the name of the parameter.
    places = {keys: i for keys in specs for i, key in enumerate(keys) if key in _SLOTS and i + 1 < len(keys)}
    if not places:
        raise UserError(f"{checkpoint}: its optimizer is not Adafactor, and T5X has the state of no other")
    sums = (read_record(checkpoint).get("checksums") or {}).get("opt_state")
    by_name = {".".join(keys): spec for keys, spec in specs.items()}
    opened = stores.open_arrays(directory, by_name, sums)
    slots: dict[str, dict[str, np.ndarray]] = {name: {} for name in params}
    for slot in _SLOTS:
        found = {".".join(k[i + 1 :]): opened[".".join(k)] for k, i in places.items() if k[i] == slot}
        for name, value in stored.canonical({name: np.asarray(x) for name, x in found.items()}).items():
            if value.shape != (1,):  # of what is not in use, one number a parameter (and layer)
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
            f"{where}: Adafactor's state of {name} {shape} is {found}, where T5X has {expected}: it factors"
            f" from {FACTORED_FROM} on, and has no momentum here"
        )

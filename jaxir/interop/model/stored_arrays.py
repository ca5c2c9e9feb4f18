"""Opens the arrays that Orbax wrote for a model or a run: parameters and auxiliary parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.interop.model.stored_run import checkpoint_of, sums_of
from jaxir.interop.weights import stores


def read_auxiliary(run: str | Path) -> dict[str, Any]:
    """Opens the auxiliary parameters that a run's objective trained with the model, by dotted names."""
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise UserError(f"{run} is not a training run, so it has no auxiliary parameters: give a run")
    if not (checkpoint / "auxiliary").is_dir():
        raise UserError(f"{run}: the objective of this run trained no auxiliary parameters: give another run")
    sums = sums_of(checkpoint, "auxiliary")
    return _read_arrays(checkpoint / "auxiliary", sums, "auxiliary parameters")


def read_params(directory: Path, sums: Mapping[str, int] | None) -> dict[str, Any]:
    """Opens the parameters of a model in a directory, by canonical name; `sums` are their checksums."""
    return stored.canonical(_read_arrays(directory, sums, "parameters"))


def _read_arrays(directory: Path, sums: Mapping[str, int] | None, what: str) -> dict[str, Any]:
    """Opens Orbax's arrays by TensorStore, because Orbax's threads print tracebacks for damaged files."""
    specs = stores.orbax_specs(directory)
    if specs is None:
        raise UserError(f"{directory / stores.ORBAX_INDEX}: no such file; copy the model again")
    by_name = {".".join(keys): spec for keys, spec in specs.items()}
    return stores.open_arrays(f"{directory} ({what})", by_name, sums)

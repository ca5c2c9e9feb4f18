"""Starts a run from the auxiliary parameters that an earlier run's objective trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop.model.stored_run import checkpoint_of, read_record
from jaxir.interop.weights import array_checksums
from jaxir.interop.weights.quiet import quiet_orbax
from jaxir.storage.files import is_bucket
from jaxir.training.run.damage import is_damage, reason
from jaxir.training.step.train_state import Plan, TrainState

DAMAGED = "is damaged; copy the run again, or train it again"


def with_auxiliary_of(
    run: str, state: TrainState, plan: Plan, *, read_corpus: Callable[[nnx.Module], None]
) -> TrainState:
    """Returns `state` with the auxiliary parameters and statistics of the best or latest checkpoint of `run`.

    `read_corpus` then recomputes the statistics that depend on the data of the new run.
    """
    checkpoint, sums = _checkpoint(run)
    wanted = {name: getattr(plan.abstract, name) for name in ("auxiliary", "statistics")}
    wanted = {name: tree for name, tree in wanted.items() if jax.tree.leaves(tree)}
    if not wanted:
        raise UserError("the objective has no auxiliary parameters: leave auxiliary_from out")
    found = {}
    for name, abstract in wanted.items():
        path = checkpoint / name
        if not path.is_dir():
            raise UserError(f"auxiliary_from={run}: its objective had no {name}; give another run")
        found[name] = _restored(run, path, abstract, sums.get(name))
    state = state._replace(**found)
    _, beside = plan.modules(state.params, state.auxiliary, state.statistics)
    read_corpus(beside)
    statistics = nnx.to_pure_dict(nnx.state(beside, nnx.Not(nnx.Param)))
    return state._replace(statistics=jax.device_put(statistics, plan.shardings.statistics))


def describe(run: str | None) -> dict[str, Any]:
    """Returns, as a setting, the checksums of the auxiliary arrays from which a run starts."""
    if run is None:
        return {}
    _, sums = _checkpoint(run)
    return {"auxiliary_from": {name: sums[name] for name in ("auxiliary", "statistics") if name in sums}}


def _checkpoint(run: str) -> tuple[Path, Mapping[str, Mapping[str, int]]]:
    """Returns a run's best or latest checkpoint, and the checksums in its record."""
    if (checkpoint := checkpoint_of(run)) is None:
        raise UserError(f"{run} is not a run with checkpoints: give auxiliary_from the directory of a run")
    return checkpoint, read_record(checkpoint).get("checksums") or {}


def _restored(run: str, path: Path, abstract: Any, sums: Mapping[str, int] | None) -> Any:
    """Returns the arrays at a path of a run; raises a UserError if they are damaged or do not fit."""
    place = path if is_bucket(path) else path.resolve()
    try:
        with quiet_orbax():
            found = ocp.StandardCheckpointer().restore(place, abstract)
    except Exception as error:  # Orbax raises plain `Exception`, among others
        why = _difference(place, abstract, sums)
        if why == DAMAGED and not is_damage(error):
            why = f"could not be read ({reason(error)}): run the same command again"
        raise UserError(f"auxiliary_from={run}: its {path.name} {why}") from error
    own = {name: int(x) for name, x in jax.device_get(jax.jit(array_checksums.of_tree)(found)).items()}
    if sums is not None and sums != own:
        raise UserError(f"{path} is damaged: its checksums differ; copy the run again, or train it again")
    return found


def _difference(place: Path, abstract: Any, sums: Mapping[str, int] | None) -> str:
    """Returns why arrays could not be restored: their names or shapes differ, or they are damaged."""
    wanted = _shapes(abstract)
    try:
        with quiet_orbax():
            saved = _shapes(ocp.StandardCheckpointer().metadata(place).item_metadata.tree)
    except Exception:  # the checkpoint's metadata are damaged, too
        return DAMAGED
    if saved == wanted or (sums is not None and saved.keys() != sums.keys()):
        return DAMAGED
    if shaped := sorted(name for name in saved.keys() & wanted.keys() if saved[name] != wanted[name]):
        return f"has {shaped[0]} {list(saved[shaped[0]])}, the objective needs {list(wanted[shaped[0]])}"
    lacking, further = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    return " and ".join(
        [f"has no {name}, which the objective needs" for name in lacking[:1]]
        + [f"has {name}, which the objective does not have" for name in further[:1]]
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {array_checksums.name_of(path): tuple(x.shape) for path, x in leaves}

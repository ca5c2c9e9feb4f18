"""Starting a stage of training from what an earlier one has learnt beside the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop.model.run_dir import checkpoint_of, read_record
from jaxir.interop.weights import array_checksums
from jaxir.interop.weights.quiet import quiet_orbax
from jaxir.storage.files import is_bucket
from jaxir.training.run.damage import is_damage, reason
from jaxir.training.step.train_state import Plan, TrainState

DAMAGED = "is damaged"


def with_auxiliary_of(
    run: str, state: TrainState, plan: Plan, *, read_corpus: Callable[[nnx.Module], None]
) -> TrainState:
    """Returns `state` with auxiliary and statistics of a run's checkpoint (its best, else its latest).

    Args:
      run: the directory of a run whose objective had the same auxiliary.
      state: before the first step.
      plan: what the state is of.
      read_corpus: sets again what follows from the data of this run, not from those of the other.

    Raises:
      UserError: `run` is no run, its objective had nothing or something else beside the model, or it is
        damaged.
    """
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise UserError(f"{run} is no run: it has no auxiliary to start from")
    wanted = {name: getattr(plan.abstract, name) for name in ("auxiliary", "statistics")}
    wanted = {name: tree for name, tree in wanted.items() if jax.tree.leaves(tree)}
    if not wanted:
        raise UserError("the objective has nothing beside the model that could start from another run")
    sums, found = read_record(checkpoint).get("checksums") or {}, {}
    for name, abstract in wanted.items():
        path = checkpoint / name
        if not path.is_dir():
            raise UserError(f"{run}: its objective had no {name}")
        try:
            with quiet_orbax():
                place = path if is_bucket(path) else path.resolve()
                found[name] = ocp.StandardCheckpointer().restore(place, abstract)
        except Exception as error:  # Orbax raises that very class, too
            told = _told(place, abstract, sums.get(name))
            if told == DAMAGED and not is_damage(error):
                told = f"could not be read ({reason(error)})"
            raise UserError(f"{run}: its {name} {told}") from error
        told = {n: int(x) for n, x in jax.device_get(jax.jit(array_checksums.of_tree)(found[name])).items()}
        if sums.get(name, told) != told:
            raise UserError(f"{path} is damaged: its checksums do not match its content")
    state = state._replace(**found)
    _, beside = plan.modules(state.params, state.auxiliary, state.statistics)
    read_corpus(beside)
    statistics = nnx.to_pure_dict(nnx.state(beside, nnx.Not(nnx.Param)))
    return state._replace(statistics=jax.device_put(statistics, plan.shardings.statistics))


def _told(place: Any, abstract: Any, sums: Mapping[str, int] | None) -> str:
    """Says why what was saved somewhere could not be had; `sums` tells, by name, what was saved."""
    saved = {}
    with contextlib.suppress(Exception), quiet_orbax():  # of Orbax, of a description that is damaged too
        saved = _shapes(ocp.StandardCheckpointer().metadata(place))
    whole = sums is None or saved.keys() == sums.keys()
    return _difference(saved, _shapes(abstract)) if whole else DAMAGED


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a tree's, or a checkpoint's metadata's, arrays by their dotted names."""
    tree = getattr(tree, "item_metadata", tree)
    tree = getattr(tree, "tree", tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {array_checksums.name_of(path): tuple(x.shape) for path, x in leaves}


def _difference(saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> str:
    """Says by one array of each why what was saved is not what is wanted."""
    if shaped := sorted(name for name in saved.keys() & wanted.keys() if saved[name] != wanted[name]):
        return f"has {shaped[0]} {list(saved[shaped[0]])}, the objective needs {list(wanted[shaped[0]])}"
    lacking, further = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if not lacking and not further:
        return DAMAGED
    return " and ".join(
        [f"has no {name}, which the objective needs" for name in lacking[:1]]
        + [f"has {name}, which the objective has not" for name in further[:1]]
    )


def describe(run: str | None) -> dict[str, Any]:
    """Returns what a resume checks of it: which checkpoint it was, by its checksums."""
    if run is None:
        return {}
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise UserError(f"{run} is no run: it has no auxiliary to start from")
    sums = read_record(checkpoint).get("checksums") or {}
    return {"auxiliary_from": {name: sums[name] for name in ("auxiliary", "statistics") if name in sums}}

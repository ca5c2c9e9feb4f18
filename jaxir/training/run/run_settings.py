"""The settings that the parts of an interrupted run must share, as JSON values that name themselves."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxir.core.errors import UserError, without_hashes
from jaxir.interop.weights import array_checksums
from jaxir.runtime.distributed import of_all
from jaxir.runtime.partitioning import Partitioner
from jaxir.training.evaluators.evaluation_context import EVALUATED, ONE_BATCH, WRITTEN
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_fingerprint import describe, difference

HINT = "give the settings of that run to resume it, or another output_dir"
_WEIGHTS = "weights"
_HASHED = ("auxiliary", "model", _WEIGHTS)  # told last: they follow from others, as from the seed
_DESCRIBED = ("objective", "optimizer")
_OF_LOSS = ("loss on ", "accuracy on ")
_OF_FIRST_BATCH = re.compile(r"\b\d+ examples [0-9a-f]{16}\b")  # how data were told before `Data.fingerprint`


def agreed_settings(
    recipe: Recipe,
    model: nnx.Module,
    auxiliary: nnx.Module | None,
    data: Any,
    *,
    objective: str,
    dev: str | None,
    parts: int,
) -> dict[str, Any]:
    """Returns what decides the course of a run: two runs with the same settings end with the same parameters.

    The mesh is not among them: a run may go on with other devices, to the same numbers up to rounding. Where
    the order of the data hangs on it, the number of parts that processes read a batch in is.
    """
    optional: dict[str, Any] = {"data_parts": parts} if data.order_depends_on_parts else {}
    optional |= {} if auxiliary is None else {"auxiliary": auxiliary_fingerprint(auxiliary)}
    optional |= {"frozen": sorted(recipe.frozen)} if recipe.frozen else {}
    return optional | {
        "batch_size": recipe.batch_size,
        "data": data.fingerprint,
        "dev": dev,
        "model": model_fingerprint(model),
        "objective": objective,
        "optimizer": describe(recipe.optimizer),
        "seed": recipe.seed,
        "steps": recipe.steps,
    }


def disagreement(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Says in which way a run, saved with some settings, cannot go on with others; None where it can."""
    for name in sorted({*saved, *now}, key=lambda name: (name in _HASHED, name)):
        was, given = saved.get(name), now.get(name)
        if name == _WEIGHTS:
            if told := _other_weights(was, given):
                return told
            continue
        if name == "dev" and str(was).startswith(_OF_LOSS):  # earlier, distractors were told with losses too
            was = was.partition(" distractors")[0].rpartition(", ")[0] if "distractors" in was else was
        for told in (EVALUATED, WRITTEN, ONE_BATCH) if name == "dev" and given else ():
            if told not in str(was):  # runs of earlier versions did not record these
                given = given.partition(told)[0]
        if was == given:
            continue
        if name in ("data", "dev") and _OF_FIRST_BATCH.search(str(was)):
            return (
                "was begun by an earlier jaxir, which knew its data by their first batch only: whether these"
                " are the same cannot be told; resume it with that jaxir, or give another output_dir"
            )
        if name == "data":
            return f"was trained on other data: {_unlike(was, given)}; {HINT}"
        if (told := _other(name, was, given)) is not None:
            return f"was trained with {told}; {HINT}"
    return None


_OTHER_CONTENT = "with other content"


def check_alike(settings: Mapping[str, Any]) -> None:
    """Raises a UserError, in all processes of a run, where one of them has other settings than the first.

    They would train one model on what none of them was told: rows of other data, or replicas that differ.
    """
    first, *others = map(json.loads, of_all(json.dumps(settings)))
    for number, own in enumerate(others, start=1):
        for name in sorted({*own, *first}, key=lambda name: (name in _HASHED, name)):
            was, given = own.get(name), first.get(name)
            if was != given and (told := _other(name, was, given)) is not None:
                than = "than" if told.endswith(_OTHER_CONTENT) else "as"
                raise UserError(
                    f"process {number} has {told} {than} process 0 has: start the same command, on the same"
                    " data, in every process of the run"
                )


def _other_weights(was: Any, now: Any) -> str | None:
    """Says that a run began from other weights; None where it did not, or where that cannot be told.

    Runs of earlier versions did not write theirs, and random weights may be rounded otherwise on other
    devices or another mesh.
    """
    told = [value if isinstance(value, Mapping) else {} for value in (was, now)]
    if len({value.get("on") for value in told}) > 1 or len({value.get("hash") for value in told}) == 1:
        return None
    return (
        "was begun from other weights than the model has now; give the model that it began from to resume it,"
        " or another output_dir"
    )


def _other(name: str, was: Any, given: Any) -> str | None:
    """Says how two values of a setting differ; None where they do not."""
    if name == "auxiliary":
        return _other_arrays(_arrays(was), _arrays(given))
    if isinstance(was, str) and isinstance(given, str) and name in _DESCRIBED:
        return difference(name, was, given)
    return f"{name}={_unlike(was, given)}"


def _unlike(was: Any, given: Any) -> str:
    """Returns "64 pairs, not 32 pairs" for two values of a setting; their hashes say nothing to a reader."""
    before, now = (without_hashes(str(value)) for value in (was, given))
    return f"{before}, not {now}" if before != now else f"{before} {_OTHER_CONTENT}"


def _arrays(told: Any) -> Mapping[str, Any]:
    """Returns an auxiliary's fingerprint as it is told now: not None, and earlier it was the hash alone."""
    if told is None:
        return {"hash": None, "arrays": {}}
    return {"hash": told, "arrays": None} if isinstance(told, str) else told


def _other_arrays(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Says in which array two auxiliaries differ; None where they do not."""
    if was["hash"] == now["hash"]:
        return None
    if was["arrays"] is None and now["hash"] is None:
        return "auxiliary modules, of which there are none now"
    if was["arrays"] is None or was["arrays"] == now["arrays"]:
        return (
            "auxiliary modules that began with other values; these follow from the objective's code and"
            " settings, the seed and the texts"
        )
    names = sorted({*was["arrays"], *now["arrays"]})
    name = next(n for n in names if was["arrays"].get(n) != now["arrays"].get(n))
    before, given = (found["arrays"].get(name, "nothing") for found in (was, now))
    return f"auxiliary.{name}={before}, not {given}"


def weights(model: nnx.Module, partitioner: Partitioner) -> dict[str, dict[str, str]]:
    """Returns, as a setting, a hash of the parameters that a run begins from, and the mesh that made them."""
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    sums = jax.device_get(jax.jit(array_checksums.of_tree)(parameters))
    lines = [f"{name} {int(value)}" for name, value in sorted(sums.items())]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {_WEIGHTS: {"hash": digest[:16], "on": f"{jax.default_backend()} {dict(partitioner.mesh.shape)}"}}


def auxiliary_fingerprint(auxiliary: nnx.Module) -> dict[str, Any]:
    """Returns a hash of the arrays' names, shapes, types and first content, and each one's shape and type."""
    variables = nnx.to_pure_dict(nnx.state(auxiliary))
    sums = jax.device_get(jax.jit(array_checksums.of_tree)(variables))
    lines = [f"{name} {int(value)}" for name, value in sorted(sums.items())]
    shapes = jax.tree_util.tree_leaves_with_path(variables)
    lines += [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in shapes]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    told = {array_checksums.name_of(path): f"{list(x.shape)} {x.dtype}" for path, x in shapes}
    return {"hash": f"{len(shapes)} arrays {digest[:16]}", "arrays": told}


def model_fingerprint(model: nnx.Module) -> str:
    """Returns the number of parameters and a hash of their names, shapes, types and the config."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    lines = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in leaves]
    # A hash of the fields only: class attributes of a config came later, and would change old hashes.
    lines.append(describe(getattr(model, "config", None), class_attributes=False))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{sum(x.size for _, x in leaves)} parameters {digest[:16]}"

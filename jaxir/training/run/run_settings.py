"""The settings that must be the same when a run is resumed, as JSON values."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
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
_HASHED = ("auxiliary", "model", _WEIGHTS)  # compared last, since other settings (seed) determine them
_DESCRIBED = ("objective", "optimizer")
_OF_LOSS = ("loss on ", "accuracy on ")
_OF_FIRST_BATCH = re.compile(r"\b\d+ examples [0-9a-f]{16}\b")  # how earlier jaxirs recorded data
_OTHER_CONTENT = "with other content"


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
    """Returns the settings that determine a run: with equal settings, runs end with equal parameters.

    The mesh is not included: a run may be resumed on other devices, which only changes rounding. The number
    of parts in which processes read a batch is included if the order of the data depends on it.
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
    """Returns why a run with the settings `saved` cannot be resumed with `now`; None if it can."""
    for name in sorted({*saved, *now}, key=lambda name: (name in _HASHED, name)):
        was, given = saved.get(name), now.get(name)
        if name == _WEIGHTS:
            if found := _other_weights(was, given):
                return found
            continue
        if name == "dev" and str(was).startswith(_OF_LOSS):  # earlier versions recorded distractors, too
            was = was.partition(" distractors")[0].rpartition(", ")[0] if "distractors" in was else was
        for part in (EVALUATED, WRITTEN, ONE_BATCH) if name == "dev" and given else ():
            if part not in str(was):  # earlier versions of jaxir did not record these parts
                given = given.partition(part)[0]
        if was == given:
            continue
        if name in ("data", "dev") and _OF_FIRST_BATCH.search(str(was)):
            return (
                "was started by an earlier jaxir, which recorded only the first batch of its data, so the"
                " data cannot be compared; resume the run with that version, or give another output_dir"
            )
        if name == "data":
            return f"was trained on other data: {_unlike(was, given)}; {HINT}"
        if (found := _other(name, was, given)) is not None:
            return f"was trained with {found}; {HINT}"
    return None


def check_alike(settings: Mapping[str, Any]) -> None:
    """Raises a UserError in all processes if any process has other settings or weights than process 0."""
    first, *others = map(json.loads, of_all(json.dumps(settings)))
    for number, own in enumerate(others, start=1):
        for name in sorted({*own, *first}, key=lambda name: (name in _HASHED, name)):
            was, given = own.get(name), first.get(name)
            if was != given and (found := _other(name, was, given)) is not None:
                found = f"weights {_OTHER_CONTENT}" if name == _WEIGHTS else found
                than = "than" if found.endswith(_OTHER_CONTENT) else "as"
                raise UserError(
                    f"process {number} has {found} {than} process 0 has: start the same command, on the same"
                    " model and data, in every process of the run"
                )


def _other_weights(was: Any, now: Any) -> str | None:
    """Returns a sentence if a run started from other weights; None if it did not or if this is unknown.

    Earlier versions did not record weights. Random weights may differ by rounding on other devices.
    """
    known = [value if isinstance(value, Mapping) else {} for value in (was, now)]
    if len({value.get("on") for value in known}) > 1 or len({value.get("hash") for value in known}) == 1:
        return None
    return (
        "was started from other weights than the model has now; give the model that the run started from to"
        " resume it, or another output_dir"
    )


def _other(name: str, was: Any, given: Any) -> str | None:
    """Returns a phrase with the old and the new value of a setting; None if it is unchanged."""
    if name == "auxiliary":
        return _other_arrays(_arrays(was), _arrays(given))
    if isinstance(was, str) and isinstance(given, str) and name in _DESCRIBED:
        return difference(name, was, given)
    return f"{name}={_unlike(was, given)}"


def _unlike(was: Any, given: Any) -> str:
    """Returns a phrase such as "64 pairs, not 32 pairs" for two values of a setting, without hashes."""
    before, now = (without_hashes(str(value)) for value in (was, given))
    return f"{before}, not {now}" if before != now else f"{before} {_OTHER_CONTENT}"


def _arrays(fingerprint: Any) -> Mapping[str, Any]:
    """Returns an auxiliary's fingerprint as a dict, also from None (no auxiliary) or a hash (old runs)."""
    if fingerprint is None:
        return {"hash": None, "arrays": {}}
    return {"hash": fingerprint, "arrays": None} if isinstance(fingerprint, str) else fingerprint


def _other_arrays(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Returns the first array in which the auxiliary modules of two runs differ; None if they are equal."""
    if was["hash"] == now["hash"]:
        return None
    if was["arrays"] is None and now["hash"] is None:
        return "auxiliary modules, but now the objective has none"
    if was["arrays"] is None or was["arrays"] == now["arrays"]:
        return (
            "auxiliary modules that started with other values; these values depend on the objective's code"
            " and settings, the seed and the texts"
        )
    names = sorted({*was["arrays"], *now["arrays"]})
    name = next(n for n in names if was["arrays"].get(n) != now["arrays"].get(n))
    before, given = (found["arrays"].get(name, "nothing") for found in (was, now))
    return f"auxiliary.{name}={before}, not {given}"


def weights(model: nnx.Module, partitioner: Partitioner) -> dict[str, dict[str, str]]:
    """Returns, as a setting, a hash of a run's initial parameters, and the mesh on which they were made."""
    digest = _digest(_content(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    return {_WEIGHTS: {"hash": digest, "on": f"{jax.default_backend()} {dict(partitioner.mesh.shape)}"}}


def auxiliary_fingerprint(auxiliary: nnx.Module) -> dict[str, Any]:
    """Returns a hash of the names, shapes, types and initial content of arrays, and the shapes by name."""
    variables = nnx.to_pure_dict(nnx.state(auxiliary))
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    digest = _digest([*_content(variables), *_shapes(leaves)])
    arrays = {array_checksums.name_of(path): f"{list(x.shape)} {x.dtype}" for path, x in leaves}
    return {"hash": f"{len(leaves)} arrays {digest}", "arrays": arrays}


def model_fingerprint(model: nnx.Module) -> str:
    """Returns the number of parameters, and a hash of their names, shapes and types and of the config."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    # Class attributes of the config are left out: earlier versions did not hash them.
    config = describe(getattr(model, "config", None), class_attributes=False)
    return f"{sum(x.size for _, x in leaves)} parameters {_digest([*_shapes(leaves), config])}"


def _content(tree: Any) -> list[str]:
    sums = jax.device_get(jax.jit(array_checksums.of_tree)(tree))
    return [f"{name} {int(value)}" for name, value in sorted(sums.items())]


def _shapes(leaves: Iterable[tuple[Any, Any]]) -> list[str]:
    return [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in leaves]


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

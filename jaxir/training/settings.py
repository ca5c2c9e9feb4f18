"""The settings that the parts of an interrupted run must share, as JSON values that name themselves."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxir.interop import array_checksums
from jaxir.training.described import describe, difference
from jaxir.training.recipe import Recipe

HINT = "give the settings of that run to resume it, or another output_dir"
_HASHED = ("auxiliary", "model")  # told last: they follow from others, such as the objective's and the seed
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
        if name == "dev" and str(was).startswith(_OF_LOSS):  # earlier, distractors were told with losses too
            was = was.partition(" distractors")[0].rpartition(", ")[0] if "distractors" in was else was
        if was == given:
            continue
        if name in ("data", "dev") and _OF_FIRST_BATCH.search(str(was)):
            return (
                "was begun by an earlier jaxir, which knew its data by their first batch only: whether these"
                " are the same cannot be told; resume it with that jaxir, or give another output_dir"
            )
        if name == "data":
            return f"was trained on other data: {was}, not {given}; {HINT}"
        told = f"{name}={was}, not {given}"
        if isinstance(was, str) and isinstance(given, str) and name in _DESCRIBED:
            told = difference(name, was, given)
        if told is not None:
            return f"was trained with {told}; {HINT}"
    return None


def auxiliary_fingerprint(auxiliary: nnx.Module) -> str:
    """Returns the number of arrays and a hash of their names, shapes, types and first content."""
    variables = nnx.to_pure_dict(nnx.state(auxiliary))
    sums = jax.device_get(jax.jit(array_checksums.of_tree)(variables))
    lines = [f"{name} {int(value)}" for name, value in sorted(sums.items())]
    shapes = jax.tree_util.tree_leaves_with_path(variables)
    lines += [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in shapes]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{len(shapes)} arrays {digest[:16]}"


def model_fingerprint(model: nnx.Module) -> str:
    """Returns the number of parameters and a hash of their names, shapes, types and the config."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    lines = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in leaves]
    lines.append(describe(getattr(model, "config", None)))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{sum(x.size for _, x in leaves)} parameters {digest[:16]}"

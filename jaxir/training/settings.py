"""The settings that the parts of an interrupted run must share, as JSON values that name themselves."""

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx


def agreed_settings(
    model: nnx.Module,
    objective: str,
    data: Any,
    optimizer: Any,
    *,
    dev: Any,
    dev_metric: str,
    dev_distractors: int,
    steps: int,
    batch_size: int,
    seed: int,
    parts: int,
) -> dict[str, Any]:
    """Returns what decides the course of a run: two runs with the same settings end with the same parameters.

    The mesh is not among them: a run may go on with other devices, to the same numbers up to rounding. Where
    the order of the data hangs on it, the number of parts that processes read a batch in is.
    """
    return ({"data_parts": parts} if data.order_depends_on_parts else {}) | {
        "batch_size": batch_size,
        "data": data_fingerprint(data, batch_size, seed),
        "dev": dev and f"{dev_metric} on {data_fingerprint(dev, 1, 0)}, {dev_distractors} distractors",
        "model": model_fingerprint(model),
        "objective": objective,
        "optimizer": describe(optimizer),
        "seed": seed,
        "steps": steps,
    }


def data_fingerprint(data: Any, batch_size: int, seed: int) -> str:
    """Returns the number of examples and a hash of the first batch (its texts, tokenizer and order)."""
    batch = next(
        iter(data.batches(batch_size=batch_size, seed=seed, start_step=0, process_index=0, process_count=1))
    )
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(f"{name} {batch[name].dtype} {batch[name].shape} ".encode())
        digest.update(batch[name].tobytes())
    return f"{data.num_examples} examples {digest.hexdigest()[:16]}"


def model_fingerprint(model: nnx.Module) -> str:
    """Returns the number of parameters and a hash of their names, shapes, types and the config."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    lines = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in leaves]
    lines.append(describe(getattr(model, "config", None)))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{sum(x.size for _, x in leaves)} parameters {digest[:16]}"


def describe(value: Any, bindings: Callable[[Any], Mapping[str, Any]] = lambda _: {}) -> str:
    """Returns a text that is the same in every process for equal settings: names, fields and defaults.

    Args:
      value: a settings object, a function, or a plain value, nested at will.
      bindings: the arguments of a function that are bound elsewhere (by gin, say).
    """

    def call(function: Any, given: Mapping[str, Any]) -> str:
        parameters = inspect.signature(function).parameters
        defaults = {n: p.default for n, p in parameters.items() if p.default not in (p.empty, None)}
        name = f"{function.__module__}.{function.__qualname__}"
        return listed(name, defaults | dict(bindings(function)) | dict(given))

    def listed(name: str, values: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{k}={text(v)}' for k, v in values.items())})"

    def text(value: Any) -> str:
        if isinstance(value, functools.partial):
            parameters = inspect.signature(value.func).parameters
            return call(value.func, dict(zip(parameters, value.args, strict=False)) | value.keywords)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            return call(value, {})
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return listed(type(value).__qualname__, fields)
        if isinstance(value, Mapping):
            return listed("dict", {str(k): v for k, v in value.items()})
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, str | int | float | bool | None):
            return repr(value)
        return listed(type(value).__qualname__, {k: v for k, v in vars(value).items() if k[0] != "_"})

    return text(value)

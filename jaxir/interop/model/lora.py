"""Adapters (LoRA) of stored models: added, merged, and kept apart from the weights that they change."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.lazy import Index, LazyArray
from jaxir.models.adapters import Adapters, adapted, initial_down, is_adapter
from jaxir.models.backbones import BackboneConfig
from jaxir.models.codec import Changed

_TOWER = re.compile(r"^(?:query|passage)_")


def added(
    model: StoredModel,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Iterable[str] | None = None,
    seed: int = 0,
    where: str,
) -> StoredModel:
    """Returns `model` with new adapters, which change nothing yet; earlier adapters are merged first.

    Args:
      model: the model.
      rank: r of each adapter.
      alpha: the numerator of the adapters' factor; None: `rank`, so that the factor is 1.
      targets: names of dense layers (`Adapters.targets`), or transformers' names of these; None: all of the
        blocks.
      seed: seed of the random values.
      where: the model's name, with which errors begin.
    """
    model = merged(model)
    given = {} if targets is None else {"targets": _ours(targets, model.config.backbone)}
    adapters = Adapters(rank=rank, alpha=float(alpha or rank), **given)
    config = dataclasses.replace(model.config, adapters=adapters)
    try:
        shapes = stored.model_shapes(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    params, key = dict(model.params), jax.random.key(seed)
    for name in filter(is_adapter, shapes):
        if name.endswith(".up"):
            params[name] = np.zeros(shapes[name], np.float32)
        else:  # seed by the layer's name, so that scanned and unscanned layers start with equal values
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            params[name] = np.asarray(initial_down(own, shapes[name]))
    return dataclasses.replace(model, config=config, params=params)


def _ours(targets: Iterable[str], backbone: BackboneConfig) -> tuple[str, ...]:
    """Returns the targets with names of transformers' dense layers ("q_proj") replaced by jaxir's."""
    theirs: dict[str, list[str]] = {}
    for codec in backbone.hugging_face:
        for ours, module in codec.weights(backbone).items():
            name = module.name if isinstance(module, Changed) else module
            names = [n.rpartition("layers.*.")[2] for n in ((ours,) if isinstance(ours, str) else ours)]
            theirs.setdefault(name.rpartition(".")[2], []).extend(names)
    return tuple(dict.fromkeys(name for target in targets for name in theirs.get(target, [target])))


def merged(model: StoredModel) -> StoredModel:
    """Returns `model` with its adapters added to the kernels, W + (alpha / rank) A B in float32.

    If the adapters were trained on quantised weights, W has the values that those weights stand for.
    """
    adapters = model.config.adapters
    if adapters is None:
        return model
    config = dataclasses.replace(model.config, adapters=None)
    params = {name: value for name, value in model.params.items() if not is_adapter(name)}
    params = stored.rounded(config, params, model.base and model.base.weights)
    for module in adapted(model.params):
        down, up = (np.asarray(model.params[f"{module}.adapter.{part}"]) for part in ("down", "up"))
        params[f"{module}.kernel"] = _sum(params[f"{module}.kernel"], down * adapters.factor, up)
    return dataclasses.replace(model, config=config, params=params, base=None)


def _sum(kernel: Any, down: np.ndarray, up: np.ndarray) -> LazyArray:
    """Returns the lazy array W + A B [I, O]."""

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        return np.asarray(kernel[index], np.float32) + down[rows] @ up[:, columns]

    return LazyArray(kernel.shape, read)


def completed(params: Mapping[str, Any], names: Iterable[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters `names` of a model; takes those that are not in `params` from its base."""
    found = {name: (name, params) if name in params else (_in_base(name, base), base) for name in names}
    return {name: where[key] for name, (key, where) in found.items() if key is not None}


def _in_base(name: str, base: Mapping[str, Any]) -> str | None:
    """Returns the name that a model's parameter has in the base; None if the base lacks it.

    Both towers of an ADE were copied from one tower of the base.
    """
    return next((n for n in (name, _TOWER.sub("", name)) if n in base), None)


def digest_of(params: Mapping[str, Any]) -> str:
    """Returns a hash of the names and shapes of parameters, and of the values of vectors.

    If a model has changed, so have its norms and biases, and reading only these vectors is fast.
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(f"{name} {tuple(params[name].shape)}".encode())
        if len(params[name].shape) < 2:
            digest.update(np.ascontiguousarray(params[name][...], np.float32).data)
    return digest.hexdigest()[:16]

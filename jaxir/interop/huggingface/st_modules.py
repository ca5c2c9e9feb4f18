"""Reads and writes the modules of a sentence-transformers folder that come after the Transformer."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, fits
from jaxir.interop.weights.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    require,
    write_json,
    write_tensors,
)
from jaxir.models.after_pooling import AfterPooling
from jaxir.models.dual_encoder import Pooling, Projection

# sentence-transformers' names for the vector of a text and for the vectors of its tokens.
_VECTOR, _TOKENS = "sentence_embedding", "token_embeddings"
_MAPPED = {
    _VECTOR: "the vectors of tokens belong to models with many vectors",
    _TOKENS: "the vectors of texts belong to models with one vector",
}
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLINGS = [name for name in get_args(Pooling) if name in _POOLING_FLAGS.values()]
# torch.nn's activations whose classes need no arguments -> names in `after_pooling.FUNCTIONS`.
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
    "LeakyReLU": "leaky_relu",
    "ELU": "elu",
    "SELU": "selu",
    "CELU": "celu",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Mish": "mish",
    "ReLU6": "relu6",
    "Hardtanh": "hard_tanh",
    "Hardswish": "hard_swish",
    "Hardsigmoid": "hard_sigmoid",
    "LogSigmoid": "log_sigmoid",
}
SUPPORTED = ("Dense", "Normalize", "LayerNorm", "Dropout")  # modules after the pooling, in any order


@dataclasses.dataclass(frozen=True)
class PooledVector:
    """What happens to a pooled vector.

    Attributes:
      projection: the first module, if it is a plain linear map.
      after_pooling: further modules, without a Normalize at the end.
      normalized: whether the last module is a Normalize.
      params: the modules' parameters, by their names in an SDE.
    """

    projection: Projection | None
    after_pooling: tuple[AfterPooling, ...]
    normalized: bool
    params: dict[str, np.ndarray]


def read_pooling(path: Path) -> tuple[str | tuple[str, ...], bool]:
    """Returns (the pooling, or several poolings; whether they include the tokens of prompts)."""
    content = read_json(path, dict[str, Any])
    mode = content.get("pooling_mode")
    if mode is None:
        mode = [name for flag, name in _POOLING_FLAGS.items() if content.get(flag)] or ["mean"]
    modes = [mode] if isinstance(mode, str) else mode
    if not fits(modes, list[str]) or not modes:
        raise UserError(f"{path}: pooling_mode {mode!r:.40} is not the name of a pooling; correct it")
    if unknown := [name for name in modes if name not in POOLINGS]:
        raise UserError(
            f"{path}: pooling {unknown[0]!r:.40} is not supported, only {', '.join(POOLINGS)};"
            " give another model"
        )
    return modes[0] if len(modes) == 1 else tuple(modes), bool(content.get("include_prompt", True))


def read_layer_weights(directory: Path, num_layers: int) -> tuple[int, np.ndarray]:
    """Returns (first layer, weights) of a WeightedLayerPooling."""
    path = directory / "config.json"
    start = read_json(path, dict[str, Any]).get("layer_start", 4)
    weights = np.asarray(require(read_tensors(directory), "layer_weights", directory), np.float32)
    if not fits(start, int) or weights.shape != (num_layers + 1 - start,):
        raise UserError(
            f"{path}: layer_start {start!r:.20} and {len(weights)} weights do not fit {num_layers} layers;"
            " copy it again"
        )
    return start, weights


def read_after_pooling(modules: Sequence[tuple[str, Path]]) -> PooledVector:
    """Reads the modules after the pooling; each is a kind and a folder."""
    projection, found, params, normalized = None, [], {}, False
    kept = [(kind, folder) for kind, folder in modules if kind != "Dropout"]  # it only acts in training
    for i, (kind, folder) in enumerate(kept):
        if kind == "Normalize":
            path = folder / "config.json"
            _check_names(read_optional_json(path), path)
            normalized = i == len(kept) - 1
            found += [] if normalized else [AfterPooling(kind="normalize")]
        elif kind == "LayerNorm":
            tensors = read_tensors(folder)
            for ours, theirs in (("scale", "norm.weight"), ("bias", "norm.bias")):
                params[f"after_pooling.{len(found)}.norm.{ours}"] = require(tensors, theirs, folder)
            found.append(AfterPooling(kind="layer_norm"))
        else:
            module, tensors = _read_dense(folder)
            if i == 0 and module.activation in ("identity", "tanh") and not module.residual:
                projection = Projection(
                    dimension=module.dimension, use_bias=module.use_bias, activation=module.activation
                )
                params |= {n.replace("linear.", "projection."): x for n, x in tensors.items()}
            else:
                params |= {f"after_pooling.{len(found)}.{n}": x for n, x in tensors.items()}
                found.append(module)
    return PooledVector(projection, tuple(found), normalized, params)


def read_token_modules(
    modules: Sequence[tuple[str, Path]],
) -> tuple[tuple[AfterPooling, ...], dict[str, np.ndarray]]:
    """Reads the Dense and Normalize modules that map the vectors of tokens, in order.

    Returns:
      The modules, and their parameters by their names in a multi-vector encoder.
    """
    found: list[AfterPooling] = []
    params: dict[str, np.ndarray] = {}
    for kind, folder in modules:
        path = folder / "config.json"
        if kind == "Normalize":
            content = read_optional_json(path)
            if content.get("module_input_name") in (None, _VECTOR):
                # This module normalises a vector of the text, which a multi-vector model does not have.
                continue
            _check_names(content, path, _TOKENS)
            found.append(AfterPooling(kind="normalize"))
        else:
            module, tensors = _read_dense(folder, _TOKENS)
            params |= {f"token_modules.{len(found)}.{name}": x for name, x in tensors.items()}
            found.append(module)
    return tuple(found), params


def write_pooling(directory: Path, pooling: Sequence[str], *, dimension: int, include_prompt: bool) -> None:
    """Writes the folder of a Pooling of token vectors with `dimension` dimensions."""
    if unknown := [name for name in pooling if name not in POOLINGS]:
        raise UserError(f"sentence-transformers has no {unknown[0]} pooling: export to onnx or saved_model")
    directory.mkdir(parents=True)
    flags = {flag: name in pooling for flag, name in _POOLING_FLAGS.items()}
    content = {"word_embedding_dimension": dimension, **flags, "include_prompt": include_prompt}
    ordered = [name for name in _POOLING_FLAGS.values() if name in pooling]
    if ordered != list(pooling):  # the flags cannot express this order
        content["pooling_mode"] = list(pooling)
    write_json(directory / "config.json", content)


def write_layer_weights(directory: Path, weights: np.ndarray, *, start: int, dimension: int) -> None:
    """Writes the folder of a WeightedLayerPooling."""
    directory.mkdir(parents=True)
    layers = start + len(weights) - 1
    write_json(
        directory / "config.json",
        {"embedding_dimension": dimension, "layer_start": start, "num_hidden_layers": layers},
    )
    write_tensors(directory / SINGLE, {"layer_weights": np.asarray(weights)})


def write_dense(
    directory: Path, module: AfterPooling | Projection, tensors: Mapping[str, Any], **names: str
) -> None:
    """Writes the folder of a Dense; `tensors` has "linear.kernel" and perhaps bias and residual.

    `names` are further entries of its configuration, such as module_input_name.
    """
    directory.mkdir(parents=True)
    theirs = {ours: name for name, ours in _ACTIVATIONS.items()}[module.activation]
    place = "linear" if theirs == "Identity" else "activation"
    kernel = np.asarray(tensors["linear.kernel"])
    residual = getattr(module, "residual", False)
    content = {
        "in_features": kernel.shape[0],
        "out_features": kernel.shape[1],
        "bias": module.use_bias,
        "activation_function": f"torch.nn.modules.{place}.{theirs}",
    }
    write_json(directory / "config.json", content | names | ({"use_residual": True} if residual else {}))
    written = {"linear.weight": kernel.T}
    if module.use_bias:
        written["linear.bias"] = np.asarray(tensors["linear.bias"])
    if "residual.kernel" in tensors:
        written["residual.weight"] = np.asarray(tensors["residual.kernel"]).T
    write_tensors(directory / SINGLE, written)


def write_layer_norm(directory: Path, tensors: Mapping[str, Any]) -> None:
    """Writes the folder of a LayerNorm; `tensors` has "norm.scale" and "norm.bias"."""
    directory.mkdir(parents=True)
    scale = np.asarray(tensors["norm.scale"])
    write_json(directory / "config.json", {"dimension": len(scale)})
    write_tensors(directory / SINGLE, {"norm.weight": scale, "norm.bias": np.asarray(tensors["norm.bias"])})


def _read_dense(directory: Path, reads: str = _VECTOR) -> tuple[AfterPooling, dict[str, np.ndarray]]:
    path = directory / "config.json"
    content = read_json(path, dict[str, Any])
    name = str(content.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(name.rpartition(".")[2]) if name.startswith("torch.") else None
    if activation is None:
        raise UserError(
            f"{path}: activation {name:.80} is not supported, only {', '.join(_ACTIVATIONS)} of torch.nn;"
            " give another model"
        )
    _check_names(content, path, reads)
    tensors = read_tensors(directory)
    params = {"linear.kernel": require(tensors, "linear.weight", directory).T}
    if content.get("bias", True):
        params["linear.bias"] = require(tensors, "linear.bias", directory)
    elif "linear.bias" in tensors:
        raise UserError(f"{path}: bias is false, but its weights have a linear.bias: correct one of them")
    dimension, residual = require(content, "out_features", path), bool(content.get("use_residual"))
    if not fits(dimension, Count):
        raise UserError(f"{path}: out_features is {dimension!r:.40}, not a number of dimensions; correct it")
    if residual and params["linear.kernel"].shape[0] != dimension:
        params["residual.kernel"] = require(tensors, "residual.weight", directory).T
    module = AfterPooling(
        kind="dense",
        dimension=dimension,
        use_bias="linear.bias" in params,
        activation=activation,
        residual=residual,
    )
    return module, params


def _check_names(content: dict[str, Any], path: Path, reads: str = _VECTOR) -> None:
    """Refuses a module that reads or makes anything but `reads`, the vectors of texts or of tokens."""
    for entry in ("module_input_name", "module_output_name"):
        if content.get(entry) not in (None, reads):
            raise UserError(
                f"{path}: {entry} {content[entry]!r:.40} is not supported, only {reads}: modules that map"
                f" {_MAPPED[reads]} a text"
            )

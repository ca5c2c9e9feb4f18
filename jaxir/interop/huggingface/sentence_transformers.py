"""sentence-transformers folders (modules.json and what it names) to models and back."""

from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxir.asides import temporary_directory
from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.files import inside
from jaxir.interop import stored
from jaxir.interop.huggingface import hf
from jaxir.interop.huggingface.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    require,
    write_json,
    write_tensors,
)
from jaxir.interop.stored import EncoderSettings, StoredModel
from jaxir.models.dual_encoder import DualEncoderConfig, Pooling, Projection

_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLINGS = [name for name in get_args(Pooling) if name in _POOLING_FLAGS.values()]
_DENSE_ACTIVATIONS = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
}


def check(directory: Path) -> None:
    """Checks, before there are weights, that a folder's modules are some that a dual encoder here has.

    Raises:
      UserError: they are not.
    """
    modules = _modules(directory)
    hf.check(modules["Transformer"])
    _read_pooling(modules["Pooling"] / "config.json", has_prompts=False)


def read(directory: Path) -> StoredModel:
    """Reads a folder of one Transformer, a Pooling, and maybe a Dense and a Normalize.

    Vectors are normalised where the folder normalises them or compares them by cosine.

    Raises:
      UserError: a file is missing or damaged, or the folder does something that a dual encoder here cannot.
    """
    modules = _modules(directory)
    root = modules["Transformer"]
    encoder = hf.read_encoder(root)
    tokenizer = hf.read_tokenizer(root, encoder)
    transformer = read_optional_json(root / "sentence_bert_config.json")
    if transformer.get("do_lower_case"):
        tokenizer = _lower_cased(tokenizer, root)
    prompts = read_optional_json(directory / "config_sentence_transformers.json")
    projection, params = None, {f"encoder.{name}": value for name, value in encoder.params.items()}
    if "Dense" in modules:
        projection, projection_params = _read_dense(modules["Dense"])
        params |= projection_params
    similarity = "cosine"
    if "Normalize" not in modules:
        similarity = prompts.get("similarity_fn_name") or "cosine"
        if similarity not in ("cosine", "dot"):
            raise UserError(f"{directory}: similarity {similarity!r} is not supported, only cosine and dot")
    config = DualEncoderConfig(
        backbone=encoder.config,
        pooling=_read_pooling(modules["Pooling"] / "config.json", bool(_prompts(prompts))),
        projection=projection,
        similarity=similarity,
    )
    stored.check_params(params, stored.model_shapes(config), str(directory))
    length = transformer.get("max_seq_length") or hf.max_length(root, encoder)
    found = _prompts(prompts)
    return StoredModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        settings=EncoderSettings(
            query_max_length=length,
            passage_max_length=length,
            query_prompt=found.get("query", ""),
            passage_prompt=found.get("passage", ""),
        ),
    )


def write(directory: Path, model: StoredModel, *, tower: str) -> None:
    """Writes one tower of `model` (an SDE's only one under either name) as a folder.

    Raises:
      UserError: the backbone has no Hugging Face architecture, or the pooling no module.
    """
    config, settings = model.config, model.settings
    if config.pooling not in _POOLINGS:
        raise UserError(
            f"sentence-transformers has no {config.pooling} pooling: --format=onnx and saved_model have it"
        )
    hf.write_tower(directory, model, tower=tower)
    lengths = {"query": settings.query_max_length, "passage": settings.passage_max_length}
    length = max(lengths.values()) if config.sharing == "sde" else lengths[tower]
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    prompts = {"query": settings.query_prompt, "document": settings.passage_prompt}
    write_json(
        directory / "config_sentence_transformers.json",
        {
            "prompts": {name: text for name, text in prompts.items() if text},
            "default_prompt_name": None,
            "similarity_fn_name": config.similarity,
        },
    )
    modules = ["Transformer", "Pooling"]
    _write_pooling(directory / "1_Pooling", config)
    if config.projection is not None:
        name = f"{tower}_projection" if config.sharing == "ade" else "projection"
        kernel, bias = model.params[f"{name}.kernel"], model.params.get(f"{name}.bias")
        _write_dense(directory / "2_Dense", config.projection, kernel, bias)
        modules.append("Dense")
    if config.similarity == "cosine":
        modules.append("Normalize")
        (directory / f"{len(modules) - 1}_Normalize").mkdir()
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(modules)
    ]
    write_json(directory / "modules.json", listed)


def _modules(directory: Path) -> dict[str, Path]:
    """Returns the folder of each module, by kind."""
    path = directory / "modules.json"
    if not path.is_file():
        hint = "; for a plain Hugging Face folder write hf:" if (directory / "config.json").is_file() else ""
        raise UserError(f"{path}: no such file, so this is no sentence-transformers folder{hint}")
    content = read_json(path)
    if not isinstance(content, list):
        raise UserError(f"{path}: not a list of modules")
    kinds = [require(module, "type", path).rpartition(".")[2] for module in content]
    wanted = [kind for kind in _ORDER if kind in kinds]
    if kinds != wanted or kinds[:2] != ["Transformer", "Pooling"]:
        raise UserError(
            f"{path}: the modules {', '.join(kinds)} are not supported;"
            f" there may be {', '.join(_ORDER)}, in this order, the last two or not"
        )
    places = [require(module, "path", path) for module in content]
    return {
        kind: directory if place == "" else Path(inside(directory, place, said_by=path))
        for kind, place in zip(kinds, places, strict=True)
    }


def _prompts(content: dict[str, Any]) -> dict[str, str]:
    """Returns the prompts by tower, chosen by the names that sentence-transformers chooses by."""
    prompts = content.get("prompts") or {}
    default = prompts.get(content.get("default_prompt_name")) or ""
    found = {
        "query": prompts.get("query", default),
        "passage": next((prompts[n] for n in ("document", "passage", "corpus") if n in prompts), default),
    }
    return {tower: text for tower, text in found.items() if text}


def _read_pooling(path: Path, has_prompts: bool) -> str:
    content = read_json(path)
    mode = content.get("pooling_mode")
    if mode is None:
        mode = [name for flag, name in _POOLING_FLAGS.items() if content.get(flag)] or ["mean"]
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        known = ", ".join(_POOLINGS)
        raise UserError(f"{path}: pooling {' + '.join(modes)} is not supported, only {known}")
    if has_prompts and not content.get("include_prompt", True):
        raise UserError(f"{path}: leaving the prompt out of the pooling is not supported")
    return modes[0]


def _write_pooling(directory: Path, config: DualEncoderConfig) -> None:
    directory.mkdir()
    flags = {flag: name == config.pooling for flag, name in _POOLING_FLAGS.items()}
    content = {"word_embedding_dimension": config.backbone.embed_dim, **flags, "include_prompt": True}
    write_json(directory / "config.json", content)


def _read_dense(directory: Path) -> tuple[Projection, dict[str, np.ndarray]]:
    path = directory / "config.json"
    content = read_json(path)
    name = content.get("activation_function", _DENSE_ACTIVATIONS["tanh"])
    activation = {full.rpartition(".")[2]: ours for ours, full in _DENSE_ACTIVATIONS.items()}.get(
        name.rpartition(".")[2]
    )
    if activation is None:
        raise UserError(f"{path}: activation {name} is not supported, only Identity and Tanh")
    if (
        content.get("use_residual")
        or content.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    ):
        raise UserError(f"{path}: a Dense with a residual or on single tokens is not supported")
    tensors = read_tensors(directory)
    kernel = require(tensors, "linear.weight", directory).astype(np.float32).T
    params = {"projection.kernel": kernel}
    if content.get("bias", True):
        params["projection.bias"] = require(tensors, "linear.bias", directory).astype(np.float32)
    dimension = require(content, "out_features", path)
    return Projection(
        dimension=dimension, use_bias="projection.bias" in params, activation=activation
    ), params


def _write_dense(
    directory: Path, projection: Projection, kernel: np.ndarray, bias: np.ndarray | None
) -> None:
    directory.mkdir()
    content = {
        "in_features": kernel.shape[0],
        "out_features": kernel.shape[1],
        "bias": bias is not None,
        "activation_function": _DENSE_ACTIVATIONS[projection.activation],
    }
    write_json(directory / "config.json", content)
    tensors = {"linear.weight": np.asarray(kernel).T} | ({} if bias is None else {"linear.bias": bias})
    write_tensors(directory / SINGLE, tensors)


def _lower_cased(tokenizer: Tokenizer, root: Path) -> Tokenizer:
    """Returns `tokenizer` with lower-casing put before what it does to a text."""
    with temporary_directory() as directory:
        tokenizer.save(directory)
        if not (directory / "tokenizer.json").is_file():
            raise UserError(f"{root}: do_lower_case needs a tokenizer.json")
        content = read_json(directory / "tokenizer.json")
        steps = [{"type": "Lowercase"}] + ([content["normalizer"]] if content.get("normalizer") else [])
        content["normalizer"] = {"type": "Sequence", "normalizers": steps}
        write_json(directory / "tokenizer.json", content)
        return Tokenizer.load(directory)

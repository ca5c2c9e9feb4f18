"""Converts sentence-transformers folders (modules.json and the modules in it) to models and back."""

from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, fits
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, st_files
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    require,
    write_json,
    write_tensors,
)
from jaxir.models.dual_encoder import DualEncoderConfig, Pooling, Projection

_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_VECTOR = "sentence_embedding"  # sentence-transformers' name for the vector of a text
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
    """Checks, before weights are downloaded, that a dual encoder supports a folder's modules."""
    st_files.read_config(directory, "dual_encoder")
    modules = _modules(directory)
    hf.read_architecture(modules["Transformer"])
    _read_pooling(modules["Pooling"] / "config.json", has_prompts=False)


def read(directory: Path) -> StoredModel:
    """Reads a folder with one Transformer, a Pooling, and optionally a Dense and a Normalize.

    Vectors are normalised if the folder normalises them or compares them by cosine.
    """
    about = st_files.read_config(directory, "dual_encoder")
    if (dimension := about.get("truncate_dim")) is not None:
        path = directory / hub_files.ST_CONFIG
        raise UserError(f"{path}: truncate_dim {dimension!r:.40} is not supported: remove it")
    modules = _modules(directory)
    root = modules["Transformer"]
    encoder = hf.read_encoder(root)
    transformer = st_files.read_transformer(root, encoder, "dual_encoder")
    tokenizer = hf.read_tokenizer(root, encoder, lower_case=transformer.lower_case)
    projection, params = None, encoder.in_model
    if "Dense" in modules:
        projection, projection_params = _read_dense(modules["Dense"])
        params |= projection_params
    similarity = "cosine"
    if "Normalize" in modules:
        path = modules["Normalize"] / "config.json"
        _check_names(read_optional_json(path), path)
    else:
        similarity = about.get("similarity_fn_name") or "cosine"
        if similarity not in ("cosine", "dot"):
            raise UserError(f"{directory}: similarity {similarity!r} is not supported, only cosine and dot")
    named, default = about["prompts"], about.get("default_prompt_name")
    query_prompt, passage_prompt = st_files.prompts_of_sides(named, default)
    pooling, pools_prompts = _read_pooling(
        modules["Pooling"] / "config.json", has_prompts=bool(query_prompt or passage_prompt)
    )
    config = DualEncoderConfig(
        backbone=encoder.config,
        pooling=pooling,
        projection=projection,
        similarity=similarity,
    )
    stored.check_params(params, stored.model_shapes(config), str(directory))
    return StoredModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        settings=EncoderSettings(
            query_max_length=transformer.query_max_length,
            passage_max_length=transformer.passage_max_length,
            query_prompt=query_prompt,
            passage_prompt=passage_prompt,
            named_prompts=named,
            default_prompt_name=default,
            pools_prompts=pools_prompts,
        ),
    )


def write(directory: Path, model: StoredModel, *, tower: str) -> None:
    """Writes one tower of `model` as a folder. An SDE's one tower has both names."""
    config, settings = model.config, model.settings
    if config.pooling not in _POOLINGS:
        raise UserError(
            f"sentence-transformers has no {config.pooling} pooling: export to onnx or saved_model"
        )
    hf.write_tower(directory, model, tower=tower)
    length = hf.length_of(model, tower)
    write_json(directory / hub_files.ST_TRANSFORMER[0], {"max_seq_length": length, "do_lower_case": False})
    named, default = st_files.folder_prompts(settings)
    write_json(
        directory / hub_files.ST_CONFIG,
        {"prompts": named, "default_prompt_name": default, "similarity_fn_name": config.similarity},
    )
    modules = ["Transformer", "Pooling"]
    (directory / "1_Pooling").mkdir()
    flags = {flag: name == config.pooling for flag, name in _POOLING_FLAGS.items()}
    pooling = {"word_embedding_dimension": config.backbone.embed_dim, **flags}
    write_json(directory / "1_Pooling" / "config.json", pooling | {"include_prompt": settings.pools_prompts})
    if config.projection is not None:
        name = f"{tower}_projection" if config.sharing == "ade" else "projection"
        kernel, bias = model.params[f"{name}.kernel"], model.params.get(f"{name}.bias")
        (directory / "2_Dense").mkdir()
        dense = {"in_features": kernel.shape[0], "out_features": kernel.shape[1], "bias": bias is not None}
        dense["activation_function"] = _DENSE_ACTIVATIONS[config.projection.activation]
        write_json(directory / "2_Dense" / "config.json", dense)
        tensors = {"linear.weight": np.asarray(kernel).T} | ({} if bias is None else {"linear.bias": bias})
        write_tensors(directory / "2_Dense" / SINGLE, tensors)
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
    write_json(directory / hub_files.ST_MODULES, listed)


def _modules(directory: Path) -> dict[str, Path]:
    """Returns the folder of each module, by kind."""
    found = st_files.modules(directory)
    kinds = [kind for kind, _ in found]
    wanted = [kind for kind in _ORDER if kind in kinds]
    if kinds != wanted or kinds[:2] != ["Transformer", "Pooling"]:
        raise UserError(
            f"{directory / hub_files.ST_MODULES}: the modules {', '.join(kinds)} are not supported;"
            f" expected {', '.join(_ORDER)} in this order, of which the last two are optional"
        )
    return dict(found)


def _read_pooling(path: Path, *, has_prompts: bool) -> tuple[str, bool]:
    """Returns (pooling, whether it includes the tokens of prompts)."""
    content = read_json(path, dict[str, Any])
    mode = content.get("pooling_mode")
    if mode is None:
        mode = [name for flag, name in _POOLING_FLAGS.items() if content.get(flag)] or ["mean"]
    modes = [mode] if isinstance(mode, str) else mode
    if not fits(modes, list[str]):
        raise UserError(f"{path}: pooling_mode {mode!r:.40} is not the name of a pooling")
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        known = ", ".join(_POOLINGS)
        raise UserError(f"{path}: pooling {' + '.join(modes)} is not supported, only {known}")
    include_prompt = bool(content.get("include_prompt", True))
    if has_prompts and not include_prompt:
        raise UserError(
            f"{path}: include_prompt false is not supported for a model with prompts: use another model"
        )
    return modes[0], include_prompt


def _read_dense(directory: Path) -> tuple[Projection, dict[str, np.ndarray]]:
    path = directory / "config.json"
    content = read_json(path, dict[str, Any])
    name = content.get("activation_function", _DENSE_ACTIVATIONS["tanh"])
    known = {full.rpartition(".")[2]: ours for ours, full in _DENSE_ACTIVATIONS.items()}
    activation = known.get(str(name).rpartition(".")[2]) if str(name).startswith("torch.") else None
    if activation is None:
        raise UserError(f"{path}: activation {name} is not supported, only torch's Identity and Tanh")
    if content.get("use_residual"):
        raise UserError(f"{path}: a Dense with a residual is not supported: use another model")
    _check_names(content, path)
    tensors = read_tensors(directory)
    kernel = require(tensors, "linear.weight", directory).T
    params = {"projection.kernel": kernel}
    if content.get("bias", True):
        params["projection.bias"] = require(tensors, "linear.bias", directory)
    elif "linear.bias" in tensors:
        raise UserError(f"{path}: bias is false, but its weights have a linear.bias: correct one of them")
    dimension = require(content, "out_features", path)
    if not fits(dimension, Count):
        raise UserError(f"{path}: out_features is {dimension!r:.40}, not a number of dimensions")
    return Projection(
        dimension=dimension, use_bias="projection.bias" in params, activation=activation
    ), params


def _check_names(content: dict[str, Any], path: Path) -> None:
    """Refuses a module that reads or makes something other than the vectors of texts."""
    for entry in ("module_input_name", "module_output_name"):
        if content.get(entry) not in (None, _VECTOR):
            raise UserError(f"{path}: {entry} {content[entry]!r:.40} is not supported, only {_VECTOR}")

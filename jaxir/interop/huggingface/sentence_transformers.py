"""Converts sentence-transformers folders (modules.json and the modules in it) to models and back."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, peft, st_files, st_modules, static_embeddings, tokenizer_files
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import Base, StoredModel
from jaxir.interop.weights.weights import write_json
from jaxir.models.after_pooling import AfterPooling
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.word_vectors import WordVectorsConfig

_BEFORE_POOLING = ("Transformer", "WeightedLayerPooling", "Pooling")
_Modules = list[tuple[str, Path]]


class EncoderTower(NamedTuple):
    """One tower of a folder, as an SDE without prompts.

    `lengths` are the maximum numbers of tokens of (queries, passages). `pools_prompts` says whether pooling
    includes the tokens of prompts.
    """

    config: DualEncoderConfig
    params: dict[str, np.ndarray]
    tokenizer: Tokenizer
    lengths: tuple[int, int]
    pools_prompts: bool = True
    base: Base | None = None


def check(directory: Path) -> None:
    """Checks, before weights are downloaded, that a dual encoder supports a folder's modules."""
    st_files.read_config(directory, "dual_encoder")
    own, shared = modules_of_towers(directory)
    for modules in own:
        check_order(directory, modules + shared)
        found = dict(modules)
        if "Transformer" in found:
            hf.read_architecture(peft.base_directory(found["Transformer"]))
            st_modules.read_pooling(found["Pooling"] / "config.json")


def read(directory: Path) -> StoredModel:
    """Reads a folder with a Transformer and a Pooling, or a StaticEmbedding, and modules after them.

    With a Router for queries and documents the model has two towers. Vectors are normalised if the folder
    normalises them or compares them by cosine.
    """
    about = st_files.read_config(directory, "dual_encoder")
    own, shared = modules_of_towers(directory)
    towers = [read_tower(directory, modules + shared, about) for modules in own]
    config, params = towers[0].config, towers[0].params
    if len(towers) == 2:
        _check_alike(directory, towers)
        sharing = "ade"
        after = [kind for modules in own for kind, _ in modules if kind in ("Dense", "LayerNorm")]
        if config.projection is not None and not after and config.layers_from is None:
            sharing = "ade_spl"
        config = dataclasses.replace(config, sharing=sharing)
        params = _params_of_towers(config, [tower.params for tower in towers])
    named, default = about["prompts"], about.get("default_prompt_name")
    prompts = st_files.prompts_of_sides(named, default)
    if not towers[0].pools_prompts:
        sides = zip(("query", "passage"), prompts, strict=True)
        counts = {f"{name}_prompt_tokens": towers[0].tokenizer.prompt_length(p) for name, p in sides}
        config = dataclasses.replace(config, **counts)
    stored.check_params(params, stored.model_shapes(config), str(directory))
    return StoredModel(
        config=config,
        params=params,
        tokenizer=towers[0].tokenizer,
        settings=EncoderSettings(
            query_max_length=towers[0].lengths[0],
            passage_max_length=towers[-1].lengths[1],
            query_prompt=prompts[0],
            passage_prompt=prompts[1],
            named_prompts=named,
            default_prompt_name=default,
            pools_prompts=towers[0].pools_prompts,
        ),
        base=towers[0].base,
    )


def write(directory: Path, model: StoredModel) -> None:
    """Writes a model as a folder; two towers become the routes "query" and "document" of a Router."""
    config, settings = model.config, model.settings
    named, default = st_files.folder_prompts(settings)
    about = {"prompts": named, "default_prompt_name": default, "similarity_fn_name": config.similarity}
    last = config.after_pooling[-1:]
    truncates = bool(last) and last[0].kind == "truncate"
    if truncates:
        about["truncate_dim"] = last[0].dimension
    write_json(directory / hub_files.ST_CONFIG, about)
    # sentence-transformers truncates after all modules, and does not normalise the result.
    normalize = [("Normalize", {})] if config.similarity == "cosine" and not truncates else []
    if config.sharing == "sde":
        listed = write_modules(directory, [*parts_of(model, "query"), *normalize], model, "query")
    else:
        folder = directory / "0_Router"
        routes = {}
        for side, tower in zip(st_files.ROUTES, ("query", "passage"), strict=True):
            own = [part for part in parts_of(model, tower) if not _is_shared(config, part)]
            routes[side] = write_modules(folder, own, model, tower, prefix=f"{side}_")
        _write_router(folder, routes)
        parts = [part for part in parts_of(model, "query") if _is_shared(config, part)]
        rest = write_modules(directory, [*parts, *normalize], model, "query", first=1)
        listed = [("Router", "0_Router"), *rest]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(listed)
    ]
    write_json(directory / hub_files.ST_MODULES, entries)


def modules_of_towers(directory: Path) -> tuple[list[_Modules], _Modules]:
    """Returns the modules of each tower (one tower, or queries and documents), and the modules after both."""
    modules = st_files.modules(directory)
    if not modules or modules[0][0] not in ("Router", "Asym"):
        return [modules], []
    own = list(st_files.routes(modules[0][1]).values())
    return ([own[0]] if own[0] == own[1] else own), modules[1:]


def check_order(directory: Path, modules: _Modules) -> None:
    """Checks that the modules of a tower make a dense encoder, and are in its order."""
    kinds = [kind for kind, _ in modules]
    static = kinds[:1] == ["StaticEmbedding"]
    first = kinds[:1] if static else [kind for kind in _BEFORE_POOLING if kind in kinds]
    rest = kinds[len(first) :]
    unknown = [kind for kind in rest if kind not in st_modules.SUPPORTED]
    if kinds[: len(first)] != first or not (static or {"Transformer", "Pooling"} <= {*first}) or unknown:
        raise UserError(
            f"{directory / hub_files.ST_MODULES}: the modules {', '.join(kinds)} are not supported; expected"
            " Transformer, perhaps WeightedLayerPooling, and Pooling, or StaticEmbedding, then any of"
            f" {', '.join(st_modules.SUPPORTED)}"
        )


def read_tower(directory: Path, modules: _Modules, about: Mapping[str, Any]) -> EncoderTower:
    """Reads one tower of a folder; `about` has the folder's similarity_fn_name and truncate_dim."""
    check_order(directory, modules)
    found = dict(modules)
    after = st_modules.read_after_pooling([m for m in modules if m[0] in st_modules.SUPPORTED])
    truncated = _truncated(directory, about)
    similarity = "cosine"
    if not after.normalized:
        similarity = about.get("similarity_fn_name") or "cosine"
        if similarity not in ("cosine", "dot"):
            raise UserError(
                f"{directory}: similarity {similarity!r} is not supported, only cosine and dot; give another"
                " model"
            )
    elif truncated:  # normalised before truncation, compared by cosine after it
        truncated = (AfterPooling(kind="normalize"), *truncated)
    fields = {
        "projection": after.projection,
        "after_pooling": after.after_pooling + truncated,
        "similarity": similarity,
    }
    if "StaticEmbedding" in found:
        static = static_embeddings.read(found["StaticEmbedding"])
        config = DualEncoderConfig(backbone=static.config, **fields)
        length = static.max_length
        return EncoderTower(config, static.params | after.params, static.tokenizer, (length, length))
    root = found["Transformer"]
    encoder, tokenizer = hf.read(root)
    transformer = st_files.read_transformer(root, encoder, "dual_encoder")
    if transformer.lower_case:
        tokenizer = tokenizer_files.lower_cased(tokenizer, root)
    params = encoder.in_model | after.params
    if "WeightedLayerPooling" in found and transformer.shows_layers:
        num = encoder.config.num_layers
        fields["layers_from"], params["layer_weights"] = st_modules.read_layer_weights(
            found["WeightedLayerPooling"], num
        )
    fields["pooling"], pools_prompts = st_modules.read_pooling(found["Pooling"] / "config.json")
    try:
        config = DualEncoderConfig(backbone=encoder.config, adapters=encoder.adapters, **fields)
    except ValueError as error:
        raise UserError(f"{directory}: {error}") from error
    lengths = (transformer.query_max_length, transformer.passage_max_length)
    return EncoderTower(config, params, tokenizer, lengths, pools_prompts, encoder.base)


def _truncated(directory: Path, about: Mapping[str, Any]) -> tuple[AfterPooling, ...]:
    dimension = about.get("truncate_dim")
    if dimension is None:
        return ()
    try:
        return (AfterPooling(kind="truncate", dimension=dimension),)
    except ValueError as error:
        raise UserError(f"{directory / hub_files.ST_CONFIG}: truncate_dim: {error}") from error


def _check_alike(directory: Path, towers: list[EncoderTower]) -> None:
    """Checks that two towers differ only in weights and lengths."""
    for name in ("config", "pools_prompts"):
        one, other = (getattr(tower, name) for tower in towers)
        if one != other:
            raise UserError(
                f"{directory}: the routes for queries and documents have different architectures ({one},"
                f" {other}), but jaxir's two towers have one: use each route as a model of its own"
            )
    if towers[0].tokenizer.effect != towers[1].tokenizer.effect:
        raise UserError(
            f"{directory}: the routes for queries and documents have different tokenizers, but jaxir's two"
            " towers have one: use each route as a model of its own"
        )


def _params_of_towers(config: DualEncoderConfig, params: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for tower, own in zip(("query", "passage"), params, strict=True):
        for name, value in own.items():
            shared = config.sharing == "ade_spl" and not name.startswith("encoder.")
            found[name if shared else f"{tower}_{name}"] = value
    return found


_Part = tuple[str, dict[str, Any]]  # a module's kind, and the arguments of the function that writes it


def _is_shared(config: DualEncoderConfig, part: _Part) -> bool:
    """Whether both towers use a module: an ADE-SPL's share all that comes after the pooling."""
    return config.sharing == "ade_spl" and part[0] in ("Dense", "LayerNorm", "Normalize")


def parts_of(model: StoredModel, tower: str) -> list[_Part]:
    """Returns the modules of a tower, without a Normalize at the end."""
    config = model.config
    prefix = f"{tower}_" if config.sharing == "ade" else ""
    if isinstance(config.backbone, WordVectorsConfig):
        parts: list[_Part] = [("StaticEmbedding", {})]
    else:
        parts = [("Transformer", {})]
        if config.layers_from is not None:
            weights = model.params[f"{prefix}layer_weights"]
            parts.append(("WeightedLayerPooling", {"weights": np.asarray(weights)}))
        parts.append(("Pooling", {}))
    if config.projection is not None:
        tensors = hf.encoder_of(model.params, f"{prefix}projection.")
        linear = {f"linear.{name}": value for name, value in tensors.items()}
        parts.append(("Dense", {"module": config.projection, "tensors": linear}))
    kinds = {"dense": "Dense", "layer_norm": "LayerNorm", "normalize": "Normalize"}
    for i, module in enumerate(config.after_pooling):
        if module.kind == "truncate" and i == len(config.after_pooling) - 1:
            continue  # truncation is no module, but the setting truncate_dim of the folder
        if module.kind == "truncate":
            raise UserError(
                "a sentence-transformers folder truncates only the last vector: export to onnx or saved_model"
            )
        tensors = hf.encoder_of(model.params, f"{prefix}after_pooling.{i}.")
        parts.append((kinds[module.kind], {"module": module, "tensors": tensors}))
    return parts


def write_modules(
    directory: Path, parts: list[_Part], model: StoredModel, tower: str, *, prefix: str = "", first: int = 0
) -> list[tuple[str, str]]:
    """Writes a tower's modules into `directory`; returns the kind and the path of each."""
    config, listed = model.config, []
    for i, (kind, about) in enumerate(parts, start=first):
        # The Transformer of a folder without a Router is in the folder itself.
        path = "" if i == 0 and not prefix else f"{prefix}{i}_{kind}"
        folder = directory / path
        if kind == "Transformer":
            _write_transformer(folder, model, tower)
        elif kind == "StaticEmbedding":
            static_embeddings.write(folder, model, tower=tower)
        elif kind == "WeightedLayerPooling":
            width = config.backbone.output_dim
            st_modules.write_layer_weights(
                folder, about["weights"], start=config.layers_from, dimension=width
            )
        elif kind == "Pooling":
            st_modules.write_pooling(
                folder,
                config.poolings,
                dimension=config.backbone.output_dim,
                include_prompt=model.settings.pools_prompts,
            )
        elif kind == "Dense":
            st_modules.write_dense(folder, about["module"], about["tensors"])
        elif kind == "LayerNorm":
            st_modules.write_layer_norm(folder, about["tensors"])
        else:
            folder.mkdir(parents=True)
        listed.append((kind, path))
    return listed


def _write_transformer(folder: Path, model: StoredModel, tower: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    hf.write_tower(folder, model, tower=tower)
    content: dict[str, Any] = {"max_seq_length": hf.length_of(model, tower), "do_lower_case": False}
    if model.config.layers_from is not None:
        content["config_args"] = {"output_hidden_states": True}
    write_json(folder / hub_files.ST_TRANSFORMER[0], content)


def _write_router(folder: Path, routes: Mapping[str, list[tuple[str, str]]]) -> None:
    kinds = {path: kind for route in routes.values() for kind, path in route}
    content = {
        "types": {path: f"sentence_transformers.models.{kind}" for path, kind in kinds.items()},
        "structure": {side: [path for _, path in route] for side, route in routes.items()},
        "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
    }
    write_json(folder / hub_files.ST_ROUTER, content)

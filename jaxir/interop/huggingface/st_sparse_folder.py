"""Writes sparse encoders as folders of sentence-transformers' SparseEncoder.

Queries and documents with the same modules have these in the folder itself. Otherwise they become the routes
"query" and "document" of a Router.
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, hf_masked_lm, sentence_transformers, st_files, st_modules
from jaxir.interop.huggingface.st_sparse_chain import CODES, POOLING, STATIC
from jaxir.interop.model import lora
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import SINGLE, read_json, write_json, write_tensors
from jaxir.models.sparse_forms import PooledTokensConfig, SparseCodesConfig, SparseStaticConfig

# Python modules of these classes in every version since 5.0, the first with sparse encoders.
_SPARSE, _DENSE = "sentence_transformers.sparse_encoder.models", "sentence_transformers.models"
_OF_SPARSE = ("MLMTransformer", POOLING, CODES, STATIC)
_TOKENS = "token_embeddings"

Listed = list[tuple[str, str]]  # (kind, path) of each module


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder; stored query weights, or a model of queries, become a route of a Router."""
    config, settings = model.config, model.settings
    sides = (settings.query_prompt, settings.passage_prompt)
    named = {**settings.named_prompts, **dict(zip(st_files.ROUTES, sides, strict=True))}
    default = settings.default_prompt_name
    about = {"model_type": "SparseEncoder", "prompts": named}
    about["default_prompt_name"] = default if default in named else None
    about |= {"similarity_fn_name": config.score}
    if config.max_active_dims is not None:
        about["max_active_dims"] = config.max_active_dims
    write_json(directory / hub_files.ST_CONFIG, about)
    if model.queries is None and not config.static_queries:
        length = max(settings.query_max_length, settings.passage_max_length)
        listed = _write_side(directory, model, length)
        if settings.query_max_length != settings.passage_max_length and listed[0][1] == "":
            path = directory / hub_files.ST_TRANSFORMER[0]
            sides = {
                "query_length": settings.query_max_length,
                "document_length": settings.passage_max_length,
            }
            write_json(path, read_json(path) | sides)
    else:
        place = directory / "0_Router"
        place.mkdir()
        if model.queries is not None:
            queries = lora.merged(model.queries)
            length = queries.settings.query_max_length
            query = _write_side(place, queries, length, prefix="query_")
        else:
            query = _write_static(place, f"query_0_{STATIC}", model, "query_weights", frozen=config.frozen)
        document = _write_side(place, model, settings.passage_max_length, prefix="document_")
        content = {
            "types": {path: _class(kind) for kind, path in (*query, *document)},
            "structure": {
                side: [path for _, path in listed]
                for side, listed in zip(st_files.ROUTES, (query, document), strict=True)
            },
            "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
        }
        write_json(place / hub_files.ST_ROUTER, content)
        listed = [("Router", "0_Router")]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": _class(kind)}
        for i, (kind, path) in enumerate(listed)
    ]
    write_json(directory / hub_files.ST_MODULES, entries)


def _class(kind: str) -> str:
    return f"{_SPARSE if kind in _OF_SPARSE else _DENSE}.{kind}"


def _write_side(directory: Path, model: StoredModel, length: int, *, prefix: str = "") -> Listed:
    """Writes the modules of one side, whose texts have at most `length` tokens; returns them in order."""
    listed = _write_vectors(directory, model, length, prefix)
    if not model.config.normalized:
        return listed
    name = f"{prefix}{len(listed)}_Normalize"
    (directory / name).mkdir(parents=True)
    return [*listed, ("Normalize", name)]


def _write_vectors(directory: Path, model: StoredModel, length: int, prefix: str) -> Listed:
    """Writes a side's modules, the last of which makes the sparse vector."""
    config = model.config
    if isinstance(config, SparseStaticConfig):
        name = f"{prefix}0_{STATIC}"
        return _write_static(directory, name, model, "encoder.table.embedding", frozen=config.frozen)
    if isinstance(config, SparseCodesConfig):
        return _write_codes(directory, model, prefix)
    if isinstance(config, PooledTokensConfig):
        listed = _write_token_vectors(directory, model, length, prefix)
    else:
        # A folder without a Router has its Transformer in the folder itself.
        path = f"{prefix}0_MLMTransformer" if prefix else ""
        _write_language_model(directory / path, model, length)
        listed = [("MLMTransformer", path)]
    name = f"{prefix}{len(listed)}_{POOLING}"
    (directory / name).mkdir(parents=True)
    content = {"pooling_strategy": config.pooling, "activation_function": config.saturation}
    content |= {"word_embedding_dimension": config.dimension}
    write_json(directory / name / "config.json", content)
    listed.append((POOLING, name))
    if getattr(config, "factors", False):
        listed += _write_static(directory, f"{prefix}{len(listed)}_{STATIC}", model, "factors", frozen=False)
    return listed


def _write_language_model(directory: Path, model: StoredModel, length: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    hf_masked_lm.write(directory, model)
    hf.save_tokenizer(directory, model, length)
    content = {"transformer_task": "fill-mask", "max_seq_length": length, "do_lower_case": False}
    write_json(directory / hub_files.ST_TRANSFORMER[0], content)


def _write_token_vectors(directory: Path, model: StoredModel, length: int, prefix: str) -> Listed:
    config = model.config
    listed = [("Transformer", f"{prefix}0_Transformer" if prefix else "")]
    root = directory / listed[0][1]
    root.mkdir(parents=True, exist_ok=True)
    params, pad_id = hf.encoder_of(model.params), model.tokenizer.pad_swap or 0
    hf.write_encoder(root, config.backbone, params, pad_id=pad_id)
    hf.save_tokenizer(root, model, length)
    content = {"transformer_task": "feature-extraction", "max_seq_length": length, "do_lower_case": False}
    write_json(root / hub_files.ST_TRANSFORMER[0], content)
    names = {"module_input_name": _TOKENS, "module_output_name": _TOKENS}
    for i, module in enumerate(config.token_modules):
        kind = {"dense": "Dense", "normalize": "Normalize"}[module.kind]
        listed.append((kind, f"{prefix}{i + 1}_{kind}"))
        place = directory / listed[-1][1]
        if kind == "Dense":
            st_modules.write_dense(place, module, hf.encoder_of(model.params, f"token_modules.{i}."), **names)
        else:
            place.mkdir(parents=True)
            write_json(place / "config.json", names)
    return listed


def _write_codes(directory: Path, model: StoredModel, prefix: str) -> Listed:
    config, codes = model.config, model.config.codes
    parts = sentence_transformers.parts_of(model, "query")
    parts += [("Normalize", {})] if config.similarity == "cosine" else []
    listed = sentence_transformers.write_modules(directory, parts, model, "query", prefix=prefix)
    name = f"{prefix}{len(listed)}_{CODES}"
    (directory / name).mkdir(parents=True)
    content: dict[str, Any] = {"input_dim": config.dense_dimension, "hidden_dim": codes.dimension}
    content |= {"k": codes.top, "k_aux": codes.auxiliary, "normalize": codes.normalize}
    write_json(directory / name / "config.json", content | {"dead_threshold": codes.dead_threshold})
    params = {key: np.asarray(value) for key, value in hf.encoder_of(model.params, "codes.").items()}
    kernel = np.ascontiguousarray(params["linear.kernel"].T)
    tensors = {
        # Also the encoder's kernel; sentence-transformers only writes this name.
        "decoder.linear.weight": kernel,
        "pre_bias": params["pre_bias"],
        "latent_bias": params["bias"],
        # Float32 here; torch converts them to integers when it loads them.
        "stats_last_nonzero": params["last_nonzero"],
    }
    write_tensors(directory / name / SINGLE, tensors)
    return [*listed, (CODES, name)]


def _write_static(directory: Path, name: str, model: StoredModel, param: str, *, frozen: bool) -> Listed:
    """Writes stored weights, the parameter `param`, and their tokenizer."""
    (directory / name).mkdir(parents=True)
    weights, pad_id = np.array(model.params[param]).reshape(-1), model.tokenizer.pad_swap or 0
    weights[[0, pad_id]] = weights[[pad_id, 0]]
    write_tensors(directory / name / SINGLE, {"weight": weights})
    write_json(directory / name / "config.json", {"frozen": frozen})
    hf.save_tokenizer(directory / name, model, model.settings.query_max_length)
    return [(STATIC, name)]

"""Reads and writes folders of sentence-transformers' SparseEncoder; makes sparse encoders of language models.

The documents' side is a masked language model and a SpladePooling. Queries use the same model, or a Router
gives them a SparseStaticEmbedding, which stores a weight for each token and adds no special tokens.
"""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.hub import hub, hub_files
from jaxir.interop.huggingface import (
    hf,
    hf_config,
    hf_masked_lm,
    sentence_transformers,
    st_files,
    tokenizer_files,
)
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
from jaxir.models import layers
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.sparse_encoder import Saturation, SparseEncoderConfig, SparsePooling

_KIND = "sparse_encoder"
_LANGUAGE_MODELS = ("Transformer", "MLMTransformer")
_STATIC = "SparseStaticEmbedding"
_QUERY_WEIGHTS = "query_weights"
_START = -3.0  # bias of a new head, so low that few weights of a new model are above 0
# Modules of every version since 5.0, in which these classes appeared.
_WRITTEN = "sentence_transformers.sparse_encoder.models"


def check(directory: Path) -> None:
    """Checks, before weights are downloaded, that a folder's modules are supported."""
    st_files.read_config(directory, _KIND)
    root, pooling, _ = _modules(directory)
    hf_masked_lm.outline(root / "config.json")
    _read_pooling(pooling)


def read(directory: Path) -> StoredModel:
    """Reads a folder of sentence-transformers."""
    about = st_files.read_config(directory, _KIND)
    root, pooling, static = _modules(directory)
    if about.get("similarity_fn_name") not in (None, "dot"):
        raise UserError(
            f"{directory}: similarity {about['similarity_fn_name']!r:.40} is not supported for token weights,"
            " only dot; give another model"
        )
    model = from_language_model(root, **_read_pooling(pooling), limit=about.get("max_active_dims"))
    architecture = hf.read_architecture(root)
    transformer = st_files.read_transformer(root, architecture, _KIND)
    if transformer.lower_case:
        model = dataclasses.replace(model, tokenizer=tokenizer_files.lower_cased(model.tokenizer, root))
    lengths = [transformer.query_max_length, transformer.passage_max_length]
    if static is not None:
        model = _with_query_weights(model, static, root)
        lengths[0] = hf.max_length(static, architecture)
    named, default = about["prompts"], about.get("default_prompt_name")
    query, passage = st_files.prompts_of_sides(named, default)
    settings = EncoderSettings(
        query_max_length=lengths[0],
        passage_max_length=lengths[1],
        query_prompt=query,
        passage_prompt=passage,
        named_prompts=named,
        default_prompt_name=default,
    )
    return dataclasses.replace(model, settings=settings)


def from_language_model(
    directory: Path,
    *,
    pooling: SparsePooling = "max",
    saturation: Saturation = "relu",
    limit: int | None = None,
) -> StoredModel:
    """Makes a sparse encoder of a masked language model's folder; `limit` is max_active_dims."""
    model = hf_masked_lm.read(directory)
    of_model = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)}
    how = {"pooling": pooling, "saturation": saturation, "max_active_dims": limit}
    try:
        config = SparseEncoderConfig(**of_model, **how)
    except ValueError as error:
        raise UserError(f"{directory}: {error}") from error
    return dataclasses.replace(model, config=config)


def kind_of_start(spec: str) -> str | None:
    """Returns the kind of model to read as the start of a sparse encoder; None: the kind its files name."""
    form, _, name = spec.partition(":")
    has_head = form == "hf" and hf_masked_lm.is_one(hub.configuration(name))
    return _KIND if has_head else None


def with_new_head(found: StoredModel, *, seed: int, where: str) -> StoredModel:
    """Returns the sparse encoder that a dual encoder's encoder begins, with a new head of a language model.

    Logits are products with the encoder's token vectors. The dense layer is drawn from N(0, 0.02^2) with
    `seed`, as BERT's. The bias starts at `_START`, so that few weights are above 0.

    Raises:
      UserError: the model has two encoders or is no dual encoder, or its backbone has no such head.
    """
    config = found.config
    if not isinstance(config, DualEncoderConfig) or config.sharing != "sde":
        raise UserError(
            f"{where}: a sparse encoder starts from a masked language model or one encoder, not from"
            f" {config.summary}; give hf: and a masked language model"
        )
    backbone = config.backbone
    codec = hf_config.codec_of(backbone)
    if not codec.masked_lm:
        raise UserError(
            f"{where}: no masked language model has model_type {backbone.model_type!r}, so the encoder cannot"
            " become a sparse encoder; give a BERT, DistilBERT, RoBERTa or MPNet"
        )
    made = SparseEncoderConfig(
        backbone=backbone,
        activation=codec.masked_lm_activation or backbone.activation,
        norm_epsilon=backbone.layer_norm_epsilon,
        adapters=config.adapters,
    )
    width = backbone.embed_dim
    params = {name: value for name, value in found.params.items() if name.startswith("encoder.")}
    params |= {
        "head.dense.kernel": np.asarray(layers.normal(0.02)(jax.random.key(seed), (width, width))),
        "head.dense.bias": np.zeros(width, np.float32),
        "head.norm.scale": np.ones(width, np.float32),
        "head.norm.bias": np.zeros(width, np.float32),
        "head.bias": np.full(made.dimension, _START, np.float32),
    }
    settings = dataclasses.replace(found.settings, pools_prompts=True)
    return dataclasses.replace(found, config=made, params=params, settings=settings)


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder of sentence-transformers; stored query weights become a route of a Router."""
    config, settings = model.config, model.settings
    named, default = st_files.folder_prompts(settings)
    about = {"model_type": "SparseEncoder", "prompts": named, "default_prompt_name": default}
    about |= {"similarity_fn_name": "dot"}
    if config.max_active_dims is not None:
        about["max_active_dims"] = config.max_active_dims
    write_json(directory / hub_files.ST_CONFIG, about)
    if not config.static_queries:
        length = max(settings.query_max_length, settings.passage_max_length)
        _write_language_model(directory, model, length)
        _write_pooling(directory / "1_SpladePooling", config)
        listed = [("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")]
    else:
        place = directory / "0_Router"
        query, *document = f"query_0_{_STATIC}", "document_0_MLMTransformer", "document_1_SpladePooling"
        _write_query_weights(place / query, model)
        _write_language_model(place / document[0], model, settings.passage_max_length)
        _write_pooling(place / document[1], config)
        kinds = zip((query, *document), (_STATIC, "MLMTransformer", "SpladePooling"), strict=True)
        content = {
            "types": {path: f"{_WRITTEN}.{kind}" for path, kind in kinds},
            "structure": {"query": [query], "document": document},
            "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
        }
        write_json(place / hub_files.ST_ROUTER, content)
        listed = [("Router", "0_Router")]
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": path,
            "type": f"{'sentence_transformers.models' if kind == 'Router' else _WRITTEN}.{kind}",
        }
        for i, (kind, path) in enumerate(listed)
    ]
    write_json(directory / hub_files.ST_MODULES, entries)


def _modules(directory: Path) -> tuple[Path, Path, Path | None]:
    """Returns the folders of the language model, its pooling, and the stored weights of queries, if any."""
    own, after = sentence_transformers.modules_of_towers(directory)
    *queries, documents = own
    kinds = [[kind for kind, _ in route] for route in own]
    static = bool(queries) and kinds[0] == [_STATIC]
    known = len(documents) == 2 and documents[0][0] in _LANGUAGE_MODELS and documents[1][0] == "SpladePooling"
    if not known or (after and queries) or (queries and not static):
        listed = " | ".join(
            ", ".join(route) for route in [*kinds, *([[k for k, _ in after]] if after else [])]
        )
        raise UserError(
            f"{directory / hub_files.ST_MODULES}: the modules {listed} are not supported for a sparse"
            f" encoder; expected a Transformer or MLMTransformer and SpladePooling, for queries perhaps"
            f" {_STATIC} instead"
        )
    (kind, root), (_, pooling) = documents
    path = root / hub_files.ST_TRANSFORMER[0]
    if kind == "Transformer" and "transformer_task" not in read_optional_json(path):
        raise UserError(f"{path}: transformer_task is missing, but a SpladePooling reads fill-mask; set it")
    return root, pooling, queries[0][0][1] if static else None


def _read_pooling(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    content = read_json(path, dict[str, Any])
    names = {"pooling": ("pooling_strategy", "max"), "saturation": ("activation_function", "relu")}
    known = {"pooling": get_args(SparsePooling), "saturation": get_args(Saturation)}
    found = {ours: content.get(*entry) for ours, entry in names.items()}
    for ours, value in found.items():
        if value not in known[ours]:
            raise UserError(
                f"{path}: {names[ours][0]} {value!r:.40} is not supported, only {' and '.join(known[ours])};"
                " give another model"
            )
    return found


def _with_query_weights(model: StoredModel, directory: Path, root: Path) -> StoredModel:
    """Adds the stored weights in `directory` to the documents' model, which is in `root`."""
    path = directory / "config.json"
    if read_optional_json(path).get("path") is not None:
        raise UserError(
            f"{path}: weights in the file that path names are not supported; save the model with"
            " sentence-transformers, which writes them into the folder"
        )
    tokenizer = tokenizer_files.without_special_tokens(tokenizer_files.load(directory, root), directory)
    own = tokenizer_files.without_special_tokens(model.tokenizer, directory)
    if tokenizer.effect != own.effect:
        raise UserError(
            f"{directory}: queries have another tokenizer than documents, so their weights do not fit; give"
            " another model"
        )
    weights = np.array(require(read_tensors(directory), "weight", directory), np.float32)
    pad_id = model.tokenizer.pad_swap or 0
    if weights.shape == (model.config.dimension,):
        weights[[0, pad_id]] = weights[[pad_id, 0]]
    config = dataclasses.replace(model.config, static_queries=True)
    params = {**model.params, _QUERY_WEIGHTS: weights}
    stored.check_params(params, stored.model_shapes(config), str(directory))
    return dataclasses.replace(model, config=config, params=params)


def _write_language_model(directory: Path, model: StoredModel, length: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    hf_masked_lm.write(directory, model)
    hf.save_tokenizer(directory, model, length)
    content = {"transformer_task": "fill-mask", "max_seq_length": length, "do_lower_case": False}
    write_json(directory / hub_files.ST_TRANSFORMER[0], content)


def _write_pooling(directory: Path, config: SparseEncoderConfig) -> None:
    directory.mkdir(parents=True)
    content = {"pooling_strategy": config.pooling, "activation_function": config.saturation}
    write_json(directory / "config.json", content | {"word_embedding_dimension": config.dimension})


def _write_query_weights(directory: Path, model: StoredModel) -> None:
    directory.mkdir(parents=True)
    weights, pad_id = np.array(model.params[_QUERY_WEIGHTS]), model.tokenizer.pad_swap or 0
    weights[[0, pad_id]] = weights[[pad_id, 0]]
    write_tensors(directory / SINGLE, {"weight": weights})
    write_json(directory / "config.json", {"frozen": False})
    hf.save_tokenizer(directory, model, model.settings.query_max_length)

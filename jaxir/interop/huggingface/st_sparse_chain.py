"""Reads one side of a folder of sentence-transformers' SparseEncoder: the modules that a text goes through.

The modules are of one of four forms (`models.sparse_forms`): a masked language model and SpladePooling, an
encoder and SpladePooling, a dense encoder and SparseAutoEncoder, or SparseStaticEmbedding alone.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import safetensors

from jaxir.core.errors import UserError
from jaxir.core.values import Count, fits
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import (
    hf,
    hf_masked_lm,
    peft,
    sentence_transformers,
    st_files,
    st_modules,
    tokenizer_files,
)
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import SINGLE, read_json, read_optional_json, read_tensors, require
from jaxir.models.sparse_config import Score
from jaxir.models.sparse_encoder import Saturation, SparseEncoderConfig, SparsePooling
from jaxir.models.sparse_forms import (
    AutoEncoder,
    PooledTokensConfig,
    SparseCodesConfig,
    SparseStaticConfig,
)
from jaxir.models.word_vectors import WordVectorsConfig

STATIC, CODES, POOLING = "SparseStaticEmbedding", "SparseAutoEncoder", "SpladePooling"
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_TASKS = {"MLMTransformer": "fill-mask"}  # default task of a Transformer, by its kind
_TOKEN_MODULES = ("Dense", "Normalize", "Dropout")  # modules that may be between an encoder and SpladePooling
_TABLE = "encoder.table.embedding"
_STEPS = "stats_last_nonzero"  # for each code, the training steps since it was last used
_UNLIMITED = 1_000_000  # stands for no limit of tokens per text

Modules = list[tuple[str, Path]]


def chains(directory: Path) -> list[Modules]:
    """Returns one list of modules for both sides, or two lists (queries, documents) if these differ."""
    own, after = sentence_transformers.modules_of_towers(directory)
    return [modules + after for modules in own]


def form_of(directory: Path, modules: Modules) -> str:
    """Returns the form of a side, a key of `sparse_forms.FORMS`; refuses any other form.

    `modules` are without a Normalize at the end.
    """
    kinds = [kind for kind, _ in modules]
    if kinds == [STATIC]:
        return SparseStaticConfig.form
    if kinds[-1:] == [CODES]:
        sentence_transformers.check_order(directory, modules[:-1])
        return SparseCodesConfig.form
    if kinds[:1] and kinds[0] in _TRANSFORMERS:
        task = _task(*modules[0])
        if task == "fill-mask" and kinds[1:] in ([POOLING], [POOLING, STATIC]):
            return SparseEncoderConfig.form
        between = all(kind in _TOKEN_MODULES for kind in kinds[1:-1])
        if task == "feature-extraction" and kinds[-1] == POOLING and between:
            return PooledTokensConfig.form
        kinds[0] = f"{kinds[0]} ({task})"
    raise UserError(
        f"{directory / hub_files.ST_MODULES}: the modules {', '.join(kinds)} are not supported for a sparse"
        f" encoder; expected a Transformer and {POOLING}, the modules of a dense encoder and {CODES}, or"
        f" {STATIC}"
    )


def check(directory: Path, modules: Modules) -> None:
    """Checks, before weights are downloaded, that the modules of a side are supported."""
    modules, _ = _without_normalize(modules)
    form, (_, root) = form_of(directory, modules), modules[0]
    if form == SparseEncoderConfig.form:
        hf_masked_lm.outline(root / "config.json")
    elif form == PooledTokensConfig.form:
        hf.read_architecture(peft.base_directory(root))
    for kind, folder in modules:
        if kind == POOLING:
            _read_pooling(folder)


def read(directory: Path, modules: Modules, about: Mapping[str, Any]) -> StoredModel:
    """Reads one side; `about` is the content of config_sentence_transformers.json."""
    modules, normalized = _without_normalize(modules)
    form = form_of(directory, modules)
    path = directory / hub_files.ST_CONFIG
    limit, score = about.get("max_active_dims"), about.get("similarity_fn_name") or "dot"
    if not fits(limit, Count | None):
        raise UserError(f"{path}: max_active_dims is {limit!r:.40}, but must be a number of at least 1")
    if score not in get_args(Score):
        raise UserError(
            f"{path}: similarity_fn_name {score!r:.40} is not supported, only {', '.join(get_args(Score))}"
        )
    reads = {
        SparseStaticConfig.form: _read_static,
        SparseCodesConfig.form: _read_codes,
        SparseEncoderConfig.form: _read_language_model,
        PooledTokensConfig.form: _read_pooled_tokens,
    }
    try:
        model = reads[form](directory, modules)
        how = {"max_active_dims": limit, "normalized": normalized, "score": score}
        config = dataclasses.replace(model.config, **how)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    stored.check_params(model.params, stored.model_shapes(config), str(directory))
    return _with_prompts(dataclasses.replace(model, config=config), about)


def _without_normalize(modules: Modules) -> tuple[Modules, bool]:
    """Returns the modules without a Normalize of the sparse vector at the end, and whether there is one."""
    if not modules or modules[-1][0] != "Normalize":
        return modules, False
    st_modules.read_after_pooling(modules[-1:])  # raises if this Normalize reads anything but texts' vectors
    return modules[:-1], True


def _task(kind: str, root: Path) -> str:
    _, content = st_files.transformer_settings(root)
    return str(content.get("transformer_task", _TASKS.get(kind, "feature-extraction")))


def _with_prompts(model: StoredModel, about: Mapping[str, Any]) -> StoredModel:
    named, default = about["prompts"], about.get("default_prompt_name")
    # sentence-transformers 6.2 uses a default prompt, and one named "passage", for neither side.
    query, passage = (named.get(side, "") for side in st_files.ROUTES)
    how = {"query_prompt": query, "passage_prompt": passage, "named_prompts": named}
    settings = dataclasses.replace(model.settings, **how, default_prompt_name=default)
    config = model.config
    if not settings.pools_prompts:
        counts = [model.tokenizer.prompt_length(prompt) for prompt in (query, passage)]
        counts = dict(zip(("query_prompt_tokens", "passage_prompt_tokens"), counts, strict=True))
        config = dataclasses.replace(config, **counts)
    return dataclasses.replace(model, config=config, settings=settings)


def _read_language_model(directory: Path, modules: Modules) -> StoredModel:
    (_, root), (_, pooling), *factors = modules
    model = hf_masked_lm.read(root)
    architecture = hf.read_architecture(root)
    transformer = st_files.read_transformer(root, architecture, "sparse_encoder")
    config = language_model_config(model, **_read_pooling(pooling), factors=bool(factors))
    params = dict(model.params)
    if factors:
        params["factors"] = read_weights(factors[0][1], model.tokenizer)
    tokenizer = model.tokenizer
    if transformer.lower_case:
        tokenizer = tokenizer_files.lower_cased(tokenizer, root)
    return StoredModel(config=config, params=params, tokenizer=tokenizer, settings=_settings(transformer))


def language_model_config(model: StoredModel, **how: Any) -> SparseEncoderConfig:
    """Returns the configuration of a sparse encoder made from a masked language model."""
    of_model = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)}
    return SparseEncoderConfig(**of_model, **how)


def _read_pooled_tokens(directory: Path, modules: Modules) -> StoredModel:
    (_, root), *between, (_, pooling) = modules
    encoder, tokenizer = hf.read(root)
    transformer = st_files.read_transformer(root, encoder, "dual_encoder")
    if transformer.lower_case:
        tokenizer = tokenizer_files.lower_cased(tokenizer, root)
    kept = [module for module in between if module[0] != "Dropout"]
    token_modules, params = st_modules.read_token_modules(kept)
    config = PooledTokensConfig(
        backbone=encoder.config,
        token_modules=token_modules,
        adapters=encoder.adapters,
        **_read_pooling(pooling),
    )
    return StoredModel(
        config=config,
        params=encoder.in_model | params,
        tokenizer=tokenizer,
        settings=_settings(transformer),
        base=encoder.base,
    )


def _settings(transformer: st_files.Transformer) -> EncoderSettings:
    lengths = transformer.query_max_length, transformer.passage_max_length
    return EncoderSettings(query_max_length=lengths[0], passage_max_length=lengths[1])


def _read_codes(directory: Path, modules: Modules) -> StoredModel:
    *dense, (_, folder) = modules
    # The dense vectors keep their length unless a Normalize ends the dense modules.
    tower = sentence_transformers.read_tower(directory, dense, {"similarity_fn_name": "dot"})
    path = folder / "config.json"
    content, tensors = read_json(path, dict[str, Any]), read_tensors(folder)
    entries = {"hidden_dim": 512, "k": 8, "k_aux": 512, "dead_threshold": 30, "normalize": False}
    names = ("dimension", "top", "auxiliary", "dead_threshold", "normalize")
    given = (content.get(entry, default) for entry, default in entries.items())
    try:
        codes = AutoEncoder(**dict(zip(names, given, strict=True)))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    of_dense = {f.name: getattr(tower.config, f.name) for f in dataclasses.fields(tower.config)}
    # sentence-transformers shares the kernel with the decoder, and writes one of the two names.
    name = "decoder.linear.weight" if "decoder.linear.weight" in tensors else "encoder.weight"
    kernel = np.asarray(require(tensors, name, folder), np.float32)
    params = tower.params | {
        "codes.linear.kernel": kernel.T,
        "codes.pre_bias": np.asarray(require(tensors, "pre_bias", folder), np.float32),
        "codes.bias": np.asarray(require(tensors, "latent_bias", folder), np.float32),
        "codes.last_nonzero": np.zeros(len(kernel), np.float32),
    }
    if (folder / SINGLE).is_file() and _STEPS in tensors:
        with safetensors.safe_open(folder / SINGLE, "np") as file:  # because `read_tensors` refuses integers
            params["codes.last_nonzero"] = file.get_tensor(_STEPS).astype(np.float32)
    return StoredModel(
        config=SparseCodesConfig(**of_dense, codes=codes),
        params=params,
        tokenizer=tower.tokenizer,
        settings=EncoderSettings(
            query_max_length=tower.lengths[0],
            passage_max_length=tower.lengths[1],
            pools_prompts=tower.pools_prompts,
        ),
        base=tower.base,
    )


def _read_static(directory: Path, modules: Modules) -> StoredModel:
    ((_, folder),) = modules
    tokenizer = tokenizer_files.without_special_tokens(tokenizer_files.load(folder), folder)
    weights = read_weights(folder, tokenizer)
    config = SparseStaticConfig(
        backbone=WordVectorsConfig(vocab_size=len(weights), embed_dim=1, pools_padding_tokens=True),
        frozen=bool(read_optional_json(folder / "config.json").get("frozen", False)),
    )
    length = static_length(folder)
    return StoredModel(
        config=config,
        params={_TABLE: weights[:, None]},
        tokenizer=tokenizer,
        settings=EncoderSettings(query_max_length=length, passage_max_length=length),
    )


def static_length(folder: Path) -> int:
    """Returns the maximum number of tokens of a text with stored weights, a setting of the tokenizer."""
    path = folder / tokenizer_files.CONFIG
    limit = read_optional_json(path).get("model_max_length")
    if limit is None or (isinstance(limit, int | float) and limit > _UNLIMITED):
        return _UNLIMITED
    if not fits(limit, Count):
        raise UserError(f"{path}: model_max_length is {limit!r:.40}, but must be a number of tokens")
    return limit


def read_weights(folder: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the weights [V] of a SparseStaticEmbedding in jaxir's order of tokens.

    They are in the folder's tensors, or in a JSON file of weights by token that its config.json names.
    """
    path = folder / "config.json"
    name = read_optional_json(path).get("path")
    if isinstance(name, str) and name.endswith(".json"):
        weights = _weights_of_json(_json_file(folder, name, path), tokenizer)
    else:
        weights = np.array(require(read_tensors(folder), "weight", folder), np.float32)
    pad_id = tokenizer.pad_swap or 0
    if weights.ndim != 1 or pad_id >= len(weights) or tokenizer.vocab_size > len(weights):
        raise UserError(
            f"{folder}: weights of shape {weights.shape} do not fit a tokenizer with"
            f" {tokenizer.vocab_size:,} ids; use weights and tokenizer of one model"
        )
    weights[[0, pad_id]] = weights[[pad_id, 0]]
    return weights


def _json_file(folder: Path, name: str, said_by: Path) -> Path:
    """Returns the file `name`, in the module's folder, or in one above that belongs to the model."""
    above = [folder, *(parent for parent in list(folder.parents)[:2] if _in_model(parent))]
    found = next((place / Path(name).name for place in above if (place / Path(name).name).is_file()), None)
    if found is None:
        raise UserError(
            f"{said_by}: no file {Path(name).name!r:.80}, which path names, in {folder} or in the model's"
            " folder; put the file of weights there"
        )
    return found


def _in_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (hub_files.ST_MODULES, hub_files.ST_ROUTER))


def _weights_of_json(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Returns weights [V] in the order of the tokenizer's file; a token without a weight has 0."""
    content = read_json(path)
    if not fits(content, dict[str, float | int]):
        raise UserError(f"{path}: must map tokens to weights; copy it again")
    ids = {token: i for i, token in enumerate(tokenizer.own_tokens()) if token is not None}
    if unknown := sorted(content.keys() - ids.keys()):
        raise UserError(
            f"{path}: the token {unknown[0]!r:.40} is not in the tokenizer; use the model's own tokenizer"
        )
    weights = np.zeros(tokenizer.vocab_size, np.float32)
    for token, weight in content.items():
        weights[ids[token]] = weight
    return weights


def _read_pooling(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    content = read_json(path, dict[str, Any])
    names = {"pooling": ("pooling_strategy", "max"), "saturation": ("activation_function", "relu")}
    known = {"pooling": get_args(SparsePooling), "saturation": get_args(Saturation)}
    found = {ours: content.get(*entry) for ours, entry in names.items()}
    for ours, value in found.items():
        if value not in known[ours]:
            raise UserError(
                f"{path}: {names[ours][0]} {value!r:.40} is not supported, only {' and '.join(known[ours])}"
            )
    return found

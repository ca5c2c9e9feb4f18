"""Writes multi-vector encoders as folders of sentence-transformers, in PyLate's form if that can hold them.

PyLate's folders cannot hold prompts, tokens that are kept, or modules other than Dense. sentence-transformers
6.2 opens both forms. PyLate 1.6 opens only its own.
"""

from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, st_modules
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import write_json
from jaxir.models.multi_vector import MultiVectorConfig

_TRANSFORMER = "sentence_transformers.models.Transformer"
_DENSE_OF_PYLATE = "pylate.models.Dense.Dense"
_POOLING = "HierarchicalTokenPooling"
_CLASSES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    _POOLING: f"sentence_transformers.multi_vector_encoder.modules.token_pooling.{_POOLING}",
}


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder in PyLate's form if that can hold the model, else in that of sentence-transformers."""
    settings, tokenizer = model.settings, model.tokenizer
    params, length = hf.encoder_of(model.params), max(settings.query_max_length, settings.passage_max_length)
    hf.write_encoder(directory, model.config.backbone, params, pad_id=tokenizer.pad_swap or 0)
    hf.save_tokenizer(directory, model, length)
    about = {"max_seq_length": length, "do_lower_case": False}
    (_write_pylate if fits_pylate(model) else _write_modules)(directory, model, about)


def fits_pylate(model: StoredModel) -> bool:
    """Returns whether PyLate's form can hold a model."""
    config, settings, expansion = model.config, model.settings, model.config.expansion
    *dense, last = [module.kind for module in config.token_modules or ()] or [None]
    always = expansion is None or (
        expansion.length == settings.query_max_length and _is_mask(expansion.token, model.tokenizer)
    )
    return (
        set(dense) == {"dense"}
        and last == "normalize"
        and config.similarity == "maxsim"
        and (config.skipped_in == ("passage",) or not config.skipped)
        and not config.kept
        and config.pooling is None
        and always
        and not any((settings.query_prompt, settings.passage_prompt, *settings.named_prompts.values()))
    )


def _write_pylate(directory: Path, model: StoredModel, about: dict[str, Any]) -> None:
    config, settings = model.config, model.settings
    write_json(directory / hub_files.ST_TRANSFORMER[0], about)
    content = {
        "model_type": "ColBERT",
        "prompts": {"query": "", "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": "",
        "document_prefix": "",
        "query_length": settings.query_max_length,
        "document_length": settings.passage_max_length,
        "do_query_expansion": config.expansion is not None,
        "attend_to_expansion_tokens": config.expansion is not None and config.expansion.attend,
        "skiplist_words": _words(model.tokenizer, config.skipped),
    }
    write_json(directory / hub_files.ST_CONFIG, content)
    listed = [("", _TRANSFORMER)]
    for i in range(len(config.token_modules) - 1):
        _write_dense(directory / f"{i + 1}_Dense", model, i)
        listed.append((f"{i + 1}_Dense", _DENSE_OF_PYLATE))
    _write_list(directory, listed)


def _write_modules(directory: Path, model: StoredModel, about: dict[str, Any]) -> None:
    config, settings = model.config, model.settings
    about |= {"query_length": settings.query_max_length, "document_length": settings.passage_max_length}
    if config.expansion is not None:
        about["query_expansion"] = _described(config, model)
    write_json(directory / hub_files.ST_TRANSFORMER[0], about)
    others = {n: text for n, text in settings.named_prompts.items() if n not in ("query", "document")}
    prompts = {"query": settings.query_prompt, "document": settings.passage_prompt, **others}
    default = settings.default_prompt_name
    content = {
        "model_type": "MultiVectorEncoder",
        "prompts": prompts,
        "default_prompt_name": default if default in prompts else None,
        "similarity_fn_name": config.similarity,
    }
    write_json(directory / hub_files.ST_CONFIG, content)
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    listed = [("", _CLASSES["Transformer"])]
    for i, module in enumerate(config.token_modules):
        kind = {"dense": "Dense", "normalize": "Normalize"}.get(module.kind)
        if kind is None:
            raise UserError(
                f"a folder of sentence-transformers cannot hold a {module.kind} of token vectors: use jaxir"
            )
        name = f"{len(listed)}_{kind}"
        if kind == "Dense":
            _write_dense(directory / name, model, i, **tokens)
        else:
            (directory / name).mkdir(parents=True)
            write_json(directory / name / "config.json", tokens)
        listed.append((name, _CLASSES[kind]))
    name = f"{len(listed)}_MultiVectorMask"
    (directory / name).mkdir(parents=True)
    towers = {"query": "query", "passage": "document"}
    mask = {
        "skiplist_words": _words(model.tokenizer, config.skipped),
        "skiplist_tasks": [towers[tower] for tower in config.skipped_in],
        "keep_only_token_ids": [_id_in_file(model.tokenizer, i) for i in config.kept] or None,
    }
    write_json(directory / name / "config.json", mask)
    listed.append((name, _CLASSES["MultiVectorMask"]))
    if config.pooling is not None:
        name = f"{len(listed)}_{_POOLING}"
        (directory / name).mkdir(parents=True)
        pooling = {
            "pool_factor": config.pooling.factor,
            "num_protected_tokens": config.pooling.protected,
            "normalize_embeddings": config.pooling.normalize,
            "tasks": ["query", "document"] if config.pooling.queries else ["document"],
        }
        write_json(directory / name / "config.json", pooling)
        listed.append((name, _CLASSES[_POOLING]))
    _write_list(directory, listed)


def _write_list(directory: Path, listed: list[tuple[str, str]]) -> None:
    entries = [{"idx": i, "name": str(i), "path": path, "type": of} for i, (path, of) in enumerate(listed)]
    write_json(directory / hub_files.ST_MODULES, entries)


def _write_dense(directory: Path, model: StoredModel, index: int, **names: str) -> None:
    tensors = hf.encoder_of(model.params, f"token_modules.{index}.")
    st_modules.write_dense(directory, model.config.token_modules[index], tensors, **names)


def _described(config: MultiVectorConfig, model: StoredModel) -> dict[str, Any]:
    """Returns the folder's `query_expansion`."""
    expansion, tokenizer = config.expansion, model.tokenizer
    fixed = expansion.length == model.settings.query_max_length
    is_mask = _is_mask(expansion.token, tokenizer)
    return {
        "strategy": "fixed" if fixed else "min",
        "attend": expansion.attend,
        "token": None if is_mask else _words(tokenizer, [expansion.token])[0],
        "length": expansion.length,
    }


def _is_mask(token: int, tokenizer: Tokenizer) -> bool:
    return tokenizer.mask_id is not None and token == (tokenizer.mask_id or PADDING_TOKEN)


def _words(tokenizer: Tokenizer, ids: Any) -> list[str]:
    tokens = tokenizer.own_tokens()
    return [tokens[_id_in_file(tokenizer, i)] for i in ids]


def _id_in_file(tokenizer: Tokenizer, i: int) -> int:
    """Converts an id of `Tokenizer.own_ids` to the same token's id in the tokenizer's file."""
    pad_id = tokenizer.pad_swap or 0
    return {pad_id: 0, 0: pad_id, PADDING_TOKEN: pad_id}.get(i, i)

"""Reads and writes StaticEmbedding modules: a table of token vectors, of which a text's vector is the mean.

Such folders are written by sentence-transformers and by model2vec. They treat unknown words differently, and
each folder is read as its maker does: model2vec leaves unknown words out of the mean, sentence-transformers
averages the vector of the unknown token in. Neither puts special tokens around a text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.huggingface import hf
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    write_json,
    write_tensors,
)
from jaxir.models.word_vectors import WordVectorsConfig
from jaxir.storage.temporary_outputs import temporary_directory

_JSON, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_TABLE = "embedding.weight"
_LENGTH = 2048  # maximum tokens per text of a sentence-transformers folder that states none
_MODEL2VEC_LENGTH = 512  # model2vec's default


class StaticEmbeddings(NamedTuple):
    """A table: configuration, parameters of an SDE by name, tokenizer, maximum number of tokens per text."""

    config: WordVectorsConfig
    params: dict[str, np.ndarray]
    tokenizer: Tokenizer
    max_length: int


def read(directory: Path) -> StaticEmbeddings:
    """Reads a module's folder."""
    tensors = read_tensors(directory)
    by_model2vec = _TABLE not in tensors
    table = _table(directory, tensors)
    tokenizer = _tokenizer(directory, ignores_unknown=by_model2vec)
    if tokenizer.vocab_size > len(table):
        raise UserError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size:,} ids, the table only {len(table):,}"
            " rows: use the model's own tokenizer"
        )
    pad_id = tokenizer.pad_swap or 0
    table[[0, pad_id]] = table[[pad_id, 0]]
    config = WordVectorsConfig(
        vocab_size=len(table), embed_dim=table.shape[1], pools_padding_tokens=not by_model2vec
    )
    cut = read_json(directory / _JSON, dict[str, Any]).get("truncation") or {}
    if by_model2vec:
        cut = {"max_length": _MODEL2VEC_LENGTH} | read_optional_json(directory / "config.json")
    length = cut.get("max_length") or _LENGTH
    return StaticEmbeddings(config, {"encoder.table.embedding": table}, tokenizer, length)


def write(directory: Path, model: StoredModel, *, tower: str) -> None:
    """Writes the module's folder; raises a UserError for a model that leaves unknown words out."""
    if not model.config.backbone.pools_padding_tokens:
        raise UserError(
            "this model leaves unknown words out of the mean, which sentence-transformers' StaticEmbedding"
            " does not: convert to jaxir, or export to onnx or saved_model"
        )
    directory.mkdir(parents=True, exist_ok=True)
    prefix = "encoder" if model.config.sharing == "sde" else f"{tower}_encoder"
    table, pad_id = np.array(model.params[f"{prefix}.table.embedding"]), model.tokenizer.pad_swap or 0
    table[[0, pad_id]] = table[[pad_id, 0]]
    write_tensors(directory / SINGLE, {_TABLE: table})
    model.tokenizer.save(directory)
    (directory / _CONFIG).unlink()  # this file names the padding token, which such folders do not have
    length = hf.length_of(model, tower)
    if length < _LENGTH:
        content = read_json(directory / _JSON, dict[str, Any])
        cut = {"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": 0}
        write_json(directory / _JSON, content | {"truncation": cut})


def _table(directory: Path, tensors: Mapping[str, Any]) -> np.ndarray:
    if _TABLE in tensors:
        return np.array(tensors[_TABLE], np.float32)
    if "embeddings" not in tensors:
        raise UserError(f"{directory}: no {_TABLE} and no embeddings among its weights")
    table = np.array(tensors["embeddings"], np.float32)
    if "mapping" in tensors:
        table = table[np.asarray(tensors["mapping"]).astype(np.int64)]
    if "weights" in tensors:
        table = table * np.asarray(tensors["weights"], np.float32)[:, None]
    return table


def _tokenizer(directory: Path, *, ignores_unknown: bool) -> Tokenizer:
    """Reads the tokenizer without special tokens; with `ignores_unknown`, unknown words become padding."""
    if not (directory / _JSON).is_file():
        raise UserError(f"{directory}: a StaticEmbedding needs a {_JSON}, which the folder lacks")
    content: dict[str, Any] = read_json(directory / _JSON, dict[str, Any])
    content |= {"post_processor": None, "padding": None, "truncation": None}
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    unknown = content["model"].get("unk_token")
    if content["model"].get("unk_id") is not None:  # a unigram model names its unknown token by id
        unknown = backend.id_to_token(content["model"]["unk_id"])
    named = ("[PAD]", "<pad>", backend.id_to_token(0))
    padding = next((token for token in named if token and backend.token_to_id(token) is not None), None)
    if ignores_unknown and unknown is not None:
        padding = unknown
    with temporary_directory() as temporary:
        write_json(temporary / _JSON, content)
        write_json(temporary / _CONFIG, {"pad_token": padding})
        return Tokenizer.load(temporary)

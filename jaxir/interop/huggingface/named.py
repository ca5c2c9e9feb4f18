"""Opens models by `hf:NAME` and `st:NAME`: finds the folder, and the kind of the model in the folder."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.interop.hub import hub
from jaxir.interop.huggingface import (
    hf,
    hf_cross_encoder,
    hf_hybrid_encoder,
    hf_seq2seq,
    hf_sparse_encoder,
    peft,
    sentence_transformers,
    st_files,
    st_multi_vector,
)
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import read_json
from jaxir.models.dual_encoder import DualEncoderConfig, Pooling

_DEFAULT_LENGTH = 512  # maximum number of tokens per text of an `hf:` dual encoder
_OF_TOKENS = {
    "hybrid_encoder": "token weights and token vectors",
    "multi_vector_encoder": "token vectors",
}
_HUB_NAME = r"(?P<owner>[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(@[^\s:]+)?"


def prefixed(name: str) -> str | None:
    """Returns `st:NAME` or `hf:NAME` for a hub name without a prefix; None if `name` is a path.

    A name without an owner belongs to sentence-transformers, as in `SentenceTransformer(name)`. For
    OWNER/NAME the hub's modules.json decides, unless OWNER is a local directory.
    """
    found = re.fullmatch(_HUB_NAME, name)
    if found is None or Path(name).exists() or (found["owner"] and Path(found["owner"]).is_dir()):
        return None
    return f"st:{name}" if not found["owner"] or _has_modules(name) else f"hf:{name}"


@functools.cache  # cached, because a command opens the same name several times
def _has_modules(name: str) -> bool:
    return hub.has_modules(name)


def read(form: str, name: str, kind: str | None, *, weights: bool = True) -> StoredModel:
    """Reads a model of Hugging Face or sentence-transformers: `form` is "hf" or "st".

    `name` is as in `hub.resolve`. If `kind` is None, the model is a cross-encoder if the files say so, else a
    dual encoder: folders of T5 hold both a dual encoder and a generator. Without `weights`, a dual encoder of
    "hf" gets placeholders (`stored.shapes_alone`).
    """
    found, directory = _read(form, name, kind, weights)
    alone = weights and found.base is None  # a base is in another folder
    return dataclasses.replace(found, folder=directory) if alone else found


def _read(form: str, name: str, kind: str | None, weights: bool) -> tuple[StoredModel, Path]:
    """Returns the model and its folder."""
    if form == "st" and kind not in ("cross_encoder", "seq2seq"):
        return _read_sentence_transformers(name, kind)
    owner = "cross-encoder" if (form, kind) == ("st", "cross_encoder") else None
    weights = weights or kind != "dual_encoder"
    directory = hub.resolve(
        name,
        default_owner=owner,
        weights=weights,
        check=lambda directory: hf.read_architecture(peft.base_directory(directory)),
    )
    if kind == "seq2seq":
        return hf_seq2seq.read(directory), directory
    if kind != "cross_encoder" and hf_hybrid_encoder.is_one(directory):
        return hf_hybrid_encoder.read(directory), directory
    if kind in ("hybrid_encoder", "multi_vector_encoder"):
        raise UserError(f"hf:{name} has no head for {_OF_TOKENS[kind]}: give a model that has one")
    if kind == "sparse_encoder":
        return hf_sparse_encoder.from_language_model(directory), directory
    if kind == "cross_encoder" or (kind is None and hf_cross_encoder.is_one(peft.base_directory(directory))):
        return hf_cross_encoder.read(directory), directory
    encoder, tokenizer = hf.read(directory, weights=weights)
    pooling = _pooling(peft.base_directory(directory))
    config = DualEncoderConfig(backbone=encoder.config, pooling=pooling, adapters=encoder.adapters)
    length = min(_DEFAULT_LENGTH, encoder.config.max_positions or _DEFAULT_LENGTH)
    found = StoredModel(
        config=config,
        params=encoder.in_model if weights else stored.shapes_alone(config),
        tokenizer=tokenizer,
        settings=EncoderSettings(query_max_length=length, passage_max_length=length),
        base=encoder.base,
    )
    return found, directory


def _pooling(directory: Path) -> Pooling:
    """Returns the pooling of a folder that names none, as sentence-transformers chooses it.

    A model that was trained to predict the next token sees all of a text only at its last token.
    """
    content = read_json(directory / "config.json", dict[str, Any])
    names = content.get("architectures") or [""]
    causal = str(names[0]).endswith("ForCausalLM") and content.get("is_causal", True)
    return "lasttoken" if causal else "mean"


def _read_sentence_transformers(name: str, kind: str | None) -> tuple[StoredModel, Path]:
    def reader(directory: Path) -> Any:
        if kind is None and hf_cross_encoder.is_one(peft.base_directory(directory)):
            return hf_cross_encoder
        if kind != "dual_encoder" and hf_hybrid_encoder.is_one(directory):
            return hf_hybrid_encoder
        others = {
            "sparse_encoder": hf_sparse_encoder,
            "multi_vector_encoder": st_multi_vector,
            "hybrid_encoder": hf_hybrid_encoder,
        }
        return others.get(st_files.kind_of(directory) if kind is None else kind, sentence_transformers)

    def check(directory: Path) -> None:
        found = reader(directory)
        (hf.read_architecture if found is hf_cross_encoder else found.check)(directory)

    directory = hub.resolve(name, default_owner=hub.ST_OWNER, modules=True, check=check)
    return reader(directory).read(directory), directory

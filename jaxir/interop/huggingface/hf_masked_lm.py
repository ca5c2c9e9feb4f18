"""Masked language models in Hugging Face folders, in and out: BERT, DistilBERT, RoBERTa and MPNet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.huggingface import hf, hf_config
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import SINGLE, read_json, read_tensors, write_json, write_tensors
from jaxir.models import backbones
from jaxir.models.codec import HuggingFace
from jaxir.models.masked_lm import MaskedLMConfig

_HEAD = ("dense.kernel", "dense.bias", "norm.scale", "norm.bias", "bias")  # parameters of the head


def outline(config_file: Path) -> MaskedLMConfig:
    """Returns the configuration of a folder's masked language model from config.json; no weight is read."""
    content = read_json(config_file)
    backbone, _ = hf_config.parse(content, config_file)
    codec = hf_config.codec_of(backbone)
    if not codec.masked_lm:
        raise UserError(
            f"{config_file}: no masked language model has model_type {content['model_type']!r}; use a BERT"
        )
    if not content.get("tie_word_embeddings", True):
        raise UserError(f"{config_file}: a head with own token vectors is not supported; use another model")
    activation = codec.masked_lm_activation or backbone.activation
    return MaskedLMConfig(backbone=backbone, activation=activation, norm_epsilon=backbone.layer_norm_epsilon)


def is_one(config_file: Path) -> bool:
    """Whether a folder's config.json says that its weights have the head of a masked language model."""
    names = read_json(config_file, dict[str, Any]).get("architectures") or [""]
    return str(names[0]).endswith("ForMaskedLM")


def read(directory: Path) -> StoredModel:
    """Reads a folder with config.json, weights and a tokenizer."""
    config = outline(directory / "config.json")
    encoder, tokenizer = hf.read(directory)
    params = encoder.in_model | _read_head(directory, config, encoder.pad_id)
    for name, value in params.items():  # damage would not show in the words that a frozen generator fills in
        if not np.isfinite(np.asarray(value)).all():
            raise UserError(f"{directory} is damaged: {name} has a number that is not finite; copy it again")
    length = config.backbone.max_positions
    return StoredModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        settings=EncoderSettings(query_max_length=length, passage_max_length=length),
    )


def write(directory: Path, model: StoredModel) -> None:
    """Writes config.json and weights of a model with the parameters of a masked language model."""
    config, pad_id = model.config, model.tokenizer.pad_swap or 0
    codec = hf_config.codec_of(config.backbone)
    content = hf_config.describe(config.backbone, pad_id) | {"tie_word_embeddings": True}
    content["architectures"] = [codec.architecture.replace("Model", "ForMaskedLM")]
    tensors = hf.tensors_of(config.backbone, hf.encoder_of(model.params), pad_id=pad_id)
    tensors = {f"{codec.score_head.prefix}{name}": value for name, value in tensors.items()}
    for ours in _HEAD:
        value = np.array(model.params[f"head.{ours}"])
        tensors[_name_of(codec, ours)] = _exchanged(value, pad_id) if ours == "bias" else value.T
    write_json(directory / "config.json", content)
    write_tensors(directory / SINGLE, tensors)


def read_pooler(directory: Path) -> dict[str, np.ndarray]:
    """Reads the pooler of a BERT's folder: `kernel` [D, D] and `bias` [D], float32."""
    tensors, end = read_tensors(directory), "pooler.dense"
    kernel, bias = (
        hf.read_ending(directory, tensors, f"{end}.{leaf}", ": it has no pooler")
        for leaf in ("weight", "bias")
    )
    return {"kernel": kernel.T, "bias": bias}


def _read_head(directory: Path, config: MaskedLMConfig, pad_id: int) -> dict[str, np.ndarray]:
    codec = backbones.of_model_type(config.backbone.model_type, where=directory)[1]
    found = {hf.current_name(name): value for name, value in read_tensors(directory).items()}
    _check_tied(directory, found, codec.masked_lm["bias"])
    params = {}
    for ours in _HEAD:
        value = hf.read_ending(directory, found, _name_of(codec, ours), ": it has no head for masked tokens")
        params[f"head.{ours}"] = _exchanged(value, pad_id) if ours == "bias" else value.T
    shapes = {name: shape for name, shape in stored.model_shapes(config).items() if name in params}
    stored.check_params(params, shapes, str(directory))
    return params


def _name_of(codec: HuggingFace, ours: str) -> str:
    """Returns the name that a parameter of the head has in a folder."""
    return f"{codec.masked_lm[ours.partition('.')[0]]}.{'bias' if ours.endswith('bias') else 'weight'}"


def _exchanged(bias: np.ndarray, pad_id: int) -> np.ndarray:
    """Exchanges two entries, as the rows of the token vectors are."""
    bias[[0, pad_id]] = bias[[pad_id, 0]]
    return bias


def _check_tied(directory: Path, tensors: Mapping[str, Any], module: str) -> None:
    """Checks that tensors which the head shares are equal to their copies in a file, if it has copies."""
    table = next((name for name in tensors if name.endswith("embeddings.word_embeddings.weight")), "")
    for name, tied in (("decoder.weight", table), ("weight", table), ("decoder.bias", f"{module}.bias")):
        name = f"{module}.{name}"
        if name in tensors and tied in tensors and not np.array_equal(tensors[name], tensors[tied]):
            raise UserError(
                f"{directory}: {name} differs from {tied}, although config.json says that they are shared;"
                " a head with its own vectors or bias is not supported: use another model"
            )

"""Reads and writes Hugging Face folders of masked language models, by each family's `TokenHead`."""

import dataclasses
import re
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
from jaxir.models.backbones import BackboneConfig
from jaxir.models.codec import ACTIVATIONS, HuggingFace, TokenHead
from jaxir.models.masked_lm import MaskedLMConfig

_TRANSFORM = ("dense.kernel", "dense.bias", "norm.scale", "norm.bias")  # parameters before the logits
_TABLE, _BIAS = "head.table.embedding", "head.bias"
_NO_HEAD = ": it has no head for masked tokens"


def outline(config_file: Path) -> MaskedLMConfig:
    """Returns the configuration of a folder's masked language model from config.json; no weight is read."""
    content = read_json(config_file)
    backbone, _ = hf_config.parse(content, config_file)
    codec = hf_config.codec_of(backbone)
    if codec.token_head is None:
        raise UserError(
            f"{config_file}: no masked language model has model_type {content['model_type']!r}; use a BERT"
        )
    return new_config(backbone, codec, content, config_file)


def new_config(
    backbone: BackboneConfig, codec: HuggingFace, content: Mapping[str, Any], where: Path
) -> MaskedLMConfig:
    """Returns the configuration of a family's masked language model; `content` is that of config.json."""
    head: TokenHead = codec.token_head
    activation = head.activation or backbone.activation
    if head.activation_entry and (named := content.get(head.activation_entry)) is not None:
        activation = ACTIVATIONS.get(str(named))
        if activation is None:
            raise UserError(
                f"{where}: {head.activation_entry} {named!r:.40} is not supported, only"
                f" {', '.join(ACTIVATIONS)}; give another model"
            )
    return MaskedLMConfig(
        backbone=backbone,
        activation=activation,
        norm_epsilon=backbone.layer_norm_epsilon,
        transform=head.dense is not None,
        norm_bias=head.norm_bias,
        tied=bool(content.get("tie_word_embeddings", head.tied)),
    )


def is_one(config_file: Path) -> bool:
    """Whether a folder's config.json says that its weights have the head of a masked language model."""
    names = read_json(config_file, dict[str, Any]).get("architectures") or [""]
    return str(names[0]).endswith("ForMaskedLM")


def read(directory: Path) -> StoredModel:
    """Reads a folder with config.json, weights and a tokenizer.

    Logits are products with the encoder's token vectors, unless config.json says that the head has its own,
    or the folder holds vectors of the head that differ.
    """
    config = outline(directory / "config.json")
    encoder, tokenizer = hf.read(directory)
    config, head = _read_head(directory, config, encoder)
    params = encoder.in_model | head
    for name, value in params.items():  # a damaged model must fail here, as its words may look right
        if not np.isfinite(np.asarray(value)).all():
            raise UserError(f"{directory} is damaged: {name} has a number that is not finite; copy it again")
    length = config.backbone.max_positions or hf.DEFAULT_LENGTH
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
    head: TokenHead = codec.token_head
    content = hf_config.describe(config.backbone, pad_id) | head.written
    content |= {"tie_word_embeddings": config.tied}
    content["architectures"] = [codec.architecture.replace("Model", "ForMaskedLM")]
    if head.activation_entry:
        named = (theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
        content[head.activation_entry] = next(named)
    tensors = hf.tensors_of(config.backbone, hf.encoder_of(model.params), pad_id=pad_id)
    tensors = {f"{head.prefix}{name}": value for name, value in tensors.items()}
    for ours in _TRANSFORM if config.transform else ():
        if f"head.{ours}" in model.params:
            tensors[_name_of(head, ours)] = np.array(model.params[f"head.{ours}"]).T
    bias = _exchanged(model.params[_BIAS], pad_id)
    # A head without a dense layer has a bias only if the blocks have biases.
    has_bias = config.transform or config.backbone.mlp_bias
    if has_bias:
        tensors[f"{head.bias}.bias"] = bias
    elif bias.any():
        raise UserError(
            f"Hugging Face's {content['architectures'][0]} has no bias of logits without mlp_bias, but this"
            " model has one: keep it in jaxir's format"
        )
    if not config.tied:
        tensors[f"{head.decoder}.weight"] = _exchanged(model.params[_TABLE], pad_id)
        if has_bias:
            tensors[f"{head.decoder}.bias"] = bias.copy()
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


def _read_head(
    directory: Path, config: MaskedLMConfig, encoder: hf.Encoder
) -> tuple[MaskedLMConfig, dict[str, np.ndarray]]:
    """Returns the configuration, with `tied` set by what the weights hold, and the head's parameters."""
    head: TokenHead = hf_config.codec_of(config.backbone).token_head
    found = {hf.current_name(name): value for name, value in read_tensors(directory).items()}
    for pattern, new in head.renamed:
        found = {re.sub(pattern, new, name): value for name, value in found.items()} | found
    params = {}
    for ours in _TRANSFORM if config.transform else ():
        if ours == "norm.bias" and not config.norm_bias:
            continue
        if ours == "dense.bias" and head.lacks_biases and _ending(found, _name_of(head, ours)) is None:
            params[f"head.{ours}"] = np.zeros(config.backbone.embed_dim, np.float32)
            continue
        params[f"head.{ours}"] = hf.read_ending(directory, found, _name_of(head, ours), _NO_HEAD).T
    table = _ending(found, f"{head.decoder}.weight")
    if table is None and not config.tied:
        raise UserError(
            f"{directory}: no {head.decoder}.weight among its weights, although config.json says that the"
            " head has its own token vectors; copy the weights again"
        )
    if table is not None:
        own = _exchanged(found[table], encoder.pad_id)
        shared = encoder.params[f"{config.backbone.token_table}.embedding"]
        if not config.tied or not np.array_equal(own, shared):
            config = dataclasses.replace(config, tied=False)
            params[_TABLE] = own
    params[_BIAS] = _read_bias(directory, found, head, config.backbone.vocab_size, encoder.pad_id)
    shapes = {name: shape for name, shape in stored.model_shapes(config).items() if name.startswith("head.")}
    stored.check_params(params, shapes, str(directory))
    return config, params


def _read_bias(
    directory: Path, tensors: Mapping[str, Any], head: TokenHead, size: int, pad_id: int
) -> np.ndarray:
    """Returns the bias of the logits [V]: the decoder's, else the head's, else zeros."""
    own = _ending(tensors, f"{head.decoder}.bias")
    if own is not None:
        return _exchanged(tensors[own], pad_id)
    if head.lacks_biases:
        return np.zeros(size, np.float32)
    return _exchanged(hf.read_ending(directory, tensors, f"{head.bias}.bias", _NO_HEAD), pad_id)


def _ending(tensors: Mapping[str, Any], end: str) -> str | None:
    """Returns the name of the tensor whose name ends with `end`, such as "dense.weight"; else None."""
    return next((name for name in tensors if name == end or name.endswith(f".{end}")), None)


def _name_of(head: TokenHead, ours: str) -> str:
    """Returns the name in a folder of a parameter of the head's dense layer or norm."""
    part, leaf = ours.split(".")
    return f"{getattr(head, part)}.{'bias' if leaf == 'bias' else 'weight'}"


def _exchanged(rows: Any, pad_id: int) -> np.ndarray:
    """Exchanges rows 0 and `pad_id`, as in the token vectors; an array of another shape is only copied."""
    rows = np.array(rows, np.float32)
    if rows.ndim and pad_id < len(rows):
        rows[[0, pad_id]] = rows[[pad_id, 0]]
    return rows

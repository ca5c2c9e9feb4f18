"""Converts Hugging Face's folders of T5ForConditionalGeneration to generators and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.huggingface import hf, hf_config
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.notes import note
from jaxir.interop.weights.weights import SINGLE, read_json, read_tensors, write_json, write_tensors
from jaxir.models import t5_decoder
from jaxir.models.backbones import BackboneConfig
from jaxir.models.codec import Weights
from jaxir.models.seq2seq import START, Seq2SeqConfig
from jaxir.models.t5 import T5Config

_HEAD, _TABLE = "lm_head.weight", "shared.weight"
_ROWS_AT_ONCE = 4096  # rows of two tables compared at a time
# Fusion-in-Decoder's code adds this bias to the scores of cross-attention in every block.
_CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def read(directory: Path) -> StoredModel:
    """Reads a folder with config.json, weights and a tokenizer."""
    path = directory / "config.json"
    (encoder, tokenizer), content = hf.read(directory), read_json(path)
    _check(directory, content, encoder.config, encoder.pad_id)
    found = read_tensors(directory)
    names = found.keys()
    if not any(name.startswith("decoder.block.") for name in names):
        raise UserError(f"{directory}: its weights have no decoder; give a complete T5")
    # A folder may hold the token table a second time under the head's name; then there is no head.
    has_head = _HEAD in names and not _are_equal(found[_HEAD], encoder.params["token.embedding"])
    config = _config(path, content, encoder.config, has_head=has_head)
    if has_head and config.tied:
        note(
            f"warning: {directory}: {_HEAD} is left out: it differs from {_TABLE}, but config.json says that"
            " they are one table; if they are two, set tie_word_embeddings to false there"
        )
    # T5's own folders may hold this bias, too, but do not use it.
    if _CROSS_BIAS in names and any(map(hf.is_wrapped, names)):
        note(
            f"warning: {directory}: {_CROSS_BIAS}, a bias of cross-attention in its authors' code, is"
            " left out: answers may differ slightly from theirs"
        )
    return StoredModel(
        config=config,
        params=encoder.in_model | hf.read_part(directory, _weights(config), _shapes(config)),
        tokenizer=tokenizer,
        settings=EncoderSettings.of_generator(hf.max_length(directory, encoder)),
    )


def outline(path: Path) -> Seq2SeqConfig:
    """Returns the configuration in a folder's config.json; no weight is read."""
    content = read_json(path)
    backbone, pad_id = hf_config.parse(content, path)
    _check(path.parent, content, backbone, pad_id)
    return _config(path, content, backbone, has_head=True)  # `has_head` is ignored if outputs are scaled


def _check(directory: Path, content: Mapping[str, Any], backbone: BackboneConfig, pad_id: int) -> None:
    if not isinstance(backbone, T5Config):
        raise UserError(f"{directory}: model_type {content['model_type']!r} is not a generator; give a T5")
    start = content.get("decoder_start_token_id", START)
    if (pad_id, start) != (0, START):
        raise UserError(
            f"{directory / 'config.json'}: padding id {pad_id} and decoder_start_token_id {start} are not"
            " supported, only 0 and 0; give another model"
        )


def _config(path: Path, content: Mapping[str, Any], backbone: T5Config, *, has_head: bool) -> Seq2SeqConfig:
    # T5's entries for scaled outputs have misleading names; mT5 has none.
    untied = content.get("tie_word_embeddings", True) is False
    scaled = content["model_type"] == "t5" and bool(content.get("scale_decoder_outputs", not untied))
    try:
        return Seq2SeqConfig(
            backbone=backbone,
            num_decoder_layers=content.get("num_decoder_layers") or backbone.num_layers,
            tied=scaled or not has_head,
            scaled=scaled,
            eos_id=content.get("eos_token_id", 1),
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder that transformers reads; the inverse of `read`."""
    config, params = model.config, model.params
    content = hf_config.describe(config.backbone, 0) | {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "use_cache": True,
        "num_decoder_layers": config.num_decoder_layers,
        "decoder_start_token_id": START,
        "eos_token_id": config.eos_id,
        "tie_word_embeddings": config.scaled,  # if true, transformers scales outputs
    }
    tensors: dict[str, Any] = hf.tensors_of(config.backbone, hf.encoder_of(params), pad_id=0)
    tensors |= hf.tensors_of_part(_weights(config), _shapes(config), params)
    if config.tied and not config.scaled:
        tensors[_HEAD] = tensors[_TABLE]  # if the file has no head, transformers 4 makes a random one
    write_json(directory / "config.json", content)
    write_tensors(directory / SINGLE, tensors)
    hf.save_tokenizer(directory, model, model.settings.passage_max_length)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two arrays, which may be lazy, are equal; stops reading at the first difference."""
    if one.shape != other.shape:
        return False
    starts = range(0, one.shape[0], _ROWS_AT_ONCE)
    return all(np.array_equal(*(x[at : at + _ROWS_AT_ONCE] for x in (one, other))) for at in starts)


def _weights(config: Seq2SeqConfig) -> Weights:
    head = {} if config.tied else {"head": _HEAD.removesuffix(".weight")}
    return {**t5_decoder.weights_of(config.backbone), **head}


def _shapes(config: Seq2SeqConfig) -> dict[str, tuple[int, ...]]:
    shapes = stored.model_shapes(config)
    return {name: shape for name, shape in shapes.items() if not name.startswith("encoder.")}

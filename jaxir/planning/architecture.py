"""Describes a run's model without reading weights, from its name or the files beside its weights."""

from __future__ import annotations

from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.interop import model_dir, t5x
from jaxir.interop.build import Source
from jaxir.interop.hub import hub
from jaxir.interop.huggingface import hf_config, hf_seq2seq
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import ModelConfig, StoredModel
from jaxir.interop.weights.weights import read_json
from jaxir.models import backbones
from jaxir.models.backbones import BackboneConfig
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.models.t5 import T5Config

_DEFAULT_LENGTH = 512


def describe(model: Source) -> tuple[ModelConfig, EncoderSettings]:
    """Returns the config and settings of the model that `model.build` would build, without weights."""
    if not hasattr(model, "outline"):
        raise UserError(
            f"cannot plan with {type(model).__name__}: it has no outline() method, which describes the model"
            " without weights (see jaxir.interop.build.Source)"
        )
    return model.outline(_read_shapes)


def describe_generator(source: str) -> tuple[Seq2SeqConfig, EncoderSettings]:
    """Returns the config and settings of a generator, without weights."""
    return _describe(source, None, "seq2seq")


def _read_shapes(source: str, tokenizer: str | None, kind: str | None = "dual_encoder") -> StoredModel:
    """Returns a model whose parameters are only shapes."""
    config, settings = _describe(source, tokenizer, kind)
    return StoredModel(config=config, params=stored.shapes_alone(config), tokenizer=None, settings=settings)


def _describe(source: str, tokenizer: str | None, kind: str | None) -> tuple[ModelConfig, EncoderSettings]:
    scheme, separator, name = str(source).partition(":")
    generator = kind == "seq2seq"
    has_scheme = bool(separator and name)
    if has_scheme and scheme == "hf" and generator:
        return _hf_generator(name), EncoderSettings.of_generator(_DEFAULT_LENGTH)
    if has_scheme and scheme == "hf":
        backbone = _hf_backbone(name)
        length = min(_DEFAULT_LENGTH, backbone.max_positions or _DEFAULT_LENGTH)
        settings = EncoderSettings(query_max_length=length, passage_max_length=length)
        return DualEncoderConfig(backbone=backbone), settings
    if has_scheme and scheme == "t5x":
        return t5x.describe(name, generator=generator)
    found, _ = model_dir.read(
        source, tokenizer=tokenizer, kind=kind
    )  # opens the model without reading its weights
    return found.config, found.settings


def _hf_generator(name: str) -> Seq2SeqConfig:
    published = backbones.PUBLISHED.get(name)
    if not isinstance(published, T5Config) or Path(name).is_dir():
        return hf_seq2seq.outline(hub.configuration(name))
    old = not published.gated
    return Seq2SeqConfig(backbone=published, num_decoder_layers=published.num_layers, tied=old, scaled=old)


def _hf_backbone(name: str) -> BackboneConfig:
    found = backbones.PUBLISHED.get(name.partition("@")[0])
    if found is not None and not Path(name).is_dir():
        return found  # needs no network
    path = hub.configuration(name)
    return hf_config.parse(read_json(path), path)[0]

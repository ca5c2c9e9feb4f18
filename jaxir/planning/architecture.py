"""What a run would train, known without reading a weight: from names, or from files beside the weights."""

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
    """Returns what `model.build` would build and its lengths, without weights.

    Raises:
      UserError: nothing that can be read here says what it is, or a change does not fit it.
    """
    if not hasattr(model, "outline"):
        raise UserError(
            f"cannot plan with {type(model).__name__}: it has no outline(), which says what it would build"
            " (see jaxir.interop.build.Source)"
        )
    return model.outline(_read_shapes)


def describe_generator(source: str) -> tuple[Seq2SeqConfig, EncoderSettings]:
    """Returns what a generator is made of and its lengths; no weight is read.

    Raises:
      UserError: there is no such model, nothing here says what it is, or it is no generator.
    """
    kind, separator, name = source.partition(":")
    if separator and name and kind == "hf":
        backbone = backbones.PUBLISHED.get(name)
        if isinstance(backbone, T5Config) and not Path(name).is_dir():
            old = not backbone.gated
            config = Seq2SeqConfig(
                backbone=backbone, num_decoder_layers=backbone.num_layers, tied=old, scaled=old
            )
            return config, EncoderSettings.of_generator(_DEFAULT_LENGTH)
        return hf_seq2seq.outline(hub.configuration(name)), EncoderSettings.of_generator(_DEFAULT_LENGTH)
    if separator and name and kind == "t5x":
        return t5x.describe(name, generator=True)
    found, _ = model_dir.read(source, kind="seq2seq")  # opened, not read
    return found.config, found.settings


def _read_shapes(source: str, tokenizer: str | None, kind: str | None = "dual_encoder") -> StoredModel:
    """Returns a model whose parameters are but shapes."""
    generator = kind == "seq2seq"
    config, settings = describe_generator(source) if generator else _describe_source(source, tokenizer, kind)
    return StoredModel(config=config, params=stored.shapes_alone(config), tokenizer=None, settings=settings)


def _describe_source(
    source: str, tokenizer: str | None, model_kind: str | None
) -> tuple[ModelConfig, EncoderSettings]:
    kind, separator, name = str(source).partition(":")
    if separator and name and kind == "hf":
        backbone = _describe_hf(name)
        length = min(_DEFAULT_LENGTH, backbone.max_positions or _DEFAULT_LENGTH)
        return DualEncoderConfig(backbone=backbone), EncoderSettings(
            query_max_length=length, passage_max_length=length
        )
    if separator and name and kind == "t5x":
        return t5x.describe(name)
    found, _ = model_dir.read(source, tokenizer=tokenizer, kind=model_kind)  # opened, not read
    return found.config, found.settings


def _describe_hf(name: str) -> BackboneConfig:
    found = backbones.PUBLISHED.get(name.partition("@")[0])
    if found is not None and not Path(name).is_dir():
        return found  # so that planning with it needs no network
    path = hub.configuration(name)
    return hf_config.parse(read_json(path), path)[0]

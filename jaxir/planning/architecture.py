"""What a run would train, known without reading a weight: from names, or from files beside the weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.errors import UserError
from jaxir.interop import hf_config, hub, model_dir, stored, t5x
from jaxir.interop.build import FromScratch, Pretrained
from jaxir.interop.overrides import Overrides
from jaxir.interop.stored import EncoderSettings, StoredModel
from jaxir.interop.weights import read_json
from jaxir.models import t5 as t5_lib
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig

# Hub models whose shape is known here, so that planning with them needs no network.
_PUBLISHED = (
    {f"google/t5-v1_1-{size}": f"1.1-{size}" for size in ("small", "base", "large", "xl", "xxl")}
    | {f"t5-{size}": f"1.0-{size}" for size in ("small", "base", "large", "3b", "11b")}
    | {f"google-t5/t5-{size}": f"1.0-{size}" for size in ("small", "base", "large", "3b", "11b")}
)
_DEFAULT_LENGTH = 512


def describe(model: Any) -> tuple[DualEncoderConfig, EncoderSettings]:
    """Returns what `model.build` would build and its lengths, without weights.

    Args:
      model: FromScratch(...) or Pretrained(...) of jaxir.interop.build.

    Raises:
      UserError: nothing that can be read here says what it is, or a change does not fit it.
    """
    if isinstance(model, FromScratch):
        settings = EncoderSettings(
            query_max_length=model.query_max_length, passage_max_length=model.passage_max_length
        )
        stored.check_lengths(settings, model.config, "the new model")
        return model.config, settings
    if not isinstance(model, Pretrained):
        raise UserError(f"cannot plan with {type(model).__name__}: give Pretrained(...) or FromScratch(...)")
    config, settings = _describe_source(model)
    # The changes are made by the code that makes them in training, on parameters that are but shapes: views
    # of one zero.
    zero = np.zeros((), np.float32)
    shapes = stored.model_shapes(config)
    nothing = StoredModel(
        config=config,
        params={name: np.broadcast_to(zero, shape) for name, shape in shapes.items()},
        tokenizer=None,
        settings=settings,
    )
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(Overrides)}
    changes = Overrides(**fields | {"tokenizer": None})
    changed = changes.apply(nothing, seed=0, where=model.source)
    return changed.config, changed.settings


def _describe_source(model: Pretrained) -> tuple[DualEncoderConfig, EncoderSettings]:
    kind, separator, name = str(model.source).partition(":")
    if separator and kind == "hf":
        backbone = _describe_hf(name)
        length = min(_DEFAULT_LENGTH, getattr(backbone, "max_positions", _DEFAULT_LENGTH))
        return DualEncoderConfig(backbone=backbone), EncoderSettings(
            query_max_length=length, passage_max_length=length
        )
    if separator and kind == "t5x":
        return t5x.describe(name)
    found, _ = model_dir.read(model.source, tokenizer=model.tokenizer)  # opened, not read
    return found.config, found.settings


def _describe_hf(name: str) -> BertConfig | t5_lib.T5Config:
    path = Path(name).expanduser() / "config.json"
    if path.is_file():
        return hf_config.parse(read_json(path), path)[0]
    if name in _PUBLISHED:
        return t5_lib.preset(_PUBLISHED[name])
    path = hub.resolve(name) / "config.json"
    return hf_config.parse(read_json(path), path)[0]

"""What a run would train, known without reading a weight: from names, or from files beside the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxir.errors import UserError
from jaxir.interop import hf_config, hub, model_dir, stored, t5x
from jaxir.interop.build import Source
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


def describe(model: Source) -> tuple[DualEncoderConfig, EncoderSettings]:
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


def _read_shapes(source: str, tokenizer: str | None) -> StoredModel:
    """Returns a model whose parameters are but shapes: views of one zero, which training can change."""
    config, settings = _describe_source(source, tokenizer)
    zero = np.zeros((), np.float32)
    params = {name: np.broadcast_to(zero, shape) for name, shape in stored.model_shapes(config).items()}
    return StoredModel(config=config, params=params, tokenizer=None, settings=settings)


def _describe_source(source: str, tokenizer: str | None) -> tuple[DualEncoderConfig, EncoderSettings]:
    kind, separator, name = str(source).partition(":")
    if separator and kind == "hf":
        backbone = _describe_hf(name)
        length = min(_DEFAULT_LENGTH, getattr(backbone, "max_positions", _DEFAULT_LENGTH))
        return DualEncoderConfig(backbone=backbone), EncoderSettings(
            query_max_length=length, passage_max_length=length
        )
    if separator and kind == "t5x":
        return t5x.describe(name)
    found, _ = model_dir.read(source, tokenizer=tokenizer)  # opened, not read
    return found.config, found.settings


def _describe_hf(name: str) -> BertConfig | t5_lib.T5Config:
    path = Path(name).expanduser() / "config.json"
    if path.is_file():
        return hf_config.parse(read_json(path), path)[0]
    if name in _PUBLISHED:
        return t5_lib.preset(_PUBLISHED[name])
    path = hub.resolve(name) / "config.json"
    return hf_config.parse(read_json(path), path)[0]

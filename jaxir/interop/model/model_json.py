"""What `jaxir.json` says of a model: its kind, what it is made of, its lengths and prompts."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.values import fits, hints_of, simple
from jaxir.interop.model import kinds, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import ModelConfig
from jaxir.interop.weights.weights import require
from jaxir.models import backbones
from jaxir.models.dual_encoder import DualEncoderConfig, Projection

_FIRST = "dual_encoder"  # what files say nothing of the kind are of


def describe(config: ModelConfig, settings: EncoderSettings) -> dict[str, Any]:
    """Returns what `parse` reads."""
    return {
        "kind": kinds.name_of(config),
        "model": stored.describe_config(config),
        "settings": settings.describe(),
    }


def parse(content: Mapping[str, Any], path: Path) -> tuple[ModelConfig, EncoderSettings]:
    """Returns what the content of a file describes.

    Raises:
      UserError: it is damaged, or of a kind that is not known here. The sentence begins with `path`.
    """
    name = content.get("kind", _FIRST)
    if not isinstance(name, str) or name not in kinds.KINDS:
        raise UserError(f"{path}: a model of kind {name!r:.40}; known are {', '.join(kinds.KINDS)}")
    kind, where = kinds.KINDS[name].config, f"{path}: does not describe a model"
    try:
        fields = dict(require(content, "model", path))
        backbone = dict(fields["backbone"])
        family = backbones.of_kind(str(backbone.pop("kind")), module=backbone.pop("module", None), where=path)
        fields["backbone"] = _made(family, backbone, where)
        if kind is DualEncoderConfig and fields["projection"] is not None:
            fields["projection"] = _made(Projection, fields["projection"], where)
        config = _made(kind, fields, where)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: {error!r}") from error
    settings = _made(EncoderSettings, require(content, "settings", path), f"{path}: settings")
    stored.check_lengths(settings, config, str(path))
    return config, settings


def _made(kind: type[Any], fields: Any, where: str) -> Any:
    """Makes a dataclass of values that a file gives.

    Raises:
      UserError: one is missing, unknown, or of a type or size that it cannot have.
    """
    try:
        hints = hints_of(kind)
        for name, value in fields.items():
            number = isinstance(value, int | float)
            if not fits(value, hints.get(name)) or (number and not 0 <= value < math.inf):
                raise ValueError(f"{name} is {value!r:.40}")
        whole = {
            n: float(v) for n, v in fields.items() if simple(hints.get(n, str)) is float
        }  # as 0 stands for 0.0
        return kind(**fields | whole)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where}: {error}") from error

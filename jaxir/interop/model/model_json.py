"""The description of a model in `jaxir.json`: kind, configuration, lengths and prompts."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.values import hints_of, simple
from jaxir.interop.model import kinds, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import ModelConfig
from jaxir.interop.weights.weights import require
from jaxir.models import backbones
from jaxir.models.sparse_config import SparseConfig
from jaxir.models.sparse_forms import FORMS
from jaxir.storage.json_files import made

_DEFAULT_KIND = "dual_encoder"  # the kind of model in a file that does not name a kind


def describe(config: ModelConfig, settings: EncoderSettings) -> dict[str, Any]:
    """Returns the entries of `jaxir.json` that `parse` reads."""
    module = type(config).__module__
    return {
        "kind": kinds.name_of(config),
        **({} if module.startswith("jaxir.") else {"module": module}),  # a reader must import it first
        "model": stored.describe_config(config),
        "settings": settings.describe(),
    }


def parse(content: Mapping[str, Any], path: Path) -> tuple[ModelConfig, EncoderSettings]:
    """Returns the configuration and settings in `content`, which was read from the jaxir.json at `path`."""
    name = content.get("kind", _DEFAULT_KIND)
    if str(name) not in kinds.KINDS:
        module = content.get("module")
        hint = f": import {module} first, in Python or in a gin file (--gin_file)" if module else ""
        raise UserError(
            f"{path}: unknown kind of model {name!r:.40}; known kinds: {', '.join(kinds.KINDS)}{hint}"
        )
    kind = kinds.KINDS[name].config
    try:
        fields = dict(require(content, "model", path))
        backbone = dict(fields["backbone"])
        family = backbones.of_kind(str(backbone.pop("kind")), module=backbone.pop("module", None), where=path)
        fields["backbone"] = _made(family, backbone, path)
        if kind is SparseConfig:
            kind = FORMS[fields.pop("form", SparseConfig.form)]
        config = _made(kind, fields, path)
        settings = _made(EncoderSettings, require(content, "settings", path), path)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path} is damaged: it describes no model ({error!r}); copy it again") from error
    stored.check_lengths(settings, config, str(path))
    return config, settings


def _made(cls: type[Any], fields: Mapping[str, Any], path: Path) -> Any:
    """Makes a dataclass from JSON values, by the type hints of its fields."""
    hints = hints_of(cls)
    return made(cls, {name: _value(value, hints.get(name), path) for name, value in fields.items()}, path)


def _value(value: Any, hint: Any, path: Path) -> Any:
    """Converts a JSON value to the type of a field with this hint.

    A list becomes a tuple, and an object a dataclass. A whole number becomes a float, as JSON may write 0.0
    as 0.
    """
    arms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(value) is int and simple(hint) is float:
        return float(value)
    if isinstance(value, Mapping):
        cls = next((arm for arm in arms if dataclasses.is_dataclass(arm)), None)
        return value if cls is None else _made(cls, value, path)
    if isinstance(value, list):
        of_tuple = next((arm for arm in arms if typing.get_origin(arm) is tuple), None)
        if of_tuple is not None:
            return tuple(_value(each, typing.get_args(of_tuple)[0], path) for each in value)
    return value

"""The description of a model in `jaxir.json`: kind, configuration, lengths and prompts."""

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
from jaxir.models.adapters import Adapters
from jaxir.models.after_pooling import AfterPooling
from jaxir.models.dual_encoder import DualEncoderConfig, Projection
from jaxir.models.multi_vector import Expansion, MultiVectorConfig
from jaxir.models.sparse_config import SparseConfig
from jaxir.models.sparse_forms import FORMS, AutoEncoder
from jaxir.models.token_pooling import TokenPooling
from jaxir.storage.json_files import made

_DEFAULT_KIND = "dual_encoder"  # the kind of model in a file that does not name a kind


def describe(config: ModelConfig, settings: EncoderSettings) -> dict[str, Any]:
    """Returns the entries of `jaxir.json` that `parse` reads."""
    return {
        "kind": kinds.name_of(config),
        "model": stored.describe_config(config),
        "settings": settings.describe(),
    }


def parse(content: Mapping[str, Any], path: Path) -> tuple[ModelConfig, EncoderSettings]:
    """Returns the configuration and settings in `content`, which was read from the jaxir.json at `path`."""
    name = content.get("kind", _DEFAULT_KIND)
    if str(name) not in kinds.KINDS:
        raise UserError(f"{path}: unknown kind of model {name!r:.40}; known kinds: {', '.join(kinds.KINDS)}")
    kind = kinds.KINDS[name].config
    try:
        fields = dict(require(content, "model", path))
        backbone = dict(fields["backbone"])
        family = backbones.of_kind(str(backbone.pop("kind")), module=backbone.pop("module", None), where=path)
        fields["backbone"] = _made(family, backbone, path)
        if kind is SparseConfig:
            kind = FORMS[fields.pop("form", SparseConfig.form)]
        if fields.get("projection") is not None and issubclass(kind, DualEncoderConfig):
            fields["projection"] = _made(Projection, fields["projection"], path)
        for name in ("after_pooling", "token_modules"):
            if name in fields:
                fields[name] = tuple(_made(AfterPooling, module, path) for module in fields[name])
        if "codes" in fields:
            fields["codes"] = _made(AutoEncoder, fields["codes"], path)
        if kind is MultiVectorConfig:
            fields |= {name: tuple(fields[name]) for name in ("skipped", "skipped_in", "kept")}
            if fields["expansion"] is not None:
                fields["expansion"] = _made(Expansion, fields["expansion"], path)
            if fields.get("pooling") is not None:
                fields["pooling"] = _made(TokenPooling, fields["pooling"], path)
        if fields.get("adapters") is not None:
            fields["adapters"] = _made(Adapters, fields["adapters"], path)
        config = _made(kind, fields, path)
        settings = _made(EncoderSettings, require(content, "settings", path), path)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path} is damaged: it describes no model ({error!r}); copy it again") from error
    stored.check_lengths(settings, config, str(path))
    return config, settings


def _made(cls: type[Any], fields: Mapping[str, Any], path: Path) -> Any:
    """Makes a dataclass from JSON values; accepts whole numbers as floats, as JSON may write 0.0 as 0."""
    hints = hints_of(cls)
    floats = {n: float(v) for n, v in fields.items() if type(v) is int and simple(hints.get(n)) is float}
    return made(cls, {**fields, **floats}, path)

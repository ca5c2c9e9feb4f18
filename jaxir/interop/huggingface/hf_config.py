"""Converts Hugging Face's config.json to a backbone's configuration and back, by the backbone's table."""

import dataclasses
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.values import Natural, check_value, fits, hints_of
from jaxir.interop.model import identity
from jaxir.interop.weights.weights import require
from jaxir.models import backbones
from jaxir.models.backbones import BackboneConfig
from jaxir.models.codec import Entry, HuggingFace


def parse(content: Any, path: Path) -> tuple[BackboneConfig, int]:
    """Returns the configuration that `content`, read from `path`, describes, and its padding id."""
    kind, codec = backbones.of_model_type(require(content, "model_type", path), where=path)
    if codec.text_entry:
        content = require(content, codec.text_entry, path)
    older = {new: content[old] for old, new in codec.renamed_entries.items() if old in content}
    content = older | content
    pad_id = content.get("pad_token_id")
    if pad_id is None:
        pad_id = codec.pad_id
    for entry, value in codec.fixed.items():
        if (found := content.get(entry)) not in (None, value):
            raise UserError(f"{path}: {entry} {found!r} is not supported, only {value!r}; give another model")
    if not fits(pad_id, Natural):
        raise UserError(
            f"{path}: pad_token_id is {pad_id!r:.40}, not an id; set it to the id of the padding token"
        )
    hints, fields = hints_of(kind), {}
    hints |= {name: hint for name, hint in backbones.SIZES.items() if hints.get(name, int) is int}
    for ours, theirs in codec.entries.items():
        entry = _entry(theirs)
        fields[ours] = _read(content, entry, path)
        if entry.name in content:  # check values now: a wrong huge value would fail only after a long time
            check_value(f"{path}: {entry.name}", fields[ours], hints.get(ours, Any))
    try:
        config = kind(**codec.implied | fields | codec.read_more(content, pad_id))
    except KeyError as error:
        raise UserError(f"{path}: the entry {error} is missing; copy the file again") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error
    if pad_id >= config.vocab_size:
        raise UserError(
            f"{path}: pad_token_id is {pad_id}, but must be below vocab_size, {config.vocab_size}"
        )
    return config, pad_id


def _entry(theirs: str | Entry) -> Entry:
    return Entry(theirs) if isinstance(theirs, str) else theirs


def _read(content: Mapping[str, Any], entry: Entry, path: Path) -> Any:
    value = require(content, entry.name, path) if entry.required else content.get(entry.name, entry.default)
    if entry.values is None:
        return value
    if not isinstance(value, Hashable) or value not in entry.values:
        raise UserError(
            f"{path}: {entry.name} {value!r} is not supported, only {', '.join(entry.values)}; give another"
            " model"
        )
    return entry.values[value]


def codec_of(config: BackboneConfig) -> HuggingFace:
    """Returns the tables that convert `config` and its parameters to a Hugging Face folder."""
    if config.model_type is None:
        raise UserError(f"Hugging Face has no architecture for {config.summary}; use --format=onnx")
    return backbones.of_model_type(config.model_type, where=config.summary)[1]


def describe(config: BackboneConfig, pad_id: int) -> dict[str, Any]:
    """Returns the content of config.json; the inverse of `parse`."""
    codec = codec_of(config)
    for ours, value in codec.implied.items():
        if (found := getattr(config, ours)) != value:
            raise UserError(
                f"Hugging Face's {codec.architecture} needs {ours}={value!r}, but this model has"
                f" {ours}={found!r}; use --format=onnx"
            )
    entries = {}
    for ours, theirs in codec.entries.items():
        value, entry = getattr(config, ours), _entry(theirs)
        names = [name for name, its in (entry.values or {}).items() if its == value]
        entries[entry.name] = names[0] if names else value
    try:
        entries |= codec.write_more(config, pad_id)
    except ValueError as error:
        raise UserError(f"Hugging Face's {error}") from error
    content = {
        "architectures": [codec.architecture],
        "model_type": codec.model_type,
        "torch_dtype": "float32",
        "pad_token_id": pad_id,
        **codec.fixed,
        **codec.written,
        **entries,
    }
    _check_whole(config, parse(content, Path("config.json"))[0])
    return content


def _check_whole(config: BackboneConfig, read: BackboneConfig) -> None:
    """Checks that `read`, from the written file, equals `config`; a user's table may omit fields."""
    for field in dataclasses.fields(config):
        name = field.name
        computed = name in identity.EXECUTION or name.endswith(identity.DROPOUT)
        if computed or getattr(config, name) == getattr(read, name):
            continue
        raise UserError(
            f"a Hugging Face folder would lose this model's {name} {getattr(config, name)!r}: it would be"
            f" read as {getattr(read, name)!r}. Add it to `entries` or `implied` of {type(config).__name__}'s"
            " table (docs/adding_a_backbone.md)"
        )

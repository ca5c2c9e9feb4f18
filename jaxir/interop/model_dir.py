"""Models by name: jaxir directories, training runs, `hf:` and `st:` folders and hub names.

A model directory is `jaxir.json` (architecture, lengths, prompts, fingerprint), `tokenizer/` and `params/`
(Orbax). A run directory has `checkpoints/STEP/params/` instead of `params/`; it stands for its best
checkpoint, or for its latest where none was evaluated.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.files import atomic_directory
from jaxir.interop import hf, hub, sentence_transformers, stored
from jaxir.interop.overrides import Overrides
from jaxir.interop.stored import EncoderSettings, StoredModel
from jaxir.interop.weights import read_json, require, write_json
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, Projection
from jaxir.models.t5 import T5Config
from jaxir.partitioning import Partitioner

__all__ = ["EncoderSettings", "LoadedModel", "load", "read", "save", "write", "write_description"]

CONFIG = "jaxir.json"
FORMAT = 1
_DEFAULT_LENGTH = 512


class LoadedModel(NamedTuple):
    """A model ready for use.

    Attributes:
      model: the dual encoder.
      tokenizer: its tokenizer.
      settings: lengths and prompts of the towers.
      fingerprint: SHA-256 (hex) of parameters, architecture and tokenizer.
    """

    model: DualEncoderModel
    tokenizer: Tokenizer
    settings: EncoderSettings
    fingerprint: str


def load(spec: str, *, mesh: Partitioner | None = None, seed: int = 0, **overrides: Any) -> LoadedModel:
    """Loads a model.

    Args:
      spec: a jaxir model directory, a run directory, or `hf:` or `st:` and a local directory or hub name. A
        model from `hf:` has mean pooling, cosine similarity and at most 512 tokens unless told otherwise.
      mesh: where the parameters go; None for the default device.
      seed: of the weights of a projection that is added.
      **overrides: changes to the model, any field of `overrides.Overrides`.

    Raises:
      UserError: there is no such model, a file of it is missing or damaged, or an override does not fit it.
    """
    changes = Overrides(**overrides)
    found, fingerprint = read(spec)
    model = changes.apply(found, seed=seed, where=spec)
    if fingerprint is None or changes.change_vectors():
        fingerprint = stored.fingerprint(model)
    return LoadedModel(stored.build(model, mesh), model.tokenizer, model.settings, fingerprint)


def save(
    directory: str | Path, model: DualEncoderModel, tokenizer: Tokenizer, settings: EncoderSettings
) -> None:
    """Writes a model directory, which appears only when whole.

    Raises:
      UserError: `directory` exists and is not empty.
    """
    write(
        directory,
        StoredModel(
            config=model.config, params=stored.params_of(model), tokenizer=tokenizer, settings=settings
        ),
    )


def read(spec: str) -> tuple[StoredModel, str | None]:
    """Reads a model onto the host; the second value is its fingerprint, where the files say it.

    Raises:
      UserError: there is no such model, or one of its files is missing or damaged.
    """
    kind, separator, name = str(spec).partition(":")
    if separator and kind == "st":
        return sentence_transformers.read(hub.resolve(name, default_owner="sentence-transformers")), None
    if separator and kind == "hf":
        return _read_hf(hub.resolve(name)), None
    directory = Path(spec)
    if not directory.is_dir():
        raise UserError(
            f"{spec}: no such model directory; models of Hugging Face and sentence-transformers are written"
            " hf:NAME and st:NAME"
        )
    if not (directory / CONFIG).is_file():
        hint = "st:" if (directory / "modules.json").is_file() else "hf:"
        known = (directory / "config.json").is_file() or hint == "st:"
        raise UserError(
            f"{directory}: no {CONFIG} in it"
            + (f"; write {hint}{directory}" if known else ", so no model of ours")
        )
    return _read_jaxir(directory)


def write(directory: str | Path, model: StoredModel) -> None:
    """Writes a model directory, which appears only when whole.

    Raises:
      UserError: `directory` exists and is not empty.
    """
    import orbax.checkpoint as ocp

    with atomic_directory(directory) as aside:
        write_description(
            aside, model.config, model.tokenizer, model.settings, fingerprint=stored.fingerprint(model)
        )
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((aside / "params").absolute(), stored.nest(model.params))


def write_description(
    directory: str | Path,
    config: DualEncoderConfig,
    tokenizer: Tokenizer,
    settings: EncoderSettings,
    *,
    fingerprint: str | None = None,
) -> None:
    """Writes `jaxir.json` and `tokenizer/` into `directory`: all of a model but its parameters.

    A training run calls it once, before its first checkpoint, and gives no fingerprint.
    """
    directory = Path(directory)
    tokenizer.save(directory / "tokenizer")
    content = {
        "format": FORMAT,
        "model": stored.describe_config(config),
        "settings": dataclasses.asdict(settings),
        "fingerprint": fingerprint,
    }
    write_json(directory / CONFIG, content)


def _read_hf(directory: Path) -> StoredModel:
    encoder = hf.read_encoder(directory)
    length = min(_DEFAULT_LENGTH, getattr(encoder.config, "max_positions", _DEFAULT_LENGTH))
    return StoredModel(
        config=DualEncoderConfig(backbone=encoder.config),
        params={f"encoder.{name}": value for name, value in encoder.params.items()},
        tokenizer=hf.read_tokenizer(directory, encoder),
        settings=EncoderSettings(query_max_length=length, passage_max_length=length),
    )


def _read_jaxir(directory: Path) -> tuple[StoredModel, str | None]:
    path = directory / CONFIG
    content = read_json(path)
    if require(content, "format", path) != FORMAT:
        raise UserError(
            f"{path}: format {content['format']} is not {FORMAT}: it was written by another version"
        )
    config = _parse_config(require(content, "model", path), path)
    try:
        settings = EncoderSettings(**require(content, "settings", path))
    except TypeError as error:
        raise UserError(f"{path}: settings: {error}") from error
    params = _read_params(_params_directory(directory))
    model = StoredModel(
        config=config, params=params, tokenizer=Tokenizer.load(directory / "tokenizer"), settings=settings
    )
    stored.check_params(params, stored.model_shapes(config), str(directory))
    return model, content.get("fingerprint")


def _parse_config(content: dict[str, Any], path: Path) -> DualEncoderConfig:
    try:
        backbone = dict(content["backbone"])
        kind = {"bert": BertConfig, "t5": T5Config}[backbone.pop("kind")]
        projection = content["projection"]
        return DualEncoderConfig(
            **content
            | {
                "backbone": kind(**backbone),
                "projection": None if projection is None else Projection(**projection),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: does not describe a model ({error})") from error


def _params_directory(directory: Path) -> Path:
    if (directory / "params").is_dir():
        return directory / "params"
    checkpoints = directory / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(f"{directory}: neither params nor checkpoints in it")
    steps = {int(p.name) for p in checkpoints.iterdir() if p.name.isdigit() and p.is_dir()}
    if not steps:
        raise UserError(f"{checkpoints}: no checkpoint in it yet")
    best = checkpoints / "best.json"
    step = require(read_json(best), "step", best) if best.is_file() else max(steps)
    if step not in steps:
        raise UserError(f"{best} names step {step}, but there is no such checkpoint")
    return checkpoints / str(step) / "params"


def _read_params(directory: Path) -> dict[str, np.ndarray]:
    """Reads what Orbax wrote, by TensorStore: on a damaged file Orbax's own threads print tracebacks."""
    import tensorstore

    path = directory / "_METADATA"
    content = read_json(path)
    entries = require(content, "tree_metadata", path).values()
    names = [".".join(key["key"] for key in entry["key_metadata"]) for entry in entries]
    base = f"file://{directory.absolute()}/"
    driver = "zarr3" if content.get("use_zarr3") else "zarr"

    def spec(name: str) -> dict[str, Any]:
        return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}

    try:
        opened = [tensorstore.open(spec(name), open=True, read=True) for name in names]
        reading = [array.result().read() for array in opened]
        arrays = [array.result() for array in reading]
    except (ValueError, OSError) as error:
        reason = str(error).partition(" [")[0]
        raise UserError(f"{directory}: the parameters cannot be read ({reason:.200})") from error
    return stored.canonical(dict(zip(names, arrays, strict=True)))

"""Models by name: jaxir directories, training runs, `hf:` and `st:` folders, `t5x:` checkpoints.

A model directory is `jaxir.json` (architecture, lengths, prompts, fingerprint), `tokenizer/` and `params/`
(Orbax). In a bucket, where nothing can be renamed, `jaxir.json` is written last: without it there is no
model. A run directory has `checkpoints/STEP/params/` instead of `params/`; it stands for its best checkpoint,
or for its latest where none was evaluated.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.files import (
    atomic_directory,
    atomic_file,
    check_bucket,
    check_free,
    is_bucket,
    move_tree,
    path_of,
    remove_tree,
)
from jaxir.interop import hf, hub, sentence_transformers, stored, stores, t5x
from jaxir.interop.overrides import Overrides
from jaxir.interop.stored import EncoderSettings, StoredModel
from jaxir.interop.weights import read_json, require, write_json
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel, Projection
from jaxir.models.t5 import T5Config
from jaxir.partitioning import Partitioner

__all__ = ["EncoderSettings", "LoadedModel", "load", "read", "save", "write", "write_description"]

CONFIG = "jaxir.json"
COMMITTED = "commit_success.txt"
UNFINISHED = "UNFINISHED"  # in a bucket, beside a model that is being written
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

    def __repr__(self) -> str:
        return f"LoadedModel({self.model!r}, {self.settings}, {self.fingerprint[:12]})"


def load(spec: str, *, mesh: Partitioner | None = None, seed: int = 0, **overrides: Any) -> LoadedModel:
    """Loads a model.

    Args:
      spec: a jaxir model directory or run directory, local or gs://; `hf:` or `st:` and a local directory
        or a name on the hub, maybe with @ and a revision; `t5x:` and a T5X checkpoint or run, local or gs://.
        A model from `hf:` or `t5x:` has mean pooling, cosine similarity and at most 512 tokens unless told
        otherwise.
      mesh: where the parameters go; None for the default device.
      seed: of the weights of a projection that is added.
      **overrides: changes to the model, any field of `overrides.Overrides`.

    Raises:
      UserError: there is no such model, a file of it is missing or damaged, or an override does not fit it.
    """
    changes = Overrides(**overrides)
    found, fingerprint = read(spec, tokenizer=changes.tokenizer)
    model = changes.apply(found, seed=seed, where=spec)
    if fingerprint is None or changes.change_vectors():
        fingerprint = stored.fingerprint(model)
    return LoadedModel(stored.build(model, mesh), model.tokenizer, model.settings, fingerprint)


def save(
    directory: str | Path, model: DualEncoderModel, tokenizer: Tokenizer, settings: EncoderSettings
) -> None:
    """Writes a model directory, which appears only when whole.

    Where the model lies over the devices of several processes, all of them call this, each writes its own
    part of the parameters, and `directory` must be one that all see.

    Raises:
      UserError: `directory` exists and is not empty, in every process.
    """
    if jax.process_count() == 1:
        params = stored.params_of(model)
        write(
            directory, StoredModel(config=model.config, params=params, tokenizer=tokenizer, settings=settings)
        )
        return
    import orbax.checkpoint as ocp

    if is_bucket(directory):
        raise UserError(
            f"{directory}: a model is written to a directory that all machines see, not to a bucket"
        )
    first, directory = jax.process_index() == 0, Path(directory)
    aside = directory.with_name(f".{directory.name}.part")
    free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not multihost_utils.broadcast_one_to_all(np.array(free)):
        raise UserError(f"{directory} already exists; give another output or remove it first")
    if first:
        remove_tree(aside)
    multihost_utils.sync_global_devices("the place of the model is free")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            (aside / "params").absolute(), nnx.to_pure_dict(nnx.state(model, nnx.Param)), force=True
        )
    if first:
        _describe_written(aside, model.config, tokenizer, settings)
        move_tree(aside, directory)
    multihost_utils.sync_global_devices("the model is written")


def fingerprint_of(model: DualEncoderModel, tokenizer: Tokenizer, settings: EncoderSettings) -> str:
    """Returns the fingerprint that `load` gives a model once it is saved."""
    params = stored.params_of(model)
    return stored.fingerprint(
        StoredModel(config=model.config, params=params, tokenizer=tokenizer, settings=settings)
    )


def read(spec: str, *, tokenizer: str | None = None) -> tuple[StoredModel, str | None]:
    """Opens a model; the second value is its fingerprint, where the files say it.

    Args:
      spec: as `load` takes it.
      tokenizer: of a model that has none of its own (see `t5x.read`).

    Raises:
      UserError: there is no such model, one of its files is missing or damaged, or it has a tokenizer.
    """
    kind, separator, name = str(spec).partition(":")
    if separator and kind == "t5x":
        return t5x.read(name, tokenizer=tokenizer), None
    if tokenizer is not None:
        raise UserError(f"{spec} has a tokenizer of its own: another one is for t5x: checkpoints only")
    if separator and kind == "st":
        directory = hub.resolve(
            name, default_owner="sentence-transformers", modules=True, check=sentence_transformers.check
        )
        return sentence_transformers.read(directory), None
    if separator and kind == "hf":
        return _read_hf(hub.resolve(name, check=hf.check)), None
    directory = path_of(spec)
    check_bucket(directory)
    if not directory.is_dir():
        raise UserError(
            f"{spec}: no such model directory; models of Hugging Face and sentence-transformers are written"
            " hf:NAME and st:NAME, T5X checkpoints t5x:DIR"
        )
    if _half_written(directory):
        raise UserError(
            f"{directory}: a model whose writing was interrupted, or is still at work: run that command again"
        )
    if not (directory / CONFIG).is_file():
        hint = "st:" if (directory / "modules.json").is_file() else "hf:"
        known = (directory / "config.json").is_file() or hint == "st:"
        raise UserError(
            f"{directory}: no {CONFIG} in it"
            + (f"; write {hint}{directory}" if known else ", so no model of ours")
        )
    return _read_jaxir(directory)


def check_output(directory: str | Path) -> None:
    """Checks that a model can be written to a directory, local or gs://BUCKET/PATH; changes nothing.

    Raises:
      UserError: something else is there, or the bucket cannot be written to.
    """
    directory = path_of(directory)
    check_bucket(directory, writing=True)
    if not _half_written(directory):
        check_free(directory)


def write(directory: str | Path, model: StoredModel) -> None:
    """Writes a model directory, local or gs://BUCKET/PATH, which is a model only when whole.

    Raises:
      UserError: `directory` exists and is not empty, or cannot be written.
    """
    from jaxir.interop import streaming  # Orbax takes a second

    if is_bucket(directory):
        with _in_bucket(directory) as place:
            streaming.write_params(place / "params", stored.nest(model.params))
            # Of what was read, which may lie on this disk: what was written would have to come back.
            fingerprint = stored.fingerprint(model)
            write_description(place, model.config, model.tokenizer, model.settings, fingerprint=fingerprint)
        return
    with atomic_directory(directory) as aside:
        streaming.write_params(aside / "params", stored.nest(model.params))
        _describe_written(aside, model.config, model.tokenizer, model.settings)


@contextlib.contextmanager
def _in_bucket(directory: str | Path) -> Iterator[Path]:
    """Yields the place of a model in a bucket, and removes what is there of it on any error."""
    check_output(directory)
    place = path_of(directory)
    if _half_written(place):
        print(f"note: {place} holds a model that was never finished; it is written anew", file=sys.stderr)
        place.rmtree()
    try:
        with atomic_file(place / UNFINISHED) as file:
            file.write("This is no model: what was writing it has been interrupted, or is still at work.\n")
        yield place
        (place / UNFINISHED).unlink()
    except BaseException:
        remove_tree(place)
        raise


def _half_written(place: Path) -> bool:
    return is_bucket(place) and (place / UNFINISHED).exists() and not (place / CONFIG).exists()


def _describe_written(
    directory: Path, config: DualEncoderConfig, tokenizer: Tokenizer, settings: EncoderSettings
) -> None:
    """Writes all but the parameters; these are there, and are read part by part for the fingerprint."""
    params = _read_params(directory / "params")
    model = StoredModel(config=config, params=params, tokenizer=tokenizer, settings=settings)
    write_description(directory, config, tokenizer, settings, fingerprint=stored.fingerprint(model))


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
    directory = path_of(directory)
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
    params = _read_params((checkpoint_of(directory) or directory) / "params")
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


def checkpoint_of(spec: str | Path) -> Path | None:
    """Returns RUN/checkpoints/STEP, the checkpoint that a run's directory stands for; None of other models.

    Raises:
      UserError: the run has no checkpoint, or not the one that it calls its best.
    """
    directory = path_of(spec)
    if (directory / "params").is_dir() or not (directory / CONFIG).is_file():
        return None
    checkpoints = directory / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(f"{directory}: neither params nor checkpoints in it")
    steps = checkpoint_steps(checkpoints)
    if not steps:
        raise UserError(f"{checkpoints}: no checkpoint in it yet")
    best = checkpoints / "best.json"
    step = require(read_json(best), "step", best) if best.is_file() else max(steps)
    if step not in steps:
        raise UserError(f"{best} names step {step}, but there is no such checkpoint")
    return checkpoints / str(step)


def checkpoint_steps(directory: Path) -> list[int]:
    """Returns the steps of the whole checkpoints in RUN/checkpoints, oldest first; none where it is missing.

    On a disk a checkpoint appears by a rename; in a bucket it is whole once Orbax has put its mark into it.
    """
    try:
        found = [p for p in directory.iterdir() if p.name.isdigit() and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        # Asked before, it might have been there: in a bucket a directory goes with its last file, which
        # Orbax removes where a first checkpoint was not finished.
        return []
    return sorted(int(p.name) for p in found if not is_bucket(p) or (p / COMMITTED).exists())


def _read_params(directory: Path) -> dict[str, Any]:
    """Opens what Orbax wrote, by TensorStore: on a damaged file Orbax's own threads print tracebacks."""
    index = stores.read(str(directory), stores.ORBAX_INDEX)
    if index is None:
        raise UserError(f"{directory / stores.ORBAX_INDEX}: no such file")
    specs = {".".join(keys): spec for keys, spec in stores.orbax_specs(str(directory), index).items()}
    return stored.canonical(stores.open_arrays(f"{directory}: the parameters cannot be read", specs))

"""Models by name: jaxir directories, training runs, `hf:`, `st:`, `t5x:`, and `w2v:` for word vectors.

A model directory is `jaxir.json` (architecture, lengths, prompts, fingerprint, checksums), `tokenizer/` and
`params/` (Orbax). In a bucket, where nothing can be renamed, `jaxir.json` is written last: without it there
is no model. A run directory has `checkpoints/STEP/params/` instead of `params/`; it stands for its best
checkpoint, or for its latest where none was evaluated. While parameters are read they are compared with their
checksums, but for those of which a process reads only its own part.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxir.core.errors import UserError
from jaxir.core.platforms import check_devices
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import t5x, word_vector_files
from jaxir.interop.huggingface import named
from jaxir.interop.model import kinds, model_json, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.overrides import CommonOverrides, Overrides
from jaxir.interop.model.run_dir import CONFIG, check_seal, checkpoint_of, read_record, sealed
from jaxir.interop.model.stored import LoadedModel, ModelConfig, StoredModel
from jaxir.interop.weights import array_checksums, stores
from jaxir.interop.weights.weights import read_json, require, write_json
from jaxir.runtime.partitioning import Partitioner
from jaxir.storage.files import (
    atomic_directory,
    atomic_file,
    check_bucket,
    check_free,
    is_bucket,
    move_tree,
    path_of,
    remove_tree,
)

__all__ = [
    "EncoderSettings",
    "LoadedModel",
    "load",
    "read",
    "read_with",
    "save",
    "write",
    "write_description",
]

T = TypeVar("T")

UNFINISHED = "UNFINISHED"  # in a bucket, beside a model that is being written
FORMAT = 1
# How models that are not ours are written: one of these, a colon, and what stands here.
FORMS = {"t5x": ("DIR",), "st": ("DIR", "NAME"), "hf": ("DIR", "NAME"), "w2v": ("FILE",)}


def load(
    spec: str,
    *,
    kind: str | None = "dual_encoder",
    mesh: Partitioner | None = None,
    seed: int = 0,
    **overrides: Any,
) -> LoadedModel:
    """Loads a model.

    Args:
      spec: a jaxir model directory or run directory, local or gs://; `hf:` or `st:` and a local directory
        or a name on the hub, maybe with @ and a revision; `t5x:` and a T5X checkpoint or run, local or gs://;
        `w2v:` and a file of word vectors. A dual encoder from `hf:`, `t5x:` or `w2v:` has mean pooling,
        cosine similarity and at most 512 tokens unless told otherwise.
      kind: as `read` takes it.
      mesh: where the parameters go; None for the default device.
      seed: of the weights of a projection that is added.
      **overrides: changes to the model, any field of `overrides.Overrides` where `kind` is dual encoder, else
        of `overrides.CommonOverrides`.

    Raises:
      UserError: there is no such model, a file of it is missing or damaged, it is of another kind, or an
        override does not fit it.
    """
    check_devices()
    changes = Overrides(**overrides) if kind == "dual_encoder" else CommonOverrides(**overrides)

    def build(found: StoredModel, fingerprint: str | None) -> LoadedModel:
        model = changes.apply(found, seed=seed, where=spec)
        if fingerprint is None or changes.change_outputs():
            fingerprint = stored.fingerprint(model)
        step = None if found.checkpoint is None else int(found.checkpoint.name)
        return LoadedModel(stored.build(model, mesh), model.tokenizer, model.settings, fingerprint, step)

    return read_with(build, spec, tokenizer=overrides.get("tokenizer"), kind=kind)


def read_with(
    build: Callable[[StoredModel, str | None], T],
    spec: str,
    *,
    tokenizer: str | None = None,
    kind: str | None = "dual_encoder",
    weights: bool = True,
) -> T:
    """Returns `build` of what `read` returns, whose parameters it reads.

    Where a trainer removes the checkpoint meanwhile, because the run has a later one, that one is read.

    Raises:
      UserError: as `read` and `build`.
    """
    while True:
        found, fingerprint = read(spec, tokenizer=tokenizer, kind=kind, weights=weights)
        try:
            return build(found, fingerprint)
        except UserError:
            if found.checkpoint is None or found.checkpoint.exists():
                raise


def save(directory: str | Path, model: nnx.Module, tokenizer: Tokenizer, settings: EncoderSettings) -> None:
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
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    sums = jax.device_get(jax.jit(array_checksums.of_tree)(params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((aside / "params").resolve(), params, force=True)
    if first:
        sums = {name: int(value) for name, value in sums.items()}
        _describe_written(aside, model.config, tokenizer, settings, sums)
        move_tree(aside, directory)
    multihost_utils.sync_global_devices("the model is written")


def fingerprint_of(model: nnx.Module, tokenizer: Tokenizer, settings: EncoderSettings) -> str:
    """Returns the fingerprint that `load` gives a model once it is saved."""
    params = stored.params_of(model)
    return stored.fingerprint(
        StoredModel(config=model.config, params=params, tokenizer=tokenizer, settings=settings)
    )


def read(
    spec: str, *, tokenizer: str | None = None, kind: str | None = "dual_encoder", weights: bool = True
) -> tuple[StoredModel, str | None]:
    """Opens a model; the second value is its fingerprint, where the files say it.

    Args:
      spec: as `load` takes it.
      tokenizer: of a model that has none of its own (see `t5x.read`).
      kind: which kind of model it must be, one of `kinds.KINDS`; None: what the files say it is.
      weights: whether the parameters' values count; where not, an encoder of `hf:` needs none.

    Raises:
      UserError: there is no such model, one of its files is missing or damaged, it has a tokenizer, or is of
        another kind.
    """
    found, fingerprint = _read(spec, tokenizer, kind, weights)
    if kind not in (None, kinds.name_of(found.config)):
        raise UserError(f"{spec} is {kinds.of(found.config).what}; {kinds.KINDS[kind].what} is wanted")
    return found, fingerprint


def _read(
    spec: str, tokenizer: str | None, kind: str | None, weights: bool
) -> tuple[StoredModel, str | None]:
    form, separator, name = str(spec).partition(":")
    if separator and form in FORMS and not name:
        raise UserError(
            f"{spec} names no model: write {' or '.join(f'{form}:{what}' for what in FORMS[form])}"
        )
    if separator and form == "t5x":
        return t5x.read(name, tokenizer=tokenizer, generator=kind == "seq2seq"), None
    if tokenizer is not None:
        raise UserError(f"{spec} has a tokenizer of its own: another one is for t5x: checkpoints only")
    if separator and form == "w2v":
        return word_vector_files.read(name), None
    if separator and form in ("st", "hf"):
        return named.read(form, name, kind, weights=weights), None
    directory = path_of(spec)
    check_bucket(directory)
    if not directory.is_dir():
        raise UserError(
            f"{spec}: no such model directory; models of Hugging Face and sentence-transformers are written"
            " hf:NAME and st:NAME, T5X checkpoints t5x:DIR, files of word vectors w2v:FILE"
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
    from jaxir.interop.weights import streaming  # Orbax takes a second

    if is_bucket(directory):
        with _in_bucket(directory) as place:
            sums = streaming.write_params(place / "params", stored.nest(model.params))
            # Of what was read, which may lie on this disk: what was written would have to come back.
            of_params = {"fingerprint": stored.fingerprint(model), "sums": sums}
            write_description(place, model.config, model.tokenizer, model.settings, **of_params)
        return
    with atomic_directory(directory) as aside:
        sums = streaming.write_params(aside / "params", stored.nest(model.params))
        _describe_written(aside, model.config, model.tokenizer, model.settings, sums)


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
    directory: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    settings: EncoderSettings,
    sums: Mapping[str, int],
) -> None:
    """Writes all but the parameters; these are there, and are read part by part for the fingerprint."""
    params = _read_params(directory / "params", sums)
    model = StoredModel(config=config, params=params, tokenizer=tokenizer, settings=settings)
    of_params = {"fingerprint": stored.fingerprint(model), "sums": sums}
    write_description(directory, config, tokenizer, settings, **of_params)


def write_description(
    directory: str | Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    settings: EncoderSettings,
    *,
    fingerprint: str | None = None,
    sums: Mapping[str, int] | None = None,
) -> None:
    """Writes `jaxir.json` and `tokenizer/` into `directory`: all of a model but its parameters.

    A training run calls it once, before its first checkpoint, and gives neither the fingerprint nor the
    checksums of parameters, which its checkpoints have.
    """
    directory = path_of(directory)
    tokenizer.save(directory / "tokenizer")
    content = {
        "format": FORMAT,
        **model_json.describe(config, settings),
        "fingerprint": fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "checksums": sums,
    }
    write_json(directory / CONFIG, sealed(content))


def _read_jaxir(directory: Path) -> tuple[StoredModel, str | None]:
    path = directory / CONFIG
    content = read_json(path)
    if require(content, "format", path) != FORMAT:
        raise UserError(
            f"{path}: format {content['format']} is not {FORMAT}: it was written by another version"
        )
    config, settings = model_json.parse(content, path)
    check_seal(content, path)
    while True:
        checkpoint = checkpoint_of(directory)
        try:
            params = _params_of(directory, checkpoint, content)
            break
        except UserError:
            if checkpoint is None or checkpoint.exists():
                raise  # else its trainer has a later one
    tokenizer = Tokenizer.load(directory / "tokenizer")
    if content.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(f"{directory / 'tokenizer'} is damaged: not what was written there")
    model = StoredModel(
        config=config, params=params, tokenizer=tokenizer, settings=settings, checkpoint=checkpoint
    )
    stored.check_params(params, stored.model_shapes(config), str(directory))
    return model, content.get("fingerprint")


def _params_of(directory: Path, checkpoint: Path | None, content: Mapping[str, Any]) -> dict[str, Any]:
    """Opens the parameters of a model directory, or of the checkpoint that a run's stands for."""
    if checkpoint is not None:
        return _read_params(checkpoint / "params", _sums_of(checkpoint, "params"))
    return _read_params(directory / "params", content.get("checksums"))


def read_auxiliary(run: str | Path) -> dict[str, Any]:
    """Opens what a run's objective learnt beside the model, of the checkpoint that the run stands for.

    Returns:
      The arrays by their dotted names; they are read when they are asked for.

    Raises:
      UserError: it is no run, its objective had nothing beside the model, or a file is damaged.
    """
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise UserError(f"{run} is no run: it has nothing beside the model")
    if not (checkpoint / "auxiliary").is_dir():
        raise UserError(f"{run}: its objective learnt nothing beside the model")
    return _read_arrays(checkpoint / "auxiliary", _sums_of(checkpoint, "auxiliary"), "the auxiliary")


def _sums_of(checkpoint: Path, item: str) -> Mapping[str, int] | None:
    return (read_record(checkpoint).get("checksums") or {}).get(item)


def _read_params(directory: Path, sums: Mapping[str, int] | None) -> dict[str, Any]:
    return stored.canonical(_read_arrays(directory, sums, "the parameters"))


def _read_arrays(directory: Path, sums: Mapping[str, int] | None, what: str) -> dict[str, Any]:
    """Opens what Orbax wrote, by TensorStore: on a damaged file Orbax's own threads print tracebacks."""
    index = stores.read(str(directory), stores.ORBAX_INDEX)
    if index is None:
        raise UserError(f"{directory / stores.ORBAX_INDEX}: no such file")
    specs = {".".join(keys): spec for keys, spec in stores.orbax_specs(str(directory), index).items()}
    return stores.open_arrays(f"{directory}: {what} cannot be read", specs, sums)

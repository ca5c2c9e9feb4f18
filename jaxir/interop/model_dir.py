"""Opens models by name: jaxir directories, runs, `hf:`, `st:`, `t5x:`, and `w2v:` for word vectors.

A name without a prefix that is no local path is a name on the hub (`named.prefixed`).

A model directory holds `jaxir.json` (architecture, lengths, prompts, fingerprint, checksums), `tokenizer/`
and `params/` (Orbax). In a bucket, which has no renames, `jaxir.json` is written last and marks a complete
model. A run directory has `checkpoints/STEP/params/` instead of `params/`. Opening a run opens its best
checkpoint, or its latest if none was evaluated. Parameters are compared with their checksums while they are
read, unless a process reads only its own part of them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx, traverse_util
from jax.experimental import multihost_utils

from jaxir.core.errors import UserError
from jaxir.core.platforms import check_devices
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import t5x, word_vector_files
from jaxir.interop.huggingface import hf_hybrid_encoder, hf_sparse_encoder, named
from jaxir.interop.model import identity, kinds, lora, model_json, stored, stored_arrays
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.overrides import CommonOverrides, Overrides
from jaxir.interop.model.stored import Base, LoadedModel, ModelConfig, StoredModel
from jaxir.interop.model.stored_run import CONFIG, check_seal, checkpoint_of, sealed, sums_of
from jaxir.interop.weights import array_checksums
from jaxir.interop.weights.notes import note
from jaxir.interop.weights.weights import read_json, require, write_json
from jaxir.models.sparse_encoder import SparseEncoderConfig
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

T = TypeVar("T")

UNFINISHED = "UNFINISHED"  # a file in a bucket that marks a model as not completely written
QUERIES = "queries"  # the directory of a sparse encoder's model of queries
FORMAT = 1  # version of the format of jaxir.json
# Prefixes of models in other formats, and what may follow the colon of each prefix.
FORMS = {"t5x": ("DIR",), "st": ("DIR", "NAME"), "hf": ("DIR", "NAME"), "w2v": ("FILE",)}


def load(
    spec: str,
    *,
    kind: str | None = "dual_encoder",
    mesh: Partitioner | None = None,
    seed: int = 0,
    halved: bool = False,
    **overrides: Any,
) -> LoadedModel:
    """Loads a model.

    Args:
      spec: a jaxir model directory or run directory, local or gs://; `hf:` or `st:` and a local directory
        or a name on the hub, with an optional @REVISION; a name on the hub without a prefix; `t5x:` and a T5X
        checkpoint or run, local or gs://; `w2v:` and a file of word vectors. A dual encoder from `hf:`,
        `t5x:` or `w2v:` has mean pooling, cosine similarity and at most 512 tokens by default.
      kind: the required kind of model, one of `kinds.KINDS`; None accepts any kind.
      mesh: the devices that hold the parameters; None for the default device.
      seed: seed of the random weights of a projection that `overrides` adds.
      halved: whether to keep in bfloat16 what is computed in bfloat16 (`stored.build`).
      **overrides: changes to the model: fields of `overrides.Overrides` if `kind` is dual encoder, else of
        `overrides.CommonOverrides`.

    Raises:
      UserError: there is no such model, a file is missing or damaged, the model is of another kind, or an
        override does not fit the model.
    """
    check_devices()
    changes = Overrides(**overrides) if kind == "dual_encoder" else CommonOverrides(**overrides)

    def build(found: StoredModel, fingerprint: str | None) -> LoadedModel:
        queries = None if found.queries is None else build(found.queries, None)
        model = changes.apply(found, seed=seed, where=spec)
        if fingerprint is None or changes.change_outputs():
            fingerprint = identity.fingerprint_once(model, same=model.params is found.params)
        fingerprint = identity.quantized_fingerprint(fingerprint, model.weights)
        step = None if found.checkpoint is None else int(found.checkpoint.name)
        built = stored.build(lora.merged(model), mesh, halved=halved)
        return LoadedModel(built, model.tokenizer, model.settings, fingerprint, step, queries=queries)

    return read_with(build, spec, tokenizer=overrides.get("tokenizer"), kind=kind)


def read_with(
    build: Callable[[StoredModel, str | None], T],
    spec: str,
    *,
    tokenizer: str | None = None,
    kind: str | None = "dual_encoder",
    weights: bool = True,
) -> T:
    """Returns `build(*read(...))`; reads and builds again if a trainer replaced the checkpoint meanwhile."""
    while True:
        found, fingerprint = read(spec, tokenizer=tokenizer, kind=kind, weights=weights)
        try:
            return build(found, fingerprint)
        except UserError:
            if found.checkpoint is None or found.checkpoint.exists():
                raise


def save(
    directory: str | Path,
    model: nnx.Module,
    tokenizer: Tokenizer,
    settings: EncoderSettings,
    *,
    queries: StoredModel | None = None,
) -> None:
    """Writes a model directory, which appears only when complete. `queries` is the model of queries, if any.

    If the model is spread over the devices of several processes, every process must call this, with the same
    directory on a shared file system. Each process writes its own part of the parameters.
    """
    if jax.process_count() == 1:
        whole = stored_model(model, tokenizer, settings, stored.params_of(model))
        write(directory, dataclasses.replace(whole, queries=queries))
        return
    if queries is not None:
        raise UserError("several processes cannot save an encoder with two models: save it in one process")
    import orbax.checkpoint as ocp

    if is_bucket(directory):
        raise UserError(f"{directory}: several processes cannot write to a bucket; give a shared directory")
    first, directory = jax.process_index() == 0, Path(directory)
    temporary = directory.with_name(f".{directory.name}.part")
    free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not multihost_utils.broadcast_one_to_all(np.array(free)):
        raise UserError(f"{directory} already exists; give another output or remove it first")
    if first:
        remove_tree(temporary)
    multihost_utils.sync_global_devices("the directory of the model is free")
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    sums = jax.device_get(jax.jit(array_checksums.of_tree)(params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((temporary / "params").resolve(), params, force=True)
    if first:
        sums = {name: int(value) for name, value in sums.items()}
        written = stored_arrays.read_params(temporary / "params", sums)
        _describe(temporary, stored_model(model, tokenizer, settings, written), sums)
        move_tree(temporary, directory)
    multihost_utils.sync_global_devices("the model is written")


def fingerprint_of(model: nnx.Module, tokenizer: Tokenizer, settings: EncoderSettings) -> str:
    """Returns the fingerprint that the model has once it is saved and loaded."""
    return identity.fingerprint(stored_model(model, tokenizer, settings, stored.params_of(model)))


def stored_model(
    model: nnx.Module, tokenizer: Tokenizer, settings: EncoderSettings, params: Mapping[str, Any]
) -> StoredModel:
    """Returns a module with its parameters by name, tokenizer and settings as a model on disk."""
    return StoredModel(config=model.config, params=params, tokenizer=tokenizer, settings=settings)


def read(
    spec: str, *, tokenizer: str | None = None, kind: str | None = "dual_encoder", weights: bool = True
) -> tuple[StoredModel, str | None]:
    """Opens a model. Returns the model and its fingerprint; None if its files have no fingerprint.

    Args:
      spec: the model's directory or name, in the forms that `load` accepts.
      tokenizer: the tokenizer of a `t5x:` checkpoint, which has none (see `t5x.read`); else None.
      kind: the required kind of model, one of `kinds.KINDS`; None accepts any kind.
      weights: whether the parameters' values are needed. If False, an `hf:` encoder needs no weight files.
    """
    found, fingerprint = _read(spec, tokenizer, kind, weights)
    alone = hf_hybrid_encoder.view(found, kind)
    if alone is not found:
        found, fingerprint = alone, None
    if kind not in (None, kinds.name_of(found.config)):
        raise UserError(f"{spec} is {kinds.of(found.config).what}; expected {kinds.KINDS[kind].what}")
    return found, fingerprint


def kind_of(spec: str) -> str:
    """Returns the kind of a model, one of `kinds.KINDS`, as `read` finds it if no kind is required."""
    return kinds.name_of(read(spec, kind=None, weights=False)[0].config)


def _read(
    spec: str, tokenizer: str | None, kind: str | None, weights: bool
) -> tuple[StoredModel, str | None]:
    form, separator, name = str(spec).partition(":")
    form = form if separator else ""
    if form in FORMS and not name:
        raise UserError(
            f"{spec} names no model: write {' or '.join(f'{form}:{what}' for what in FORMS[form])}"
        )
    if form == "t5x":
        return t5x.read(name, tokenizer=tokenizer, generator=kind == "seq2seq"), None
    if tokenizer is not None:
        raise UserError(
            f"{spec} has its own tokenizer: a tokenizer can only be given for t5x: models; omit it"
        )
    if form == "w2v":
        return word_vector_files.read(name), None
    if form in ("st", "hf"):
        return named.read(form, name, kind, weights=weights), None
    directory = path_of(spec)
    check_bucket(directory)
    if not directory.is_dir():
        return _read_unprefixed(str(spec), kind, weights)
    if _half_written(directory):
        raise UserError(
            f"{directory}: this model is incomplete; wait for the process that writes it, or write it again"
        )
    if not (directory / CONFIG).is_file():
        known = (("st", "modules.json"), ("hf", "config.json"))
        form = next((form for form, name in known if (directory / name).is_file()), None)
        hint = f"; write {form}:{directory}" if form else ", so it is not a jaxir model; give another one"
        raise UserError(f"{directory}: no {CONFIG} in it{hint}")
    return _read_jaxir(directory)


def _read_unprefixed(spec: str, kind: str | None, weights: bool) -> tuple[StoredModel, str | None]:
    """Opens a model by its name on the hub, without st: or hf:."""
    try:
        prefixed = named.prefixed(spec)
        if prefixed is not None:
            return _read(prefixed, None, kind, weights)
    except UserError as error:
        raise UserError(f"{spec}: no such model directory; as a name on the hub: {error}") from error
    raise UserError(
        f"{spec}: no such model directory; write hf:NAME for a model of Hugging Face, st:NAME for one of"
        " sentence-transformers, t5x:DIR for a T5X checkpoint, w2v:FILE for word vectors"
    )


def absolute(spec: str) -> str:
    """Returns a model's name that means the same in every working directory, with its prefix."""
    form, separator, name = spec.partition(":") if spec.partition(":")[0] in FORMS else ("", "", spec)
    if not is_bucket(name) and Path(name).exists():
        return f"{form}{separator}{Path(name).resolve()}"
    return spec if form else named.prefixed(spec) or spec


def check_output(directory: str | Path) -> None:
    """Checks, without changing anything, that a model can be written to a directory, local or gs://."""
    directory = path_of(directory)
    check_bucket(directory, writing=True)
    if not _half_written(directory):
        check_free(directory)


def write(directory: str | Path, model: StoredModel) -> None:
    """Writes a model directory, local or gs://, with adapters merged; readers refuse it until it is whole."""
    from jaxir.interop.weights import streaming  # imported here, because Orbax takes a second to import

    model = lora.merged(model)
    in_bucket = is_bucket(directory)
    with _in_bucket(directory) if in_bucket else atomic_directory(directory) as place:
        parts = [(place, model)]
        if model.queries is not None:
            parts.insert(0, (place / QUERIES, lora.merged(model.queries)))
        for folder, part in parts:
            sums = streaming.write_params(
                folder / "params", traverse_util.unflatten_dict(dict(part.params), sep=".")
            )
            if not in_bucket:  # reading the local copy again is faster than reading the source
                part = dataclasses.replace(part, params=stored_arrays.read_params(folder / "params", sums))
            _describe(folder, part, sums)


def _describe(place: Path, model: StoredModel, sums: Mapping[str, int]) -> None:
    of_params = {"fingerprint": identity.fingerprint(model), "sums": sums}
    queries = None if model.queries is None else identity.fingerprint(model.queries)
    write_description(place, model.config, model.tokenizer, model.settings, **of_params, queries=queries)


@contextlib.contextmanager
def _in_bucket(directory: str | Path) -> Iterator[Path]:
    """Yields the path of a new model in a bucket. On any error, removes everything at that path."""
    check_output(directory)
    place = path_of(directory)
    if _half_written(place):
        note(f"note: {place} holds an unfinished model, which is replaced")
        place.rmtree()
    try:
        with atomic_file(place / UNFINISHED) as file:
            file.write("This is not a model: writing it was interrupted, or is not finished.\n")
        yield place
        (place / UNFINISHED).unlink()
    except BaseException:
        remove_tree(place)
        raise


def _half_written(place: Path) -> bool:
    return is_bucket(place) and (place / UNFINISHED).exists() and not (place / CONFIG).exists()


def write_description(
    directory: str | Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    settings: EncoderSettings,
    *,
    fingerprint: str | None = None,
    sums: Mapping[str, int] | None = None,
    base: Base | None = None,
    queries: str | None = None,
) -> None:
    """Writes `jaxir.json` and `tokenizer/`: everything of a model except its parameters.

    A training run calls it once, before its first checkpoint, without the fingerprint and the checksums:
    these depend on the parameters, and so on the checkpoint. `queries` is the fingerprint of the model of
    queries in `queries/`.
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
    if base is not None:
        content["base"] = base._asdict()
    if queries is not None:
        content["queries"] = queries
    write_json(directory / CONFIG, sealed(content))


def _read_jaxir(directory: Path) -> tuple[StoredModel, str | None]:
    path = directory / CONFIG
    content = read_json(path)
    if require(content, "format", path) != FORMAT:
        raise UserError(
            f"{path}: format {content['format']}, but this jaxir reads {FORMAT}; use the jaxir that wrote it"
        )
    config, settings = model_json.parse(content, path)
    check_seal(content, path)
    while True:
        checkpoint = checkpoint_of(directory)
        try:
            if checkpoint is None:
                params = stored_arrays.read_params(directory / "params", content.get("checksums"))
            else:
                params = stored_arrays.read_params(checkpoint / "params", sums_of(checkpoint, "params"))
            break
        except UserError:
            if checkpoint is None or checkpoint.exists():
                raise  # otherwise the trainer has replaced this checkpoint by a later one
    tokenizer = Tokenizer.load(directory / "tokenizer")
    if content.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(f"{directory / 'tokenizer'} is damaged: it has changed; copy the model again")
    shapes = stored.model_shapes(config)
    base = Base(**content["base"]) if "base" in content else None
    if base is not None:
        params = lora.completed(params, shapes, _read_base(base, config, directory))
    model = StoredModel(
        config=config, params=params, tokenizer=tokenizer, settings=settings, checkpoint=checkpoint, base=base
    )
    stored.check_params(params, shapes, str(directory))
    if content.get("queries") is not None:
        queries, fingerprint = _read_jaxir(directory / QUERIES)
        if fingerprint != content["queries"]:
            raise UserError(f"{directory / QUERIES} is not the model of queries that {path} names; copy both")
        model = dataclasses.replace(model, queries=queries)
    return model, content.get("fingerprint")


def _read_base(base: Base, config: ModelConfig, directory: Path) -> Mapping[str, Any]:
    """Returns the parameters of the model that a run's adapters change."""
    kind = kinds.name_of(config)
    # A model with another head may start from a dual encoder.
    kind = kind if kind in ("dual_encoder", "seq2seq") else None
    try:
        if isinstance(config, SparseEncoderConfig):
            kind = hf_sparse_encoder.kind_of_start(base.spec)
        found, _ = read(base.spec, tokenizer=base.tokenizer, kind=kind)
    except UserError as error:
        raise UserError(f"{directory} adapts {base.spec} (LoRA), which cannot be read: {error}") from error
    params = lora.merged(found).params
    if base.digest not in (None, lora.digest_of(params)):
        raise UserError(
            f"{directory} adapts {base.spec} (LoRA), whose weights are not those that it was trained on: put"
            " that model there again"
        )
    return params

"""Converts T5X checkpoints, local or in a bucket, to models and back, without T5X.

A checkpoint holds only parameters: no tokenizer, lengths or prompts. The architecture is inferred from the
shapes of the parameters (see `names.interpret`).
"""

import dataclasses
import re
from pathlib import Path

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.t5x import checkpoint_files as t5x_files
from jaxir.interop.t5x import names as t5x_names
from jaxir.interop.weights import stores
from jaxir.interop.weights.notes import note
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.models.t5 import T5Config
from jaxir.storage.checksums import write_all
from jaxir.storage.files import atomic_directory, check_bucket, check_free, is_bucket, path_of
from jaxir.storage.temporary_outputs import temporary_directory

PREFIX = "t5x:"
_LENGTH = 512  # default maximum number of tokens per text
# Finds the SentencePiece model in T5X's gin files and a run's config.gin, where a backslash precedes a long
# value on its own line.
_VOCABULARY = re.compile(r"^\s*[\w./]*\bsentencepiece_model_file\s*=[\s\\]*['\"]([^'\"]+)['\"]", re.M)


def start_from(*, default: str, model: str | None = None, initial_checkpoint_path: str | None = None) -> str:
    """Returns the model that a run starts from, in a form that `model_dir.load` accepts.

    Args:
      default: the model to use if neither of the other arguments is given.
      model: a model of any kind.
      initial_checkpoint_path: a T5X checkpoint; named like T5X's gin macro.
    """
    if model is not None and initial_checkpoint_path is not None:
        raise UserError(
            f"MODEL ({model}) and INITIAL_CHECKPOINT_PATH ({initial_checkpoint_path}) are both given:"
            " keep the one to start from"
        )
    if initial_checkpoint_path is not None:
        return f"{PREFIX}{initial_checkpoint_path.removeprefix(PREFIX)}"
    return default if model is None else model


def read(directory: str, *, tokenizer: str | None = None, generator: bool = False) -> StoredModel:
    """Opens the dual encoder or generator of a checkpoint; prints on standard error what is left out.

    Args:
      directory: a `checkpoint_STEP`, or a run, whose newest checkpoint is read; local or gs://BUCKET/PATH.
      tokenizer: a SentencePiece model or a directory with a tokenizer. By default the tokenizer that jaxir's
        export wrote beside the checkpoint, else the SentencePiece model that the run's config.gin names.
      generator: whether to open the encoder with its decoder, as a generator.
    """
    where, model, left_out = _open(directory, generator=generator)
    loaded = _tokenizer(tokenizer, where)
    vocab_size = model.config.backbone.vocab_size
    if loaded.pad_swap is not None:
        raise UserError(
            f"{where}: this tokenizer pads with id {loaded.pad_swap}, but T5X with 0: give another tokenizer"
        )
    if loaded.vocab_size > vocab_size:
        raise UserError(
            f"{where}: this tokenizer has {loaded.vocab_size} ids, the model only {vocab_size}: give another"
            " tokenizer"
        )
    if 2 * loaded.vocab_size < vocab_size:
        note(
            f"warning: {where}: this tokenizer has {loaded.vocab_size:,} ids, the model {vocab_size:,}:"
            " check that the model was trained with this tokenizer"
        )
    if left_out:
        note(f"note: {where}: the decoder ({len(left_out)} arrays) is left out")
    return dataclasses.replace(model, tokenizer=loaded)


def describe(
    directory: str, *, generator: bool = False
) -> tuple[DualEncoderConfig | Seq2SeqConfig, EncoderSettings]:
    """Returns the configuration and settings that `read` would give, without reading parameters."""
    _, model, _ = _open(directory, generator=generator)
    return model.config, model.settings


def _open(directory: str, *, generator: bool) -> tuple[Path, StoredModel, list[str]]:
    found = t5x_files.find(directory)
    paths, left_out = t5x_names.wanted(found.leaves.keys(), str(found.where), generator=generator)
    interpret = t5x_names.interpret_generator if generator else t5x_names.interpret
    config, params = interpret(found.open(paths), str(found.where))
    settings = EncoderSettings(query_max_length=_LENGTH, passage_max_length=_LENGTH)
    if generator:
        settings = EncoderSettings.of_generator(_LENGTH)
    model = StoredModel(config=config, params=params, tokenizer=None, settings=settings)
    return found.where, model, left_out


def write(
    output: str | Path,
    model: StoredModel,
    *,
    step: int = 0,
    slots: dict[str, dict[str, np.ndarray]] | None = None,
) -> None:
    """Writes `output`/checkpoint_STEP, which T5X restores, and `output`/tokenizer, which T5X ignores.

    A local `output` appears only when complete. In a bucket the index is written last; T5X ignores a
    checkpoint without an index. `slots` is Adafactor's state by canonical name (see `optimizer.read`), which
    T5X needs to continue a training.
    """
    _check(model)
    paths = t5x_names.paths_of(model.config)
    names = {path: name for name, path in paths.items()} | t5x_names.copies_of(model.config)
    target = {path: t5x_names.oriented(name, model.params[name]) for path, name in names.items()}
    states = None
    if slots is not None:
        states = {p: {s: t5x_names.oriented(n, x) for s, x in slots[n].items()} for p, n in names.items()}
    external = [path for path in target if t5x_names.in_zarr(path)]
    if is_bucket(output):
        place = path_of(output)
        check_bucket(place, writing=True)
        check_free(place)
        model.tokenizer.save(place / "tokenizer")
        t5x_files.write(place / f"checkpoint_{step}", step, target, external=external, slots=states)
        return
    with atomic_directory(output) as temporary:
        t5x_files.write(temporary / f"checkpoint_{step}", step, target, external=external, slots=states)
        write_all(temporary / f"checkpoint_{step}")
        model.tokenizer.save(temporary / "tokenizer")


def _check(model: StoredModel) -> None:
    """Refuses models that would give other outputs in T5X with the same parameters."""
    config, backbone = model.config, model.config.backbone
    t5x_names.check_kind(config)
    fixed = T5Config(activation="gelu_tanh" if backbone.gated else "relu")
    for field in ("activation", "relative_max_distance", "layer_norm_epsilon"):
        theirs, ours = getattr(fixed, field), getattr(backbone, field)
        if theirs != ours:
            raise UserError(f"{field} is {theirs!r} in T5X, but {ours!r} in this model: use another format")
    settings = model.settings
    prompts = (settings.query_prompt, settings.passage_prompt, *settings.unused_prompts)
    lost = ["prompts"] if any(prompts) else []
    if isinstance(config, Seq2SeqConfig):
        if config.tied != config.scaled:
            raise UserError(
                "T5X scales outputs before the token table, but this model does not: use --format=hf"
            )
        if config.eos_id != 1:
            raise UserError(
                f"T5's texts end with token 1, but this model's with {config.eos_id}: use --format=hf"
            )
    else:
        if config.pooling != "mean":
            raise UserError(
                f"T5X Retrieval pools by the mean, but this model by {config.pooling!r}: use --format=st"
            )
        if config.projection is not None and config.projection.activation != "identity":
            raise UserError(
                f"T5X Retrieval has no {config.projection.activation} after projections: use --format=st"
            )
        if config.similarity == "dot":
            lost.insert(0, "similarity dot (in T5X, bind l2_norm_factory to None)")
    if lost:
        note(f"note: a T5X checkpoint does not store this model's {' and '.join(lost)}")


def _tokenizer(given: str | None, where: Path) -> Tokenizer:
    if given is not None:
        return _load_tokenizer(given)
    run = where.parent.parent if where.name == "state" else where.parent
    if (run / "tokenizer").is_dir():
        return Tokenizer.load(run / "tokenizer")
    config = stores.read(run / "config.gin")
    if config is not None and (named := _VOCABULARY.search(config.decode(errors="replace"))):
        return _load_tokenizer(named[1])
    raise UserError(
        f"{where}: a T5X checkpoint has no tokenizer, and none is beside it: convert it with"
        " --tokenizer=MODEL (in a recipe TOKENIZER), the SentencePiece model of its training; T5's is"
        " gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
    )


def _load_tokenizer(given: str) -> Tokenizer:
    path = t5x_files.local_or_bucket(given)
    if path.is_dir():
        return Tokenizer.load(path)
    content = stores.read(path)
    if content is None:
        raise UserError(f"{path}: no such tokenizer: give a SentencePiece model or a directory")
    with temporary_directory() as copy:
        (copy / "spiece.model").write_bytes(content)
        try:
            return Tokenizer.load(copy)
        except UserError as error:
            raise UserError(str(error).replace(f"{copy}/spiece.model", str(path))) from error

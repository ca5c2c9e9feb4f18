"""T5X checkpoints, local or in a bucket, to models and back, without T5X.

A checkpoint holds parameters and nothing else: no tokenizer, lengths or prompts, and of the architecture only
what shapes say (see `t5x_names.interpret`).
"""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.t5x import checkpoint_files as t5x_files
from jaxir.interop.t5x import names as t5x_names
from jaxir.interop.weights import stores
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.models.t5 import T5Config
from jaxir.storage.checksums import write_all
from jaxir.storage.files import atomic_directory, is_bucket
from jaxir.storage.temporary_outputs import temporary_directory

PREFIX = "t5x:"
_LENGTH = 512
# How T5X's gin files, and the config.gin that it writes into a run, name the vocabulary.
# A long value stands on a line of its own, after a backslash.
_VOCABULARY = re.compile(r"^\s*[\w./]*\bsentencepiece_model_file\s*=[\s\\]*['\"]([^'\"]+)['\"]", re.M)


def start_from(*, default: str, model: str | None = None, initial_checkpoint_path: str | None = None) -> str:
    """Returns what a run starts from, as `model_dir.load` takes it.

    Args:
      default: where neither of the others is given.
      model: a model of any kind.
      initial_checkpoint_path: a T5X checkpoint, named as T5X's own gin macro is.

    Raises:
      UserError: both are given.
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
    """Opens the encoder or dual encoder of a checkpoint; what is left out of it is named on standard error.

    Args:
      directory: a `checkpoint_STEP` or a run with several, of which the newest is taken; a local path or
        gs://BUCKET/PATH.
      tokenizer: a SentencePiece model (a local file or gs://...) or a directory with a tokenizer. By default
        what an export of this toolkit has put beside the checkpoint, else what the run's config.gin names.
      generator: open the encoder with its decoder.

    Raises:
      UserError: there is no checkpoint, it is damaged, it holds no such model, or there is no tokenizer.
    """
    found, model, left_out = _open(directory, generator=generator)
    loaded = _tokenizer(tokenizer, found.where)
    vocab_size = model.config.backbone.vocab_size
    if loaded.pad_swap is not None:
        raise UserError(f"{found.where}: this tokenizer pads with id {loaded.pad_swap}, and T5X with 0")
    if loaded.vocab_size > vocab_size:
        raise UserError(
            f"{found.where}: this tokenizer has {loaded.vocab_size} ids, the model only {vocab_size}"
        )
    if 2 * loaded.vocab_size < vocab_size and jax.process_index() == 0:
        print(
            f"warning: {found.where}: this tokenizer has {loaded.vocab_size:,} ids, the model {vocab_size:,}:"
            " is it that of its training?",
            file=sys.stderr,
        )
    if left_out and jax.process_index() == 0:
        print(f"note: {found.where}: the decoder ({len(left_out)} arrays) is left out", file=sys.stderr)
    return dataclasses.replace(model, tokenizer=loaded)


def describe(
    directory: str, *, generator: bool = False
) -> tuple[DualEncoderConfig | Seq2SeqConfig, EncoderSettings]:
    """Returns what `read` would read, without a tokenizer and without reading more than shapes.

    Raises:
      UserError: there is no checkpoint, it is damaged, or it holds no such model.
    """
    _, model, _ = _open(directory, generator=generator)
    return model.config, model.settings


def _open(directory: str, *, generator: bool = False) -> tuple[t5x_files.Checkpoint, StoredModel, list[str]]:
    found = t5x_files.find(directory)
    paths, left_out = t5x_names.wanted(found.leaves.keys(), found.where, generator=generator)
    interpret = t5x_names.interpret_generator if generator else t5x_names.interpret
    config, params = interpret(found.open(paths), found.where)
    settings = EncoderSettings(query_max_length=_LENGTH, passage_max_length=_LENGTH)
    if generator:
        settings = EncoderSettings.of_generator(_LENGTH)
    return found, StoredModel(config=config, params=params, tokenizer=None, settings=settings), left_out


def write(
    output: str | Path,
    model: StoredModel,
    *,
    step: int = 0,
    slots: dict[str, dict[str, np.ndarray]] | None = None,
) -> None:
    """Writes `output`/checkpoint_STEP, which T5X restores, and `output`/tokenizer, which it does not need.

    A local `output` appears only when whole. In a bucket the index is written last, and a checkpoint without
    one does not exist for T5X.

    Args:
      output: a local directory or gs://BUCKET/PATH; it must not exist or be empty.
      model: a dual encoder with T5 towers, or a generator; its parameters may still be in their files.
      step: the number of finished steps.
      slots: Adafactor's slots by canonical name (see `t5x_optimizer.read`), for a full restore.

    Raises:
      UserError: T5X has no such model, `output` is not empty, or it cannot be written.
    """
    _check(model)
    paths = t5x_names.paths_of(model.config)
    names = {path: name for name, path in paths.items()} | t5x_names.copies_of(model.config)
    target = {path: t5x_names.turned(name, model.params[name]) for path, name in names.items()}
    states = None if slots is None else {path: _turned_slots(n, slots[n]) for path, n in names.items()}
    beside = [path for path in target if t5x_names.in_zarr(path)]

    def fill(root: str) -> None:
        t5x_files.write(f"{root}/checkpoint_{step}", step, target, beside=beside, slots=states)

    if is_bucket(output):
        root = stores.tidy(str(output))
        if stores.names(root):
            raise UserError(f"{root} already exists; give another output or remove it first")
        model.tokenizer.save(f"{root}/tokenizer")
        fill(root)
        return
    with atomic_directory(output) as aside:
        fill(str(aside))
        write_all(aside / f"checkpoint_{step}")
        model.tokenizer.save(aside / "tokenizer")


def _turned_slots(name: str, slots: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns Adafactor's slots of a parameter as T5X has them: vectors go by the lengths of its axes."""
    return {slot: t5x_names.turned(name, value) for slot, value in slots.items()}


def _check(model: StoredModel) -> None:
    """Raises a UserError where T5X would compute something else with these parameters."""
    config, backbone = model.config, model.config.backbone
    t5x_names.check_kind(config)
    fixed = T5Config(activation="gelu_tanh" if backbone.gated else "relu")
    for field in ("activation", "relative_max_distance", "layer_norm_epsilon"):
        theirs, ours = getattr(fixed, field), getattr(backbone, field)
        if theirs != ours:
            raise UserError(f"{field} is {theirs!r} in T5X, and {ours!r} in this model")
    settings = model.settings
    prompts = (settings.query_prompt, settings.passage_prompt, *settings.unused_prompts)
    lost = ["prompts"] if any(prompts) else []
    if isinstance(config, Seq2SeqConfig):
        if config.tied != config.scaled:
            raise UserError("T5X scales what it multiplies with the token table, and this model does not")
        if config.eos_id != 1:
            raise UserError(f"T5's texts end with token 1, and this model's with {config.eos_id}")
    else:
        if config.pooling != "mean":
            raise UserError(f"T5X Retrieval pools by the mean, and this model by {config.pooling!r}")
        if config.projection is not None and config.projection.activation != "identity":
            raise UserError(f"T5X Retrieval has no {config.projection.activation} after the projection")
        if config.similarity == "dot":
            lost.insert(0, "similarity dot (bind l2_norm_factory to None there)")
    if lost:
        print(f"note: a T5X checkpoint does not say this model's {' and '.join(lost)}", file=sys.stderr)


def _tokenizer(given: str | None, where: str) -> Tokenizer:
    if given is not None:
        return _load_tokenizer(given)
    run = where.removesuffix("/state").rpartition("/")[0]
    beside = f"{run}/tokenizer" if run else "tokenizer"
    if stores.names(beside):
        return Tokenizer.load(beside)
    config = stores.read(run, "config.gin")
    if config is not None and (named := _VOCABULARY.search(config.decode(errors="replace"))):
        return _load_tokenizer(named[1])
    raise UserError(
        f"{where}: a T5X checkpoint has no tokenizer, and none is beside it: convert it with"
        " --tokenizer=MODEL (in a recipe TOKENIZER), the SentencePiece model of its training; T5's is"
        " gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
    )


def _load_tokenizer(path: str) -> Tokenizer:
    path = stores.tidy(path)
    if not stores.is_bucket(path) and Path(path).is_dir():
        return Tokenizer.load(path)
    directory, _, name = path.rpartition("/")
    content = stores.read(directory or ".", name)
    if content is None:
        raise UserError(f"{path}: no such tokenizer: neither a SentencePiece model nor a directory")
    with temporary_directory() as copy:
        (copy / "spiece.model").write_bytes(content)
        try:
            return Tokenizer.load(copy)
        except UserError as error:
            raise UserError(str(error).replace(f"{copy}/spiece.model", path)) from error

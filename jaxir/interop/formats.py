"""Writes any model in any format, for `jaxir.convert` and `jaxir.export`."""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from jaxir.core.errors import UserError, suggest
from jaxir.interop import model_dir, t5x
from jaxir.interop.hub import hub
from jaxir.interop.huggingface import (
    hf,
    hf_cross_encoder,
    hf_hybrid_encoder,
    hf_seq2seq,
    model_card,
    sentence_transformers,
    st_multi_vector_folder,
    st_sparse_folder,
)
from jaxir.interop.model import kinds, lora
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.overrides import Overrides
from jaxir.interop.model.stored import Base, StoredModel
from jaxir.interop.t5x import optimizer as t5x_optimizer
from jaxir.interop.weights.notes import note
from jaxir.models.dual_encoder import Pooling
from jaxir.storage.checksums import write_all
from jaxir.storage.files import atomic_directory, check_new_directory, is_bucket

Format = Literal[
    "jaxir", "hf", "st", "t5x", "sentence_transformers", "peft"
]  # "sentence_transformers" is an alias of "st"
# _WHOLE: kind -> the function that writes its complete folder. _UNFIT: (kind, format that cannot hold it) ->
# the format that can.
_WHOLE = {
    "cross_encoder": hf_cross_encoder.write,
    "seq2seq": hf_seq2seq.write,
    "sparse_encoder": st_sparse_folder.write,
    "hybrid_encoder": hf_hybrid_encoder.write,
    "multi_vector_encoder": st_multi_vector_folder.write,
}
_UNFIT = {
    ("cross_encoder", "t5x"): "hf",
    ("seq2seq", "st"): "hf",
    ("sparse_encoder", "hf"): "st",
    ("sparse_encoder", "t5x"): "st",
    ("hybrid_encoder", "hf"): "st",
    ("hybrid_encoder", "t5x"): "st",
    ("multi_vector_encoder", "hf"): "st",
    ("multi_vector_encoder", "t5x"): "st",
}


def convert(
    source: str,
    output: str | Path,
    to: Format,
    *,
    tokenizer: str | None = None,
    pooling: Pooling | None = None,
    similarity: Literal["cosine", "dot"] | None = None,
    kind: str | None = None,
    optimizer_state: bool = False,
    repo: str | None = None,
) -> None:
    """Reads the model `source` part by part and writes it to the directory `output`.

    A local directory appears only when complete. In a bucket (formats jaxir and t5x) the index is written
    last. A model with two towers becomes two folders in format hf, `query/` and `passage/`, and one folder
    with a Router in format sentence_transformers.

    Args:
      source: a model, in a form that `model_dir.load` accepts.
      output: a new or empty directory; local, or gs://BUCKET/PATH.
      to: "jaxir", "sentence_transformers", "t5x", or "hf": only the encoder, without pooling or
        normalisation. Adapters (LoRA) are merged, except by "peft", which writes them alone, with the
        modules of sentence-transformers.
      tokenizer: the tokenizer of a `t5x:` source, which has none (see `t5x.read`).
      pooling: the pooling to write, instead of a dual encoder's own.
      similarity: the similarity to write, instead of a dual encoder's own.
      kind: the model to read from a folder with several kinds of models, as T5's; one of `kinds.KINDS`.
      optimizer_state: whether to write Adafactor's state, too, from a run's directory to "t5x".
      repo: the name that the folder will have on the hub, for the model card of formats hf, st and peft.
    """
    to = "st" if to == "sentence_transformers" else to
    if to not in get_args(Format):
        raise UserError(
            f"no format {to!r}{suggest(to, get_args(Format))}; expected {', '.join(get_args(Format))}"
        )
    if optimizer_state and to != "t5x":
        raise UserError(f"--optimizer_state only applies to format t5x, not to {to}: omit it")
    changes = {"pooling": pooling, "similarity": similarity}
    given = [name for name, value in changes.items() if value is not None]
    if given and to == "hf":
        raise UserError(f"format hf cannot hold the {given[0]}: omit --{given[0]}, or use format st")
    if to == "jaxir":
        model_dir.check_output(output)  # checked before a long download
    elif to != "t5x" or not is_bucket(output):
        check_new_directory(output)

    def write(model: StoredModel, _: str | None) -> None:
        found = kinds.name_of(model.config)
        if given and found != "dual_encoder":
            hint = ", or convert only its encoder by --kind=dual_encoder" if source.startswith("hf:") else ""
            raise UserError(
                f"{source} is {kinds.KINDS[found].what}; it has no {given[0]}: omit --{given[0]}{hint}"
            )
        if given:
            model = Overrides(**changes).apply(model, seed=0, where=source)
        _write(model, source, output, to, optimizer_state, repo)

    if given and kind not in (None, "dual_encoder"):
        raise UserError(f"a {kind} has no {given[0]}: omit --{given[0]}")
    model_dir.read_with(write, source, tokenizer=tokenizer, kind=kind)


def _write(
    model: StoredModel,
    source: str,
    output: str | Path,
    to: Literal["jaxir", "hf", "st", "t5x"],
    slots: bool,
    repo: str | None,
) -> None:
    if to == "peft":
        _write_adapters(model, source, output, repo)
        return
    model, kind = lora.merged(model), kinds.name_of(model.config)
    if (kind, to) in _UNFIT:
        raise UserError(
            f"{source} is {kinds.KINDS[kind].what}; format {to} cannot hold it: use {_UNFIT[kind, to]}"
        )
    if to == "jaxir":
        model_dir.write(output, model)
        return
    if to == "t5x":
        checkpoint = model.checkpoint
        if slots and checkpoint is None:
            raise UserError(
                f"{source} is not a training run, so it has no optimizer state; give a run of jaxir.train"
            )
        state = t5x_optimizer.read(checkpoint, model.params) if slots else None
        t5x.write(output, model, step=int(checkpoint.name) if checkpoint else 0, slots=state)
        return
    if to == "hf" or kind == "cross_encoder":
        _note_lost_prompts(model.settings, to)
    with atomic_directory(output) as temporary:
        if kind in _WHOLE:
            _WHOLE[kind](temporary, model)
            if (kind, to) == ("cross_encoder", "st"):
                hf_cross_encoder.write_prompts(temporary, model.settings)
            write_all(temporary)
        else:
            _write_towers(temporary, model, source, to)
        # The card is written last, so that SHA256SUMS leaves it out: its owner may edit it.
        model_card.write(temporary, model, to, source, Path(output).name, repo)


def _write_adapters(model: StoredModel, source: str, output: str | Path, repo: str | None) -> None:
    """Writes a folder of PEFT that names the adapted model and holds everything else."""
    if model.base is None or model.config.sharing != "sde" or kinds.name_of(model.config) != "dual_encoder":
        raise UserError(
            f"{source} is {model.config.summary}; format peft holds the adapters of a dual encoder with one"
            " tower, trained with lora_rank: use format st"
        )
    form, _, name = model.base.spec.partition(":")
    if form not in ("hf", "st"):
        raise UserError(
            f"{source} adapts {model.base.spec}, but PEFT only opens folders of transformers: use format st,"
            " which merges the adapters"
        )
    if form == "st" and "/" not in name:
        model = dataclasses.replace(model, base=Base(f"hf:{hub.ST_OWNER}/{name}"))
    with atomic_directory(output) as temporary:
        sentence_transformers.write(temporary, model)
        write_all(temporary)
        model_card.write(temporary, model, "peft", source, Path(output).name, repo)


def _note_lost_prompts(settings: EncoderSettings, to: Literal["hf", "st"]) -> None:
    """Prints which prompts a folder does not store: one of format hf, or a cross-encoder's."""
    before = {"queries": settings.query_prompt, "passages": settings.passage_prompt}
    unused = settings.unused_prompts
    if to == "st":  # in this format only a cross-encoder's passage prompt is lost
        before, unused = {"passages": settings.passage_prompt}, {}
    prompts = " and ".join(f"{prompt!r} before {texts}" for texts, prompt in before.items() if prompt)
    parts = [f"use it with {prompts}"] if prompts else []
    if unused:
        parts.append(f"the prompts named {', '.join(map(repr, unused))} are lost")
    if parts:
        note(f"note: the folder does not store this model's prompts: {'; '.join(parts)}")


def note_unused_prompts(settings: EncoderSettings, to: str) -> None:
    """Prints which named prompts of a sentence-transformers folder the graph format `to` leaves out."""
    if unused := settings.unused_prompts:
        note(f"note: {to} leaves out the prompts named {', '.join(map(repr, unused))}")


def _write_towers(directory: Path, model: StoredModel, source: str, to: Literal["hf", "st"]) -> None:
    if to == "hf" and model.config.projection is not None:
        raise UserError(f"{source} has a projection, which format hf cannot hold; use format st")
    if to == "st":
        sentence_transformers.write(directory, model)
        write_all(directory)
    elif model.config.sharing == "sde":
        hf.write_tower(directory, model, tower="query")
        write_all(directory)
    else:
        for tower in ("query", "passage"):
            (directory / tower).mkdir()
            hf.write_tower(directory / tower, model, tower=tower)
            write_all(directory / tower)
    lengths = {model.settings.query_max_length, model.settings.passage_max_length}
    if to == "st" and model.config.sharing == "sde" and len(lengths) > 1:
        note(
            f"note: sentence-transformers has one maximum length; the folder has {max(lengths)} tokens, but"
            f" this model truncates queries to {model.settings.query_max_length} and passages to"
            f" {model.settings.passage_max_length}"
        )

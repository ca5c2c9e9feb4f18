"""Models by `hf:NAME` and `st:NAME`: which folder a name means, and which kind of model is in it."""

import dataclasses
from pathlib import Path

from jaxir.interop.hub import hub
from jaxir.interop.huggingface import hf, hf_cross_encoder, hf_seq2seq, sentence_transformers
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.models.dual_encoder import DualEncoderConfig

_DEFAULT_LENGTH = 512


def read(form: str, name: str, kind: str | None, *, weights: bool = True) -> StoredModel:
    """Reads a model of Hugging Face or sentence-transformers.

    Args:
      form: "hf" or "st".
      name: a local directory, or a name on the hub; as `hub.resolve` takes it.
      kind: "dual_encoder", "cross_encoder" or "seq2seq"; None: a cross-encoder where the files say that it is
        one, which on the hub those of "st" say that list their modules, else a dual encoder: folders of T5
        hold both that and a generator.
      weights: whether they are wanted; where not, a dual encoder of "hf" needs none, and its parameters are
        shapes alone (see `stored.shapes_alone`).

    Raises:
      UserError: there is no such model, it is damaged, or of an architecture that is not known here.
    """
    if kind == "seq2seq":
        return hf_seq2seq.read(hub.resolve(name, check=hf.read_architecture))
    if form == "hf" and kind == "dual_encoder" and not weights:
        return _architecture(hub.resolve(name, weights=False, check=hf.read_architecture))
    if form == "hf":
        directory = hub.resolve(name, check=hf.read_architecture)
        pairs = kind == "cross_encoder" or (kind is None and hf_cross_encoder.is_one(directory))
        return hf_cross_encoder.read(directory) if pairs else _encoder(directory)
    if kind == "cross_encoder":
        return hf_cross_encoder.read(
            hub.resolve(name, default_owner="cross-encoder", check=hf.read_architecture)
        )

    def is_of_pairs(directory: Path) -> bool:
        return kind is None and hf_cross_encoder.is_one(directory)

    def check(directory: Path) -> None:
        (hf.read_architecture if is_of_pairs(directory) else sentence_transformers.check)(directory)

    directory = hub.resolve(name, default_owner="sentence-transformers", modules=True, check=check)
    read_one = hf_cross_encoder.read if is_of_pairs(directory) else sentence_transformers.read
    return read_one(directory)


def _architecture(directory: Path) -> StoredModel:
    """A folder as `_encoder` reads it, but for its weights."""
    model = _dual_encoder(directory, hf.read_architecture(directory))
    return dataclasses.replace(model, params=stored.shapes_alone(model.config))


def _encoder(directory: Path) -> StoredModel:
    return _dual_encoder(directory, hf.read_encoder(directory))


def _dual_encoder(directory: Path, encoder: hf.Encoder) -> StoredModel:
    length = min(_DEFAULT_LENGTH, encoder.config.max_positions or _DEFAULT_LENGTH)
    return StoredModel(
        config=DualEncoderConfig(backbone=encoder.config),
        params=encoder.in_model,
        tokenizer=hf.read_tokenizer(directory, encoder),
        settings=EncoderSettings(query_max_length=length, passage_max_length=length),
    )

"""Opens models by `hf:NAME` and `st:NAME`: finds the folder, and the kind of the model in the folder."""

from pathlib import Path

from jaxir.interop.hub import hub
from jaxir.interop.huggingface import hf, hf_cross_encoder, hf_seq2seq, sentence_transformers
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.models.dual_encoder import DualEncoderConfig

_DEFAULT_LENGTH = 512  # maximum number of tokens per text


def read(form: str, name: str, kind: str | None, *, weights: bool = True) -> StoredModel:
    """Reads a model of Hugging Face or sentence-transformers: `form` is "hf" or "st".

    `name` is as in `hub.resolve`. If `kind` is None, the model is a cross-encoder if the files say so, else a
    dual encoder: folders of T5 hold both a dual encoder and a generator. Without `weights`, a dual encoder of
    "hf" gets `stored.shapes_alone`.
    """
    if form == "st" and kind in (None, "dual_encoder"):
        return _read_sentence_transformers(name, kind)
    owner = "cross-encoder" if (form, kind) == ("st", "cross_encoder") else None
    weights = weights or kind != "dual_encoder"
    directory = hub.resolve(name, default_owner=owner, weights=weights, check=hf.read_architecture)
    if kind == "seq2seq":
        return hf_seq2seq.read(directory)
    if kind == "cross_encoder" or (kind is None and hf_cross_encoder.is_one(directory)):
        return hf_cross_encoder.read(directory)
    encoder = hf.read_encoder(directory) if weights else hf.read_architecture(directory)
    config = DualEncoderConfig(backbone=encoder.config)
    length = min(_DEFAULT_LENGTH, encoder.config.max_positions or _DEFAULT_LENGTH)
    return StoredModel(
        config=config,
        params=encoder.in_model if weights else stored.shapes_alone(config),
        tokenizer=hf.read_tokenizer(directory, encoder),
        settings=EncoderSettings(query_max_length=length, passage_max_length=length),
    )


def _read_sentence_transformers(name: str, kind: str | None) -> StoredModel:
    def is_cross_encoder(directory: Path) -> bool:
        return kind is None and hf_cross_encoder.is_one(directory)

    def check(directory: Path) -> None:
        (hf.read_architecture if is_cross_encoder(directory) else sentence_transformers.check)(directory)

    directory = hub.resolve(name, default_owner="sentence-transformers", modules=True, check=check)
    found = hf_cross_encoder if is_cross_encoder(directory) else sentence_transformers
    return found.read(directory)

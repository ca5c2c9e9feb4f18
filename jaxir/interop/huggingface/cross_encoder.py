"""Cross-encoders from Hugging Face folders for sequence classification, sentence-transformers' ones too."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.errors import UserError
from jaxir.interop import stored
from jaxir.interop.huggingface import hf, hf_config
from jaxir.interop.huggingface.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    write_json,
    write_tensors,
)
from jaxir.interop.stored import EncoderSettings, StoredModel
from jaxir.models.cross_encoder import CrossEncoderConfig


class _Head(NamedTuple):
    """What follows the encoder: the ends of the tensors' names there, and the activation between them."""

    pooler: str
    classifier: str
    activation: str


_HEADS = {
    "bert": _Head("pooler.dense", "classifier", "tanh"),
    "roberta": _Head("classifier.dense", "classifier.out_proj", "tanh"),
    "distilbert": _Head("pre_classifier", "classifier", "relu"),
}
# Scores of any other function of the logit would mean something else than they do here.
_OUTPUTS = ("Identity", "Sigmoid")


def is_one(directory: Path) -> bool:
    """Whether a folder holds a model for sequence classification with one label, and no dual encoder."""
    path = directory / "config.json"
    if (directory / "modules.json").exists() or not path.is_file():
        return False
    content = read_json(path)
    architectures = content.get("architectures") or [""]
    return str(architectures[0]).endswith("ForSequenceClassification") and (
        len(content.get("id2label") or {"0": ""}) == 1
    )


def read(directory: Path) -> StoredModel:
    """Reads a folder with config.json, weights and a tokenizer: BERT, RoBERTa or DistilBERT with one label.

    Raises:
      UserError: a file is missing or damaged, or the model has not one label or another architecture.
    """
    encoder = hf.read_encoder(directory)
    content = read_json(directory / "config.json")
    if content["model_type"] not in _HEADS:
        kinds = ", ".join(_HEADS)
        raise UserError(f"{directory}: model_type {content['model_type']!r} is no cross-encoder: {kinds} are")
    head = _HEADS[content["model_type"]]
    _check_output(directory, content)
    tokenizer = hf.read_tokenizer(directory, encoder)
    params = {f"encoder.{name}": value for name, value in encoder.params.items()}
    return StoredModel(
        config=CrossEncoderConfig(backbone=encoder.config, activation=head.activation),
        params=params | _read_head(directory, head, encoder.config.embed_dim),
        tokenizer=tokenizer,
        settings=EncoderSettings.of_pairs(hf.max_length(directory, encoder)),
    )


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder that transformers and sentence-transformers' CrossEncoder read; the inverse of `read`.

    Raises:
      UserError: Hugging Face has no architecture of this shape.
    """
    config, pad_id = model.config, model.tokenizer.pad_swap or 0
    content = hf_config.describe(config.backbone, pad_id)
    kind = content["model_type"]
    head = _HEADS.get(kind)
    if head is None or head.activation != config.activation:
        raise UserError(
            f"Hugging Face's {kind} has no head for one score with activation {config.activation!r}"
        )
    encoder = {n.removeprefix("encoder."): v for n, v in model.params.items() if n.startswith("encoder.")}
    tensors = hf.tensors_of(config.backbone, encoder, pad_id=pad_id)
    tensors = {f"{kind}.{name}": value for name, value in tensors.items()}
    for ours, theirs in (("pooler", head.pooler), ("classifier", head.classifier)):
        where = "bert." if (ours, kind) == ("pooler", "bert") else ""
        tensors[f"{where}{theirs}.weight"] = np.asarray(model.params[f"{ours}.kernel"]).T
        tensors[f"{where}{theirs}.bias"] = np.asarray(model.params[f"{ours}.bias"])
    architecture = content["architectures"][0].replace("Model", "ForSequenceClassification")
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    # The scores are logits, as they are here.
    score = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    write_json(directory / "config.json", content | {"architectures": [architecture]} | label | score)
    write_tensors(directory / SINGLE, tensors)
    model.tokenizer.save(directory)
    path = directory / "tokenizer_config.json"
    write_json(path, read_optional_json(path) | {"model_max_length": model.settings.pair_max_length})


def _read_head(directory: Path, head: _Head, width: int) -> dict[str, np.ndarray]:
    tensors, params = read_tensors(directory), {}
    for ours, theirs in (("pooler", head.pooler), ("classifier", head.classifier)):
        for leaf, suffix in (("kernel", "weight"), ("bias", "bias")):
            # "classifier" is the end of "pre_classifier" too: names end after a dot.
            end = f"{theirs}.{suffix}"
            name = next((n for n in tensors if n == end or n.endswith(f".{end}")), None)
            if name is None:
                raise UserError(
                    f"{directory}: no {end} among its weights, so it is no cross-encoder (a model for"
                    " sequence classification with one label)"
                )
            value = np.asarray(tensors[name].astype(np.float32))
            if ours == "classifier" and value.shape[0] != 1:
                raise UserError(f"{directory}: it has {value.shape[0]} labels, where a cross-encoder has one")
            params[f"{ours}.{leaf}"] = value.T
    rows = {"pooler": width, "classifier": 1}
    shapes = {f"{n}.kernel": (width, rows[n]) for n in rows} | {f"{n}.bias": (rows[n],) for n in rows}
    stored.check_params(params, shapes, str(directory))
    return params


def _check_output(directory: Path, content: dict[str, Any]) -> None:
    """Refuses a folder whose scores sentence-transformers makes otherwise than by a logit or its sigmoid."""
    path = directory / "config_sentence_transformers.json"
    named = (
        read_optional_json(path).get("activation_fn"),
        (content.get("sentence_transformers") or {}).get("activation_fn"),
        content.get("sbert_ce_default_activation_function"),
    )
    name = next((name for name in named if name), None)
    if name is not None and name.rpartition(".")[2] not in _OUTPUTS:
        raise UserError(
            f"{directory}: its scores are made by {name}, only {' and '.join(_OUTPUTS)} are known"
        )

"""Reads and writes cross-encoders: folders for sequence classification, also sentence-transformers'."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Reads
from jaxir.core.values import fits
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, hf_config, st_files, tokenizer_files
from jaxir.interop.model import kinds, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    write_json,
    write_tensors,
)
from jaxir.models import backbones, layers
from jaxir.models.backbones import BackboneConfig
from jaxir.models.codec import HuggingFace, ScoreHead
from jaxir.models.cross_encoder import CrossEncoderConfig

# Supported functions of the logit. Any other function would give scores another meaning.
_OUTPUTS = ("Identity", "Sigmoid")
_LOGIT = "torch.nn.modules.linear.Identity"
_TYPES, _TYPE_TABLE = "token_type_ids", "embeddings.token_type.embedding"
# Tokenizer classes of transformers 5.24 with "token_type_ids" in their default `model_input_names`.
_TYPED_TOKENIZERS = ("BertTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer")
_READS = "jaxir_reads"  # jaxir's own entry of config.json, for models that do not read pairs


def head_of(config: BackboneConfig) -> dict[str, Any]:
    """Returns the fields of a `CrossEncoderConfig` that describe a new head over an encoder."""
    codec = hf_config.codec_of(config) if config.model_type else None
    if codec is None or codec.score_head is None:
        pooling = "cls" if codec is None or codec.begins else "mean"
        return {"activation": "tanh", "normed": False, "pooling": pooling}
    head = codec.score_head
    return {"activation": head.activations[0], "normed": head.norm is not None, "pooling": "cls"}


def is_one(directory: Path) -> bool:
    """Whether a folder holds a model for sequence classification with one label, and no dual encoder."""
    path = directory / "config.json"
    if not path.is_file():
        return False
    if (directory / hub_files.ST_MODULES).exists():
        return st_files.kind_of(directory) == "cross_encoder"
    content = read_json(path, dict[str, Any])
    architectures, labels = content.get("architectures") or [""], content.get("id2label")
    if not fits(architectures, list[str]) or not fits(labels, dict[str, Any] | None):
        raise UserError(
            f"{path}: architectures must be a list of names, and id2label an object of labels; correct it"
        )
    # transformers writes no labels into config.json if there are two.
    count = content.get("num_labels", 2) if labels is None else len(labels)
    return architectures[0].endswith("ForSequenceClassification") and count == 1


def read(directory: Path) -> StoredModel:
    """Reads a folder with config.json, weights and a tokenizer: a model with a `ScoreHead` of one label."""
    encoder, tokenizer = hf.read(directory)
    content = read_json(directory / "config.json")
    codec = backbones.of_model_type(content["model_type"], where=directory)[1]
    if not codec.begins:
        raise UserError(
            f"{directory}: the head of {codec.model_type!r} reads its decoder, but gin/reranker.gin trains a"
            " head over the encoder alone: start from a folder without that head"
        )
    head = codec.score_head
    if head is None:
        raise UserError(
            f"{directory}: cross-encoders of model_type {codec.model_type!r} are not supported; give another"
            " model"
        )
    if not _has_token_types(directory, content, codec):
        encoder = _without_token_types(encoder)
    config = CrossEncoderConfig(
        backbone=encoder.config,
        normed=head.norm is not None,
        **_head_fields(content, head, directory, encoder),
    )
    params = encoder.in_model | _read_head(directory, head, config)
    about = st_files.read_config(directory, "cross_encoder")
    _check_output(directory, content, about)
    path = directory / hub_files.ST_MODULES
    modules = st_files.modules(directory) if path.exists() else []
    if modules not in ([], [("Transformer", directory)]):
        raise UserError(
            f"{path}: the modules {', '.join(kind for kind, _ in modules)} are not supported: a cross-encoder"
            " has only a Transformer, in the folder itself"
        )
    transformer = st_files.read_transformer(directory, encoder, "cross_encoder")
    if transformer.lower_case:
        tokenizer = tokenizer_files.lower_cased(tokenizer, directory)
    settings = _settings(directory, content, about, transformer.max_length)
    return StoredModel(config=config, params=params, tokenizer=tokenizer, settings=settings)


def _head_fields(
    content: dict[str, Any], head: ScoreHead, directory: Path, encoder: hf.Encoder
) -> dict[str, Any]:
    """Returns what the head reads and the activation between its layers."""
    known = {"pooling": head.poolings, "activation": head.activations}
    found = {name: content.get(head.entries.get(name), values[0]) for name, values in known.items()}
    allowed = {head.entries[name]: values for name, values in known.items() if name in head.entries}
    allowed |= {name: (None, value) for name, value in head.fixed.items()}
    allowed |= dict.fromkeys(head.widths, (None, encoder.config.embed_dim))
    for name, values in allowed.items():
        if name in content and content[name] not in values:
            supported = ", ".join(str(value) for value in values if value is not None)
            raise UserError(
                f"{directory}: {name} {content[name]!r:.40} is not supported, only {supported}; give another"
                " model"
            )
    return found


def _has_token_types(directory: Path, content: dict[str, Any], codec: HuggingFace) -> bool:
    """Whether transformers' tokenizer of this folder returns token types for its model."""
    path = directory / tokenizer_files.CONFIG
    about = read_optional_json(path)
    names = about.get("model_input_names")
    if not fits(names, list[str] | None):
        raise UserError(f"{path}: model_input_names must be a list of names; correct it")
    if names is not None:
        return _TYPES in names
    named = about.get("tokenizer_class") or content.get("tokenizer_class")
    if not fits(named, str | None):
        raise UserError(f"{path}: tokenizer_class is {named!r:.40}, but must be a name")
    return (named or codec.tokenizer_class).removesuffix("Fast") in _TYPED_TOKENIZERS


def _without_token_types(encoder: hf.Encoder) -> hf.Encoder:
    """Returns an encoder without token types: all tokens have the first type."""
    if encoder.config.num_token_types < 2:
        return encoder
    config = dataclasses.replace(encoder.config, num_token_types=1)
    table = encoder.params[_TYPE_TABLE][:1]
    return encoder._replace(config=config, params=encoder.params | {_TYPE_TABLE: table})


def _settings(
    directory: Path, content: dict[str, Any], about: dict[str, Any], length: int
) -> EncoderSettings:
    """Returns the settings; sentence-transformers puts the default prompt before the query."""
    found, reads = EncoderSettings.of_pairs(length), content.get(_READS, "pair")
    if not fits(reads, Reads):
        raise UserError(f"{directory / 'config.json'}: {_READS} {reads!r:.40} needs a newer jaxir")
    if reads == "expanded_query":
        found = dataclasses.replace(found, query_max_length=length)
    if (directory / hub_files.ST_MODULES).exists():  # without this file sentence-transformers ignores prompts
        named, default = about["prompts"], about.get("default_prompt_name")
        prompts = {"query_prompt": named.get(default, ""), "named_prompts": named}
        found = dataclasses.replace(found, **prompts, default_prompt_name=default)
    return dataclasses.replace(found, reads=reads)


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder that transformers and sentence-transformers read; the inverse of `read`."""
    config, settings, pad_id = model.config, model.settings, model.tokenizer.pad_swap or 0
    head = hf_config.codec_of(config.backbone).score_head
    if (
        head is None
        or config.activation not in head.activations
        or config.pooling not in head.poolings
        or config.normed != (head.norm is not None)
    ):
        raise UserError(
            f"Hugging Face's {config.backbone.model_type} has no head for one score with activation"
            f" {config.activation!r} and {config.pooling} pooling; export to onnx or saved_model"
        )
    content = hf_config.describe(config.backbone, pad_id) | head.fixed | head.written
    content |= {theirs: getattr(config, ours) for ours, theirs in head.entries.items()}
    content |= dict.fromkeys(head.widths, config.backbone.embed_dim)
    content["architectures"] = [content["architectures"][0].replace("Model", "ForSequenceClassification")]
    content |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if settings.reads != "pair":
        content[_READS] = settings.reads
    # Let sentence-transformers return logits, as jaxir does.
    content["sentence_transformers"] = {"activation_fn": _LOGIT}
    tensors = hf.tensors_of(config.backbone, hf.encoder_of(model.params), pad_id=pad_id)
    tensors = {f"{head.prefix}{name}": value for name, value in tensors.items()}
    for ours, theirs in _tensors_of_head(head).items():
        within = head.pooler_prefix if ours.startswith("pooler") else ""
        tensors[f"{within}{theirs}"] = np.asarray(model.params[ours]).T
    write_json(directory / "config.json", content)
    write_tensors(directory / SINGLE, tensors)
    length = settings.pair_max_length
    hf.save_tokenizer(directory, model, length)
    path = directory / tokenizer_files.CONFIG
    write_json(path, read_optional_json(path) | {"model_max_length": length})


def write_prompts(directory: Path, settings: EncoderSettings) -> None:
    """Writes the files by which sentence-transformers puts prompts before queries, if there are any."""
    named, default = settings.named_prompts, settings.default_prompt_name
    if named.get(default, "") != settings.query_prompt:
        named, default = {**named, "query": settings.query_prompt}, "query"
    if not named:
        return
    about = {"model_type": "CrossEncoder", "prompts": dict(named), "default_prompt_name": default}
    write_json(directory / hub_files.ST_CONFIG, about | {"activation_fn": _LOGIT})
    module = "sentence_transformers.base.modules.transformer.Transformer"
    write_json(directory / hub_files.ST_MODULES, [{"idx": 0, "name": "0", "path": "", "type": module}])
    write_json(directory / hub_files.ST_TRANSFORMER[0], {"transformer_task": "sequence-classification"})


def _tensors_of_head(head: ScoreHead) -> dict[str, str]:
    """Returns the end of each tensor's name, by jaxir's name of the parameter."""
    found = {"pooler.kernel": f"{head.pooler}.weight", "classifier.kernel": f"{head.classifier}.weight"}
    found["classifier.bias"] = f"{head.classifier}.bias"
    if head.norm is None:
        return found | {"pooler.bias": f"{head.pooler}.bias"}
    return found | {"norm.scale": f"{head.norm}.weight"}


def _read_head(directory: Path, head: ScoreHead, config: CrossEncoderConfig) -> dict[str, np.ndarray]:
    tensors, params = read_tensors(directory), {}
    missing = ", so it is not a cross-encoder (a model for sequence classification with one label)"
    for ours, end in _tensors_of_head(head).items():
        value = hf.read_ending(directory, tensors, end, missing)
        if ours.startswith("classifier") and value.shape[0] != 1:
            raise UserError(f"{directory}: the model has {value.shape[0]} labels; give one with one label")
        params[ours] = value.T
    shapes = {name: shape for name, shape in stored.model_shapes(config).items() if name in params}
    stored.check_params(params, shapes, str(directory))
    return params


def _check_output(directory: Path, content: dict[str, Any], about: dict[str, Any]) -> None:
    """Refuses models whose scores in sentence-transformers are neither logits nor their sigmoids."""
    own = content.get("sentence_transformers") or {}
    if not fits(own, dict[str, Any]):
        path = directory / "config.json"
        raise UserError(f"{path}: sentence_transformers must be a JSON object; correct it")
    named = (
        about.get("activation_fn"),
        own.get("activation_fn"),
        content.get("sbert_ce_default_activation_function"),
    )
    name = next((name for name in named if name), None)
    if name is not None and str(name).rpartition(".")[2] not in _OUTPUTS:
        raise UserError(
            f"{directory}: the activation {name} of scores is not supported, only {' and '.join(_OUTPUTS)};"
            " give another model"
        )


def with_new_head(found: StoredModel, *, seed: int, where: str) -> StoredModel:
    """Returns a cross-encoder with the encoder of a dual encoder and a head drawn from N(0, 0.02^2)."""
    config = found.config
    if kinds.name_of(config) != "dual_encoder" or config.sharing != "sde":
        raise UserError(
            f"{where}: a cross-encoder starts from one encoder, not from {config.summary}; give a"
            " model with sharing='sde'"
        )
    made = CrossEncoderConfig(backbone=config.backbone, **head_of(config.backbone))
    params = {n: v for n, v in found.params.items() if n.startswith("encoder.")}
    width, init = config.backbone.embed_dim, layers.normal(0.02)
    shapes = {"pooler": (width, width), "classifier": (width, 1)}
    for (name, shape), key in zip(shapes.items(), jax.random.split(jax.random.key(seed), 2), strict=True):
        params[f"{name}.kernel"] = np.asarray(init(key, shape))
        params[f"{name}.bias"] = np.zeros(shape[1], np.float32)
    if made.normed:
        params["norm.scale"] = np.ones_like(params.pop("pooler.bias"))
    return StoredModel(
        config=made,
        params=params,
        tokenizer=found.tokenizer,
        settings=dataclasses.replace(
            EncoderSettings.of_pairs(found.settings.passage_max_length),
            query_prompt=found.settings.query_prompt,
            passage_prompt=found.settings.passage_prompt,
        ),
        checkpoint=found.checkpoint,
    )

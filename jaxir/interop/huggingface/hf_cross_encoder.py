"""Cross-encoders from Hugging Face folders for sequence classification, sentence-transformers' ones too."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Reads
from jaxir.core.values import fits
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, hf_config, st_files, tokenizer_files
from jaxir.interop.model import stored
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
from jaxir.models.cross_encoder import CrossEncoderConfig


class _Head(NamedTuple):
    """What follows the encoder: the ends of the tensors' names there, and the activation between them."""

    pooler: str
    classifier: str
    activation: str
    norm: str | None = None

    def tensors(self) -> dict[str, str]:
        """Returns the end of each tensor's name by our name of the parameter."""
        found = {"pooler.kernel": f"{self.pooler}.weight", "classifier.kernel": f"{self.classifier}.weight"}
        found["classifier.bias"] = f"{self.classifier}.bias"
        if self.norm is None:
            return found | {"pooler.bias": f"{self.pooler}.bias"}
        return found | {"norm.scale": f"{self.norm}.weight"}


_HEADS = {
    "bert": _Head("pooler.dense", "classifier", "tanh"),
    "roberta": _Head("classifier.dense", "classifier.out_proj", "tanh"),
    "distilbert": _Head("pre_classifier", "classifier", "relu"),
    "modernbert": _Head("head.dense", "classifier", "gelu", norm="head.norm"),
    "deberta-v2": _Head("pooler.dense", "classifier", "gelu"),
}
# Their texts begin with no special token, so a new head reads the mean of all.
_WITHOUT_FIRST = ("t5", "mt5")
# What a checkpoint with heads puts before the encoder's names, where that is not the model_type.
_PREFIXES = {"modernbert": "model", "deberta-v2": "deberta"}
# Scores of any other function of the logit would mean something else than they do here.
_OUTPUTS = ("Identity", "Sigmoid")
_LOGIT = "torch.nn.modules.linear.Identity"
_TYPES, _TYPE_TABLE = "token_type_ids", "embeddings.token_type.embedding"
# The tokenizer class that transformers takes for a model_type where the folder names no class.
_USUAL_TOKENIZERS = {
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "distilbert": "BertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
}
# Tokenizer classes of transformers 5.24 that give token types by default: those that have "token_type_ids" in
# their `model_input_names`. TokenizersBackend and PreTrainedTokenizerFast have not.
_TYPED_TOKENIZERS = (
    "BertTokenizer",
    "ConvBertTokenizer",
    "DPRContextEncoderTokenizer",
    "DPRQuestionEncoderTokenizer",
    "DebertaTokenizer",
    "DebertaV2Tokenizer",
    "ElectraTokenizer",
    "LayoutLMTokenizer",
    "LxmertTokenizer",
    "MobileBertTokenizer",
    "SqueezeBertTokenizer",
)
_READS = "jaxir_reads"  # of config.json, where it does not read pairs: ours alone


def head_of(model_type: str | None) -> dict[str, Any]:
    """Returns the fields of a `CrossEncoderConfig` that say what a new head over such an encoder is."""
    head = _HEADS.get(model_type or "", _HEADS["bert"])
    pooling = "mean" if model_type in _WITHOUT_FIRST else "cls"
    return {"activation": head.activation, "normed": head.norm is not None, "pooling": pooling}


def is_one(directory: Path) -> bool:
    """Whether a folder holds a model for sequence classification with one label, and no dual encoder.

    Raises:
      UserError: its config.json is damaged.
    """
    path = directory / "config.json"
    if not path.is_file():
        return False
    if (directory / hub_files.ST_MODULES).exists():
        return st_files.kind_of(directory) == "cross_encoder"
    content = read_json(path, dict[str, Any])
    architectures, labels = content.get("architectures") or [""], content.get("id2label")
    if not fits(architectures, list[str]) or not fits(labels, dict[str, Any] | None):
        raise UserError(f"{path}: architectures is no list of names, or id2label no object of labels")
    # transformers writes the labels but where there are two.
    count = content.get("num_labels", 2) if labels is None else len(labels)
    return architectures[0].endswith("ForSequenceClassification") and count == 1


def read(directory: Path) -> StoredModel:
    """Reads a folder with config.json, weights and a tokenizer: a model of `_HEADS` with one label.

    Raises:
      UserError: a file is missing or damaged, or the model has not one label or another architecture.
    """
    encoder = hf.read_encoder(directory)
    content = read_json(directory / "config.json")
    if content["model_type"] in _WITHOUT_FIRST:
        raise UserError(
            f"{directory}: the head of {content['model_type']!r} reads its decoder; what is trained here"
            " (gin/reranker.gin) is a head over the encoder alone: start from a folder without that head"
        )
    if content["model_type"] not in _HEADS:
        kinds = ", ".join(_HEADS)
        raise UserError(f"{directory}: model_type {content['model_type']!r} is no cross-encoder: {kinds} are")
    head = _HEADS[content["model_type"]]
    if not _has_token_types(directory, content):
        encoder = _of_one_type(encoder)
    params = {f"encoder.{name}": value for name, value in encoder.params.items()}
    config = CrossEncoderConfig(
        backbone=encoder.config,
        pooling=_pooling(content, directory),
        activation=_activation(content, directory),
        normed=head.norm is not None,
    )
    params |= _read_head(directory, head, config)
    about = st_files.read_config(directory, "cross_encoder")
    _check_output(directory, content, about)
    _check_use(directory)
    tokenizer = hf.read_tokenizer(directory, encoder)
    transformer = st_files.read_transformer(directory, encoder, "cross_encoder")
    if transformer.lower_case:
        tokenizer = tokenizer_files.lower_cased(tokenizer, directory)
    return StoredModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        settings=_settings(directory, content, about, transformer.max_length),
    )


def _has_token_types(directory: Path, content: dict[str, Any]) -> bool:
    """Whether transformers' tokenizer of a folder with this config.json gives its model token types.

    The folder's `model_input_names` decides, else the class of the tokenizer.
    """
    path = directory / tokenizer_files.CONFIG
    about = read_optional_json(path)
    names = about.get("model_input_names")
    if not fits(names, list[str] | None):
        raise UserError(f"{path}: model_input_names is no list of names")
    if names is not None:
        return _TYPES in names
    named = about.get("tokenizer_class") or content.get("tokenizer_class")
    if not fits(named, str | None):
        raise UserError(f"{path}: tokenizer_class is {named!r:.40}, and must be a name")
    found = named or _USUAL_TOKENIZERS.get(content["model_type"], "")
    return found.removesuffix("Fast") in _TYPED_TOKENIZERS


def _of_one_type(encoder: hf.Encoder) -> hf.Encoder:
    """Returns an encoder that is told no token types: all tokens are of the first, and no other is kept."""
    if encoder.config.num_token_types < 2:
        return encoder
    config = dataclasses.replace(encoder.config, num_token_types=1)
    return encoder._replace(
        config=config, params=encoder.params | {_TYPE_TABLE: encoder.params[_TYPE_TABLE][:1]}
    )


def _settings(
    directory: Path, content: dict[str, Any], about: dict[str, Any], length: int
) -> EncoderSettings:
    """Returns the settings of a model that reads sequences of at most `length` tokens.

    sentence-transformers puts the default prompt before the first text of a pair, which is the query.
    """
    found, reads = EncoderSettings.of_pairs(length), content.get(_READS, "pair")
    if not fits(reads, Reads):
        raise UserError(f"{directory / 'config.json'}: {_READS} is {reads!r:.40}")
    if reads == "expanded_query":
        found = dataclasses.replace(found, query_max_length=length)
    if (directory / hub_files.ST_MODULES).exists():  # without this file it reads no prompts
        named, default = about["prompts"], about.get("default_prompt_name")
        found = dataclasses.replace(
            found,
            query_prompt=named.get(default, ""),
            named_prompts=named,
            default_prompt_name=default,
        )
    return dataclasses.replace(found, reads=reads)


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder that transformers and sentence-transformers' CrossEncoder read; the inverse of `read`.

    Raises:
      UserError: Hugging Face has no architecture of this shape.
    """
    config, pad_id = model.config, model.tokenizer.pad_swap or 0
    content = hf_config.describe(config.backbone, pad_id)
    kind = content["model_type"]
    head = _HEADS.get(kind)
    # DeBERTa's config.json names the activation.
    activation = config.activation if head is None or kind == "deberta-v2" else head.activation
    has = (config.activation, config.normed)
    if head is None or (activation, head.norm is not None) != has or not _may_pool(kind, config.pooling):
        raise UserError(
            f"Hugging Face's {kind} has no head for one score with activation {config.activation!r} and"
            f" {config.pooling} pooling"
        )
    encoder = {n.removeprefix("encoder."): v for n, v in model.params.items() if n.startswith("encoder.")}
    tensors = hf.tensors_of(config.backbone, encoder, pad_id=pad_id)
    inner = _PREFIXES.get(kind, kind)
    tensors = {f"{inner}.{name}": value for name, value in tensors.items()}
    for ours, theirs in head.tensors().items():
        within = "bert." if kind == "bert" and ours.startswith("pooler") else ""
        tensors[f"{within}{theirs}"] = np.asarray(model.params[ours]).T
    if kind == "modernbert":
        settings = {"pooling": config.pooling, "activation": config.activation, "bias": False, "dropout": 0.0}
        content |= {f"classifier_{name}": value for name, value in settings.items()}
    if kind == "deberta-v2":
        width, act = config.backbone.embed_dim, config.activation
        content |= {"pooler_hidden_size": width, "pooler_hidden_act": act, "pooler_dropout": 0.0}
    architecture = content["architectures"][0].replace("Model", "ForSequenceClassification")
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if model.settings.reads != "pair":
        content[_READS] = model.settings.reads
    # The scores are logits, as they are here.
    score = {"sentence_transformers": {"activation_fn": _LOGIT}}
    write_json(directory / "config.json", content | {"architectures": [architecture]} | label | score)
    write_tensors(directory / SINGLE, tensors)
    length = model.settings.pair_max_length
    hf.save_tokenizer(directory, model, length)
    path = directory / tokenizer_files.CONFIG
    write_json(path, read_optional_json(path) | {"model_max_length": length})


def write_prompts(directory: Path, settings: EncoderSettings) -> None:
    """Writes beside what `write` wrote the files by which sentence-transformers puts prompts before queries.

    It has no prompt for the second text of a pair. A model without prompts needs none of these files.
    """
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


def _read_head(directory: Path, head: _Head, config: CrossEncoderConfig) -> dict[str, np.ndarray]:
    tensors, params = read_tensors(directory), {}
    for ours, end in head.tensors().items():
        # "classifier" is the end of "pre_classifier" too: names end after a dot.
        name = next((n for n in tensors if n == end or n.endswith(f".{end}")), None)
        if name is None:
            raise UserError(
                f"{directory}: no {end} among its weights, so it is no cross-encoder (a model for"
                " sequence classification with one label)"
            )
        value = np.asarray(tensors[name].astype(np.float32))
        if ours.startswith("classifier") and value.shape[0] != 1:
            raise UserError(f"{directory}: it has {value.shape[0]} labels, where a cross-encoder has one")
        params[ours] = value.T
    shapes = {name: shape for name, shape in stored.model_shapes(config).items() if name in params}
    stored.check_params(params, shapes, str(directory))
    return params


def _pooling(content: dict[str, Any], directory: Path) -> Any:
    """Returns what the head reads, where the architecture leaves it open."""
    if content["model_type"] != "modernbert":
        return "cls"
    pooling = content.get("classifier_pooling", "cls")
    others = content.get("classifier_activation", "gelu"), bool(content.get("classifier_bias"))
    if not _may_pool("modernbert", pooling) or others != ("gelu", False):
        raise UserError(
            f"{directory}: a head with {pooling} pooling, activation and bias {others} is not supported, only"
            " cls or mean, gelu, and none"
        )
    return pooling


def _activation(content: dict[str, Any], directory: Path) -> Any:
    """Returns what follows the head's first layer, where the architecture leaves it open."""
    head = _HEADS[content["model_type"]]
    if content["model_type"] != "deberta-v2":
        return head.activation
    found, width = content.get("pooler_hidden_act", head.activation), content["hidden_size"]
    known = {head.activation for head in _HEADS.values()}
    if found not in known or content.get("pooler_hidden_size", width) != width:
        raise UserError(
            f"{directory}: a head of pooler_hidden_size {content.get('pooler_hidden_size')} with"
            f" pooler_hidden_act {found!r} is not supported, only {width} with {', '.join(sorted(known))}"
        )
    return found


def _may_pool(model_type: str, pooling: str) -> bool:
    return pooling == "cls" or (model_type == "modernbert" and pooling == "mean")


def _check_use(directory: Path) -> None:
    """Refuses what sentence-transformers would do beside the model."""
    path = directory / hub_files.ST_MODULES
    modules = st_files.modules(directory) if path.exists() else []
    if modules not in ([], [("Transformer", directory)]):
        raise UserError(
            f"{path}: the modules {', '.join(kind for kind, _ in modules)} are not supported: a cross-encoder"
            " has one Transformer, in the folder itself"
        )


def _check_output(directory: Path, content: dict[str, Any], about: dict[str, Any]) -> None:
    """Refuses a folder whose scores sentence-transformers makes otherwise than by a logit or its sigmoid."""
    told = content.get("sentence_transformers") or {}
    if not fits(told, dict[str, Any]):
        raise UserError(f"{directory / 'config.json'}: sentence_transformers is no JSON object")
    named = (
        about.get("activation_fn"),
        told.get("activation_fn"),
        content.get("sbert_ce_default_activation_function"),
    )
    name = next((name for name in named if name), None)
    if name is not None and str(name).rpartition(".")[2] not in _OUTPUTS:
        raise UserError(
            f"{directory}: its scores are made by {name}, only {' and '.join(_OUTPUTS)} are known"
        )

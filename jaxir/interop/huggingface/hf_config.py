"""Hugging Face's config.json to the configuration of an encoder, and back."""

from pathlib import Path
from typing import Any

from jaxir.errors import UserError
from jaxir.interop.huggingface.weights import require
from jaxir.models.bert import BertConfig
from jaxir.models.t5 import T5Config

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def parse(content: Any, path: Path) -> tuple[BertConfig | T5Config, int]:
    """Returns the configuration that `content`, read from `path`, describes, and the padding id there.

    Raises:
      UserError: the architecture is not one of ours, or a value is missing or impossible.
    """
    model_type = require(content, "model_type", path)
    if model_type not in _READERS:
        raise UserError(
            f"{path}: model_type {model_type!r} is not supported; there are {', '.join(_READERS)}"
        )
    pad_id = content.get("pad_token_id")
    if pad_id is None:
        pad_id = 1 if model_type == "roberta" else 0
    try:
        return _READERS[model_type](content, path, pad_id), pad_id
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error


def _read_bert(content: dict[str, Any], path: Path, pad_id: int) -> BertConfig:
    position_type = content.get("position_embedding_type") or "absolute"
    if position_type != "absolute":
        raise UserError(
            f"{path}: position_embedding_type {position_type!r} is not supported, only 'absolute'"
        )
    reserved = pad_id + 1 if content["model_type"] == "roberta" else 0
    return BertConfig(
        vocab_size=require(content, "vocab_size", path),
        embed_dim=require(content, "hidden_size", path),
        num_layers=require(content, "num_hidden_layers", path),
        num_heads=require(content, "num_attention_heads", path),
        mlp_dim=require(content, "intermediate_size", path),
        max_positions=require(content, "max_position_embeddings", path) - reserved,
        reserved_positions=reserved,
        num_token_types=content.get("type_vocab_size", 2),
        layer_norm_epsilon=content.get("layer_norm_eps", 1e-12),
        activation=_activation(content.get("hidden_act", "gelu"), path),
        dropout_rate=content.get("hidden_dropout_prob", 0.1),
        attention_dropout_rate=content.get("attention_probs_dropout_prob", 0.1),
    )


def _read_distilbert(content: dict[str, Any], path: Path, pad_id: int) -> BertConfig:
    return BertConfig(
        vocab_size=require(content, "vocab_size", path),
        embed_dim=require(content, "dim", path),
        num_layers=require(content, "n_layers", path),
        num_heads=require(content, "n_heads", path),
        mlp_dim=require(content, "hidden_dim", path),
        max_positions=require(content, "max_position_embeddings", path),
        num_token_types=0,
        activation=_activation(content.get("activation", "gelu"), path),
        dropout_rate=content.get("dropout", 0.1),
        attention_dropout_rate=content.get("attention_dropout", 0.1),
    )


def _read_t5(content: dict[str, Any], path: Path, pad_id: int) -> T5Config:
    default = "gated-gelu" if content["model_type"] == "mt5" else "relu"
    feed_forward = content.get("feed_forward_proj", default)
    gated = feed_forward.startswith("gated-")
    name = feed_forward.removeprefix("gated-")
    return T5Config(
        vocab_size=require(content, "vocab_size", path),
        embed_dim=require(content, "d_model", path),
        num_layers=require(content, "num_layers", path),
        num_heads=require(content, "num_heads", path),
        head_dim=require(content, "d_kv", path),
        mlp_dim=require(content, "d_ff", path),
        # "gated-gelu" has always meant the tanh approximation, "gelu" alone never did.
        activation="gelu_tanh" if gated and name == "gelu" else _activation(name, path),
        gated=gated,
        relative_buckets=content.get("relative_attention_num_buckets", 32),
        relative_max_distance=content.get("relative_attention_max_distance", 128),
        layer_norm_epsilon=content.get("layer_norm_epsilon", 1e-6),
        dropout_rate=content.get("dropout_rate", 0.1),
    )


_READERS = {
    "bert": _read_bert,
    "distilbert": _read_distilbert,
    "roberta": _read_bert,
    "t5": _read_t5,
    "mt5": _read_t5,
}


def _activation(name: str, path: Path) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"{path}: activation {name!r} is not supported; there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def describe(config: BertConfig | T5Config, pad_id: int) -> dict[str, Any]:
    """Returns the content of config.json; the inverse of `parse`.

    Raises:
      UserError: Hugging Face has no architecture of this shape.
    """
    if isinstance(config, T5Config):
        return _describe_t5(config, pad_id)
    shared = {
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions + config.reserved_positions,
        "pad_token_id": pad_id,
    }
    if not config.num_token_types:
        if config.layer_norm_epsilon != 1e-12 or config.reserved_positions:
            raise UserError(
                "Hugging Face's DistilBERT has layer_norm_epsilon 1e-12 and no reserved positions"
            )
        return shared | {
            "architectures": ["DistilBertModel"],
            "model_type": "distilbert",
            "dim": config.embed_dim,
            "n_layers": config.num_layers,
            "n_heads": config.num_heads,
            "hidden_dim": config.mlp_dim,
            "activation": _ACTIVATION_NAMES[config.activation],
            "dropout": config.dropout_rate,
            "attention_dropout": config.attention_dropout_rate,
            "sinusoidal_pos_embds": False,
        }
    if config.reserved_positions not in (0, pad_id + 1):
        raise UserError(
            f"Hugging Face's RoBERTa reserves padding id + 1 = {pad_id + 1} positions,"
            f" not {config.reserved_positions}"
        )
    architecture, model_type = (
        ("RobertaModel", "roberta") if config.reserved_positions else ("BertModel", "bert")
    )
    return shared | {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "type_vocab_size": config.num_token_types,
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_act": _ACTIVATION_NAMES[config.activation],
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "position_embedding_type": "absolute",
    }


def _describe_t5(config: T5Config, pad_id: int) -> dict[str, Any]:
    feed_forward = _ACTIVATION_NAMES[config.activation]
    if config.gated:
        if config.activation == "gelu":
            raise UserError(
                "Hugging Face's T5 has no gated exact gelu: its 'gated-gelu' is the tanh approximation"
            )
        feed_forward = "gated-gelu" if config.activation == "gelu_tanh" else f"gated-{feed_forward}"
    return {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "d_model": config.embed_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "dropout_rate": config.dropout_rate,
        "feed_forward_proj": feed_forward,
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": pad_id,
        "eos_token_id": 1,
    }

"""Cross-encoders from Hugging Face folders for sequence classification, sentence-transformers' ones too."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.data.pair_tokenizer import PairTokenizer
from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.interop import stored
from jaxir.interop.huggingface import hf, hub
from jaxir.interop.huggingface.weights import read_json, read_optional_json, read_tensors
from jaxir.models.cross_encoder import CrossEncoderConfig, CrossEncoderModel


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


class StoredCrossEncoder(NamedTuple):
    """A cross-encoder at rest.

    Attributes:
      config: what it is made of.
      params: float32 arrays by canonical name.
      tokenizer: its tokenizer.
      max_length: tokens of a pair that it reads, special ones included.
    """

    config: CrossEncoderConfig
    params: dict[str, np.ndarray]
    tokenizer: Tokenizer
    max_length: int


class LoadedCrossEncoder(NamedTuple):
    """A cross-encoder ready for use.

    Attributes:
      model: it.
      tokenizer: of pairs.
      max_length: tokens of a pair that it reads, special ones included.
      fingerprint: SHA-256 (hex) of parameters, architecture and tokenizer.
    """

    model: CrossEncoderModel
    tokenizer: PairTokenizer
    max_length: int
    fingerprint: str


def load(spec: str) -> LoadedCrossEncoder:
    """Loads a cross-encoder: BERT, RoBERTa or DistilBERT with a head of one label.

    Args:
      spec: `hf:` or `st:` and a local directory or hub name (of the owner cross-encoder, where `st:` is
        followed by a name without one).

    Raises:
      UserError: there is no such model, a file is missing or damaged, or it is no cross-encoder.
    """
    found = read(_directory(spec))
    fingerprint = stored.fingerprint(found)
    return LoadedCrossEncoder(_build(found), PairTokenizer(found.tokenizer), found.max_length, fingerprint)


def read(directory: Path) -> StoredCrossEncoder:
    """Reads a folder with config.json, weights and a tokenizer.

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
    config = CrossEncoderConfig(backbone=encoder.config, activation=head.activation)
    params = {f"encoder.{name}": value for name, value in encoder.params.items()}
    tokenizer = hf.read_tokenizer(directory, encoder)
    return StoredCrossEncoder(
        config=config,
        params=params | _read_head(directory, head, config.backbone.embed_dim),
        tokenizer=tokenizer,
        max_length=hf.max_length(directory, encoder),
    )


def _directory(spec: str) -> Path:
    kind, separator, name = spec.partition(":")
    if not separator or kind not in ("hf", "st"):
        raise UserError(f"{spec}: a cross-encoder is a Hugging Face folder or hub name: write hf:{spec}")
    return hub.resolve(name, default_owner="cross-encoder" if kind == "st" else None, check=hf.check)


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


def _build(found: StoredCrossEncoder) -> CrossEncoderModel:
    abstract = nnx.eval_shape(lambda: CrossEncoderModel(found.config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)

    def put(path: tuple[Any, ...], leaf: nnx.Variable) -> nnx.Variable:
        value = found.params[".".join(str(key.key) for key in path)]
        return leaf.replace(jnp.asarray(np.asarray(value, np.float32)))

    placed = jax.tree_util.tree_map_with_path(put, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graphdef, placed)

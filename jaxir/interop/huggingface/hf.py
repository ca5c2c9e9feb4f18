"""Hugging Face folders to encoders and back: BERT, MiniLM, DistilBERT, RoBERTa, T5.

Only the encoder is taken: poolers, pretraining heads and decoders are dropped, and a folder that is written
holds none. Every tensor that is taken comes out again bit for bit.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.interop import stored
from jaxir.interop.huggingface import hf_config
from jaxir.interop.huggingface.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    write_json,
    write_tensors,
)
from jaxir.interop.stored import StoredModel
from jaxir.models.bert import BertConfig
from jaxir.models.t5 import T5Config

# Module by module: our name, theirs. Kernels are transposed, all else is taken as it is (but see `_weights`).
_BERT = {
    "embeddings.token": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.*.attention.query": "encoder.layer.*.attention.self.query",
    "layers.*.attention.key": "encoder.layer.*.attention.self.key",
    "layers.*.attention.value": "encoder.layer.*.attention.self.value",
    "layers.*.attention.out": "encoder.layer.*.attention.output.dense",
    "layers.*.attention_norm": "encoder.layer.*.attention.output.LayerNorm",
    "layers.*.wi": "encoder.layer.*.intermediate.dense",
    "layers.*.wo": "encoder.layer.*.output.dense",
    "layers.*.mlp_norm": "encoder.layer.*.output.LayerNorm",
}
_DISTILBERT = {
    "embeddings.token": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.*.attention.query": "transformer.layer.*.attention.q_lin",
    "layers.*.attention.key": "transformer.layer.*.attention.k_lin",
    "layers.*.attention.value": "transformer.layer.*.attention.v_lin",
    "layers.*.attention.out": "transformer.layer.*.attention.out_lin",
    "layers.*.attention_norm": "transformer.layer.*.sa_layer_norm",
    "layers.*.wi": "transformer.layer.*.ffn.lin1",
    "layers.*.wo": "transformer.layer.*.ffn.lin2",
    "layers.*.mlp_norm": "transformer.layer.*.output_layer_norm",
}
_T5 = {
    "token": "shared",
    "relative_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "layers.*.attention_norm": "encoder.block.*.layer.0.layer_norm",
    "layers.*.attention.query": "encoder.block.*.layer.0.SelfAttention.q",
    "layers.*.attention.key": "encoder.block.*.layer.0.SelfAttention.k",
    "layers.*.attention.value": "encoder.block.*.layer.0.SelfAttention.v",
    "layers.*.attention.out": "encoder.block.*.layer.0.SelfAttention.o",
    "layers.*.mlp_norm": "encoder.block.*.layer.1.layer_norm",
    "layers.*.mlp.wi_0": "encoder.block.*.layer.1.DenseReluDense.wi_0",
    "layers.*.mlp.wi_1": "encoder.block.*.layer.1.DenseReluDense.wi_1",
    "layers.*.mlp.wo": "encoder.block.*.layer.1.DenseReluDense.wo",
    "norm": "encoder.final_layer_norm",
}
_DEFAULT_LENGTH = 512
# What a checkpoint may hold beside the encoder: heads, decoders and buffers.
_DROPPED = (
    "pooler.",
    "cls.",
    "lm_head",
    "classifier.",
    "pre_classifier.",
    "vocab_",
    "qa_outputs.",
    "decoder.",
    "embeddings.position_ids",
    "embeddings.token_type_ids",
    "encoder.embed_tokens.",
)


class _Weight(NamedTuple):
    """One tensor: its name there, and how its value changes on the way in and out."""

    name: str
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


class Encoder(NamedTuple):
    """An encoder read from a folder.

    Attributes:
      config: its shape.
      params: float32 arrays by the encoder's canonical names.
      pad_id: the folder's own padding id, which is exchanged with 0 here.
    """

    config: BertConfig | T5Config
    params: dict[str, np.ndarray]
    pad_id: int


def check(directory: Path) -> None:
    """Checks, before there are weights, that a folder with config.json holds one of our architectures.

    Raises:
      UserError: it does not.
    """
    hf_config.parse(read_json(directory / "config.json"), directory / "config.json")


def read_encoder(directory: Path) -> Encoder:
    """Reads a folder with config.json and weights (`weights.read_tensors` says in which formats).

    Raises:
      UserError: a file is missing or damaged, the architecture is not one of ours, or the two do not fit.
    """
    path = directory / "config.json"
    config, pad_id = hf_config.parse(read_json(path), path)
    return Encoder(config, _to_params(config, read_tensors(directory), pad_id, directory), pad_id)


def read_tokenizer(directory: Path, encoder: Encoder) -> Tokenizer:
    """Reads the tokenizer of a folder and checks that it belongs to the encoder.

    Raises:
      UserError: there is none, it pads with another id, or it has more ids than the encoder has vectors.
    """
    tokenizer = Tokenizer.load(directory)
    if (tokenizer.pad_swap or 0) != encoder.pad_id:
        raise UserError(
            f"{directory}: the tokenizer pads with id {tokenizer.pad_swap or 0},"
            f" config.json says {encoder.pad_id}"
        )
    if tokenizer.vocab_size > encoder.config.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} ids,"
            f" the model only {encoder.config.vocab_size}"
        )
    return tokenizer


def max_length(directory: Path, encoder: Encoder) -> int:
    """Returns the tokens at which texts are cut where only tokenizer_config.json says it."""
    limit = read_optional_json(directory / "tokenizer_config.json").get("model_max_length")
    # transformers writes 1e30 for "no limit".
    limit = _DEFAULT_LENGTH if limit is None or limit > 1_000_000 else int(limit)
    return min(limit, getattr(encoder.config, "max_positions", limit))


def write_encoder(
    directory: Path, config: BertConfig | T5Config, params: Mapping[str, np.ndarray], *, pad_id: int
) -> None:
    """Writes config.json and model.safetensors into `directory`; the inverse of `read_encoder`.

    Raises:
      UserError: Hugging Face has no architecture of this shape.
    """
    write_json(directory / "config.json", hf_config.describe(config, pad_id))
    write_tensors(directory / SINGLE, tensors_of(config, params, pad_id=pad_id))


def tensors_of(
    config: BertConfig | T5Config, params: Mapping[str, np.ndarray], *, pad_id: int
) -> dict[str, np.ndarray]:
    """Returns the tensors of an encoder as Hugging Face names and lays them out."""
    return {w.name: w.write(params[name]) for name, w in _weights(config, pad_id).items()}


def write_tower(directory: Path, model: StoredModel, *, tower: str) -> None:
    """Writes the encoder of one tower (an SDE's only one under either name) and the tokenizer.

    Raises:
      UserError: Hugging Face has no architecture of this shape.
    """
    prefix = "encoder." if model.config.sharing == "sde" else f"{tower}_encoder."
    params = {n.removeprefix(prefix): v for n, v in model.params.items() if n.startswith(prefix)}
    write_encoder(directory, model.config.backbone, params, pad_id=model.tokenizer.pad_swap or 0)
    model.tokenizer.save(directory)


def _to_params(
    config: BertConfig | T5Config, tensors: dict[str, np.ndarray], pad_id: int, directory: Path
) -> dict[str, np.ndarray]:
    weights = _weights(config, pad_id)
    tensors = _strip_prefix({_modern(name): value for name, value in tensors.items()}, config)
    if isinstance(config, T5Config):
        # One table under several names, of which a file may hold any. (In T5 1.1 lm_head's is another.)
        for alias in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            if alias in tensors:
                tensors.setdefault("shared.weight", tensors[alias])
    expected = {
        weights[name].name: weights[name].write(np.empty(shape, np.bool_)).shape
        for name, shape in stored.encoder_shapes(config).items()
    }
    tensors = {n: v for n, v in tensors.items() if n in expected or not n.startswith(_DROPPED)}
    stored.check_params(tensors, expected, str(directory))
    return {name: w.read(tensors[w.name].astype(np.float32)) for name, w in weights.items()}


def _modern(name: str) -> str:
    # BERT's first checkpoints have TensorFlow's names for these two.
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _strip_prefix(tensors: dict[str, np.ndarray], config: BertConfig | T5Config) -> dict[str, np.ndarray]:
    """Removes what a checkpoint with heads puts before the encoder's names ("bert.", "roberta.")."""
    bert, t5 = "embeddings.LayerNorm.weight", "encoder.final_layer_norm.weight"
    anchor = t5 if isinstance(config, T5Config) else bert
    prefixes = [name.removesuffix(anchor) for name in tensors if name.endswith(anchor)]
    prefix = min(prefixes, key=len, default="")
    if not prefix:
        return tensors
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def _weights(config: BertConfig | T5Config, pad_id: int) -> dict[str, _Weight]:
    """Returns each parameter's tensor, by canonical name."""
    modules = _T5 if isinstance(config, T5Config) else _BERT if config.num_token_types else _DISTILBERT
    if isinstance(config, T5Config) and not config.gated:
        modules = modules | {"layers.*.mlp.wi_0": "encoder.block.*.layer.1.DenseReluDense.wi"}
    weights = {}
    for name in stored.encoder_shapes(config):
        module, _, leaf = name.rpartition(".")
        layer = module.split(".")[1] if module.startswith("layers.") else ""
        pattern = module.replace(f"layers.{layer}.", "layers.*.", 1) if layer else module
        theirs = modules[pattern].replace("*", layer) + (".bias" if leaf == "bias" else ".weight")
        weights[name] = _Weight(theirs, *_transforms(config, pattern, leaf, pad_id))
    return weights


def _transforms(
    config: BertConfig | T5Config, module: str, leaf: str, pad_id: int
) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    if leaf == "kernel" or module == "relative_bias":
        return np.transpose, np.transpose
    if module in ("embeddings.token", "token") and pad_id:
        return (lambda x: _swap_rows(x, pad_id),) * 2
    if module == "embeddings.position" and config.reserved_positions:
        shift = config.reserved_positions
        return lambda x: np.roll(x, -shift, axis=0), lambda x: np.roll(x, shift, axis=0)
    return (lambda x: x,) * 2


def _swap_rows(table: np.ndarray, pad_id: int) -> np.ndarray:
    table = np.array(table)
    table[[0, pad_id]] = table[[pad_id, 0]]
    return table

"""Hugging Face folders to encoders and back, by the tables that each backbone brings (`models.codec`).

Only the encoder is taken: poolers, pretraining heads and decoders are dropped, and a folder that is written
holds none. Every tensor that is taken comes out again bit for bit.
"""

import collections
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, fits
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.huggingface import hf_config, tokenizer_files
from jaxir.interop.model import stored
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    write_json,
    write_tensors,
)
from jaxir.models.backbones import BackboneConfig
from jaxir.models.codec import Changed, Weights

_DEFAULT_LENGTH = 512
# Of the model's ids; tables of embeddings are rounded up a little.
_LEAST_SHARE = 0.8
_WRAPPED = re.compile(r"^encoder\.encoder\.(?:(block\.\d+\.)module\.|(embed_tokens\.|final_layer_norm\.))")
_Change = Callable[[np.ndarray], np.ndarray]


class _Tensor(NamedTuple):
    """One tensor there: the parameters here that it holds, one after the other along their last axis."""

    name: str
    ours: tuple[str, ...]
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]

    def take_apart(self, value: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        ends = np.cumsum([shapes[name][-1] for name in self.ours])[:-1]
        value = self.read(value)
        parts = np.split(value, ends, axis=-1) if len(ends) else [value]
        return dict(zip(self.ours, parts, strict=True))

    def put_together(self, params: Mapping[str, Any]) -> np.ndarray:
        parts = [params[name] for name in self.ours]
        return self.write(np.concatenate([np.asarray(p) for p in parts], axis=-1) if parts[1:] else parts[0])


class Encoder(NamedTuple):
    """An encoder read from a folder.

    Attributes:
      config: its shape.
      params: float32 arrays by the encoder's canonical names.
      pad_id: the folder's own padding id, which is exchanged with 0 here.
    """

    config: BackboneConfig
    params: dict[str, np.ndarray]
    pad_id: int

    @property
    def in_model(self) -> dict[str, Any]:
        """The parameters by their names in a model with one encoder."""
        return {f"encoder.{name}": value for name, value in self.params.items()}


def read_architecture(directory: Path) -> Encoder:
    """Reads config.json alone; there are no parameters.

    Raises:
      UserError: it is missing or damaged, or the architecture is not one of ours.
    """
    path = directory / "config.json"
    config, pad_id = hf_config.parse(read_json(path), path)
    return Encoder(config, {}, pad_id)


def read_encoder(directory: Path) -> Encoder:
    """Reads a folder with config.json and weights (`weights.read_tensors` says in which formats).

    Raises:
      UserError: a file is missing or damaged, the architecture is not one of ours, or the two do not fit.
    """
    found = read_architecture(directory)
    params = _to_params(found.config, read_tensors(directory), found.pad_id, directory)
    return found._replace(params=params)


def read_tokenizer(directory: Path, encoder: Encoder, *, lower_case: bool = False) -> Tokenizer:
    """Reads the tokenizer of a folder, with lower-casing before it if asked; it must fit the encoder.

    Raises:
      UserError: there is none, it pads with another id, it has more ids than the encoder has vectors, or as
        `tokenizer_files.load`.
    """
    tokenizer = tokenizer_files.load(directory)
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
    if tokenizer.vocab_size < _LEAST_SHARE * encoder.config.vocab_size and jax.process_index() == 0:
        print(
            f"warning: {directory}: the tokenizer has {tokenizer.vocab_size:,} ids, the model"
            f" {encoder.config.vocab_size:,}: are its files whole?",
            file=sys.stderr,
        )
    return tokenizer_files.lower_cased(tokenizer, directory) if lower_case else tokenizer


def max_length(directory: Path, encoder: Encoder) -> int:
    """Returns the tokens at which texts are cut where only tokenizer_config.json says it, or nothing does.

    Raises:
      UserError: what it says is no number of tokens.
    """
    path, positions = directory / tokenizer_files.CONFIG, encoder.config.max_positions
    limit = read_optional_json(path).get("model_max_length")
    # transformers writes 1e30 for "no limit".
    if limit is None or (isinstance(limit, int | float) and limit > 1_000_000):
        return positions or _DEFAULT_LENGTH
    if not fits(limit, Count):
        raise UserError(f"{path}: model_max_length is {limit!r:.40}, which is no number of tokens")
    return min(limit, positions or limit)


def write_encoder(
    directory: Path, config: BackboneConfig, params: Mapping[str, np.ndarray], *, pad_id: int
) -> None:
    """Writes config.json and model.safetensors into `directory`; the inverse of `read_encoder`.

    Raises:
      UserError: Hugging Face has no architecture of this shape.
    """
    write_json(directory / "config.json", hf_config.describe(config, pad_id))
    write_tensors(directory / SINGLE, tensors_of(config, params, pad_id=pad_id))


def tensors_of(
    config: BackboneConfig, params: Mapping[str, np.ndarray], *, pad_id: int
) -> dict[str, np.ndarray]:
    """Returns the tensors of an encoder as Hugging Face names and lays them out."""
    tensors = _tensors_of_encoder(config, stored.encoder_shapes(config), pad_id)
    return {tensor.name: tensor.put_together(params) for tensor in tensors}


def write_tower(directory: Path, model: StoredModel, *, tower: str) -> None:
    """Writes the encoder of one tower (an SDE's only one under either name) and the tokenizer.

    Raises:
      UserError: Hugging Face has no architecture of this shape.
    """
    params = encoder_of(model.params, "encoder." if model.config.sharing == "sde" else f"{tower}_encoder.")
    write_encoder(directory, model.config.backbone, params, pad_id=model.tokenizer.pad_swap or 0)
    save_tokenizer(directory, model, length_of(model, tower))


def encoder_of(params: Mapping[str, Any], prefix: str = "encoder.") -> dict[str, Any]:
    """Returns the parameters of an encoder in a model, by the encoder's own names."""
    return {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)}


def save_tokenizer(directory: Path, model: StoredModel, max_length: int) -> None:
    """Writes the tokenizer of a model that reads texts of at most so many tokens."""
    token_types = model.config.backbone.num_token_types > 1
    tokenizer_files.save(model.tokenizer, directory, max_length=max_length, token_types=token_types)


def length_of(model: StoredModel, tower: str) -> int:
    """Returns the tokens at which texts of a tower are cut: of an SDE's only one, the longer's."""
    lengths = {"query": model.settings.query_max_length, "passage": model.settings.passage_max_length}
    return max(lengths.values()) if model.config.sharing == "sde" else lengths[tower]


def read_part(
    directory: Path, weights: Weights, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Returns the parameters of another part of a model than its encoder, float32 by name.

    Args:
      directory: the folder.
      weights: the part's table.
      shapes: of its parameters.

    Raises:
      UserError: a file is missing or damaged, or a tensor missing or of another shape.
    """
    tensors, found = _tensors(weights, shapes), read_tensors(directory)
    expected = _shapes_there(tensors, shapes)
    found = {name: value for name, value in found.items() if name in expected}
    return _taken_apart(tensors, found, shapes, expected, directory)


def read_ending(directory: Path, tensors: Mapping[str, Any], end: str, missing: str) -> np.ndarray:
    """Returns the tensor whose name is `end`, with or without modules before it, float32.

    Raises:
      UserError: there is none; `missing` ends the sentence.
    """
    name = next((n for n in tensors if n == end or n.endswith(f".{end}")), None)
    if name is None:
        raise UserError(f"{directory}: no {end} among its weights{missing}")
    return np.array(tensors[name])


def tensors_of_part(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the tensors of such a part; the inverse of `read_part`."""
    return {tensor.name: tensor.put_together(params) for tensor in _tensors(weights, shapes)}


def _to_params(
    config: BackboneConfig, found: dict[str, np.ndarray], pad_id: int, directory: Path
) -> dict[str, np.ndarray]:
    codec, shapes = hf_config.codec_of(config), stored.encoder_shapes(config)
    tensors = _tensors_of_encoder(config, shapes, pad_id)
    expected = _shapes_there(tensors, shapes)
    found = _strip_prefix({modern(name): value for name, value in found.items()}, expected)
    for name, aliases in codec.aliases.items():
        for alias in aliases:  # of which a file may hold any
            if alias in found:
                found.setdefault(name, found[alias])
    found = {n: v for n, v in found.items() if n in expected or not n.startswith(codec.left_out)}
    return _taken_apart(tensors, found, shapes, expected, directory)


def _shapes_there(
    tensors: list[_Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    empty = {name: np.broadcast_to(np.False_, shape) for name, shape in shapes.items()}
    return {tensor.name: tensor.put_together(empty).shape for tensor in tensors}


def _taken_apart(
    tensors: list[_Tensor],
    found: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    directory: Path,
) -> dict[str, np.ndarray]:
    stored.check_params(found, expected, str(directory))
    params: dict[str, np.ndarray] = {}
    for tensor in tensors:
        params |= tensor.take_apart(found[tensor.name], shapes)
    return params


def is_wrapped(name: str) -> bool:
    """Whether a tensor is named as Fusion-in-Decoder's code names those of T5's encoder."""
    return _WRAPPED.match(name) is not None


def modern(name: str) -> str:
    """Returns a tensor's name of today.

    BERT's first checkpoints have TensorFlow's for those of a norm; Fusion-in-Decoder's (facebookresearch/FiD)
    have T5's encoder, and each of its blocks, in a wrapper.
    """
    name = _WRAPPED.sub(r"encoder.\1\2", name)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _strip_prefix(tensors: dict[str, np.ndarray], expected: Collection[str]) -> dict[str, np.ndarray]:
    """Removes what a checkpoint with heads puts before the encoder's names ("bert.", "roberta.")."""
    found: collections.Counter[str] = collections.Counter()
    for name in tensors:
        parts = name.split(".")
        for i in range(len(parts)):
            found[".".join([*parts[:i], ""])] += ".".join(parts[i:]) in expected
    # A file of which some are missing is of the form that has most of them.
    prefix = max(found, key=lambda prefix: (found[prefix], -len(prefix)), default="")
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def _tensors_of_encoder(
    config: BackboneConfig, shapes: Mapping[str, tuple[int, ...]], pad_id: int
) -> list[_Tensor]:
    """Returns the tensors that hold an encoder's parameters."""
    codec, table = hf_config.codec_of(config), f"{config.token_table}.embedding"
    tensors = _tensors(codec.weights(config), shapes, first_layer=codec.first_layer)
    if not pad_id:
        return tensors
    swap = _swap(pad_id)
    return [
        t._replace(read=_then(t.read, swap), write=_then(swap, t.write)) if t.ours == (table,) else t
        for t in tensors
    ]


def _tensors(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], *, first_layer: int = 0
) -> list[_Tensor]:
    """Returns the tensors that hold parameters, by a table of modules.

    Raises:
      UserError: a module is not in the table.
    """
    table, found = {}, {}
    for ours, theirs in weights.items():
        modules = (ours,) if isinstance(ours, str) else ours
        theirs = theirs if isinstance(theirs, Changed) else Changed(theirs, _same, _same)
        table |= dict.fromkeys(modules, (modules, theirs))
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        layer = (re.search(r"(?:^|\.)layers\.(\d+)\.", module) or ["", ""])[1]
        known = module.replace(f"layers.{layer}.", "layers.*.", 1) if layer else module
        if known not in table:
            raise UserError(
                f"the model's Hugging Face table has no counterpart of its module {known!r}: add it to"
                " `weights` (docs/adding_a_backbone.md)"
            )
        modules, theirs = table[known]
        ours = tuple(f"{m.replace('*', layer)}.{leaf}" for m in modules)
        number = str(int(layer) + first_layer) if layer else ""
        tensor = theirs.name.replace("*", number) + (".bias" if leaf == "bias" else ".weight")
        read, write = theirs.read, theirs.write
        if leaf == "kernel":
            read, write = _then(np.transpose, read), _then(write, np.transpose)
        found[tensor] = _Tensor(tensor, ours, read, write)
    return list(found.values())


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _then(first: _Change, second: _Change) -> _Change:
    return lambda x: second(first(x))


def _swap(pad_id: int) -> _Change:
    return lambda table: _swap_rows(table, pad_id)


def _swap_rows(table: np.ndarray, pad_id: int) -> np.ndarray:
    table = np.array(table)
    table[[0, pad_id]] = table[[pad_id, 0]]
    return table

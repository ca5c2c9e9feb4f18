"""Converts Hugging Face folders to encoders and back, by each backbone's tables (`models.codec`).

Only the encoder is read and written: poolers, pretraining heads and decoders are dropped. Tensors that are
read and written again are bit-identical.
"""

import collections
import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, fits
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.huggingface import hf_config, peft, tokenizer_files
from jaxir.interop.model import stored
from jaxir.interop.model.stored import Base, StoredModel
from jaxir.interop.weights.lazy import LazyArray
from jaxir.interop.weights.notes import note
from jaxir.interop.weights.weights import (
    SINGLE,
    read_json,
    read_optional_json,
    read_tensors,
    write_json,
    write_tensors,
)
from jaxir.models.adapters import Adapters
from jaxir.models.backbones import BackboneConfig
from jaxir.models.codec import Changed, HuggingFace, Weights

DEFAULT_LENGTH = 512  # maximum number of tokens per text if a folder states none
_LEAST_SHARE = 0.8  # warn if the tokenizer has fewer ids than this share of the table's rows
# The names of tensors of T5's encoder in Fusion-in-Decoder's checkpoints.
_WRAPPED = re.compile(r"^encoder\.encoder\.(?:(block\.\d+\.)module\.|(embed_tokens\.|final_layer_norm\.))")
_Change = Callable[[np.ndarray], np.ndarray]


class _Tensor(NamedTuple):
    """One tensor of a folder: the parameters that it holds, concatenated along their last axis."""

    name: str
    ours: tuple[str, ...]
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]

    def split(self, value: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        ends = np.cumsum([shapes[name][-1] for name in self.ours])[:-1]
        value = self.read(value)
        split = value.split if isinstance(value, LazyArray) else functools.partial(np.split, value, axis=-1)
        parts = split(ends) if len(ends) else [value]
        return dict(zip(self.ours, parts, strict=True))

    def join(self, params: Mapping[str, Any]) -> np.ndarray:
        parts = [params[name] for name in self.ours]
        return self.write(np.concatenate([np.asarray(p) for p in parts], axis=-1) if parts[1:] else parts[0])


class Encoder(NamedTuple):
    """An encoder of a folder: configuration, float32 arrays by canonical name, the folder's padding id.

    A folder of PEFT adds `adapters`, and the model that they adapt is `base`.
    """

    config: BackboneConfig
    params: dict[str, np.ndarray]
    pad_id: int
    adapters: Adapters | None = None
    base: Base | None = None

    @property
    def in_model(self) -> dict[str, Any]:
        """The parameters by their names in a model that has one encoder, "encoder.NAME"."""
        return {f"encoder.{name}": value for name, value in self.params.items()}


def read_architecture(directory: Path, pad_id: int | None = None) -> Encoder:
    """Reads only config.json; the returned encoder has no parameters.

    `pad_id` is the tokenizer's padding id. It replaces the one of config.json, which is often missing or
    wrong: most models ignore it, but some count positions from it.
    """
    path = directory / "config.json"
    config, named = hf_config.parse(read_json(path), path)
    codec = hf_config.codec_of(config)
    counted = codec.pad_id if codec.ignores_pad_id else named
    if codec.counts_from_padding and pad_id not in (None, counted):
        correct = "" if codec.ignores_pad_id else "pad_token_id in config.json or "
        raise UserError(
            f"{directory}: the tokenizer pads with id {pad_id}, but this model counts positions from id"
            f" {counted}: correct {correct}the tokenizer's pad_token"
        )
    return Encoder(config, {}, named if pad_id is None else pad_id)


def read_encoder(directory: Path, pad_id: int | None = None) -> Encoder:
    """Reads a folder with config.json and weights in a format of `weights.read_tensors`.

    For `pad_id` see `read_architecture`.
    """
    found = read_architecture(directory, pad_id)
    params = _to_params(found.config, read_tensors(directory), found.pad_id, directory)
    return found._replace(params=params)


def read(directory: Path, *, weights: bool = True) -> tuple[Encoder, Tokenizer]:
    """Reads a folder's encoder, without parameters if `weights` is False, and its tokenizer."""
    root = peft.base_directory(directory)
    read_architecture(root)  # checked first, because reading the tokenizer needs a supported model
    tokenizer = tokenizer_files.load(directory if tokenizer_files.has_one(directory) else root, root)
    encoder = (read_encoder if weights else read_architecture)(root, tokenizer.pad_swap or 0)
    if root != directory:
        left_out = hf_config.codec_of(encoder.config).left_out
        adapters, params = peft.read(directory, kernels_of(encoder.config, encoder.pad_id), left_out)
        params = encoder.params | params if weights else {}
        base = Base(f"hf:{peft.base_name(directory)}")
        encoder = encoder._replace(params=params, adapters=adapters, base=base)
    if tokenizer.vocab_size > encoder.config.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} ids,"
            f" the model only {encoder.config.vocab_size}: use the model's own tokenizer"
        )
    if tokenizer.vocab_size < _LEAST_SHARE * encoder.config.vocab_size:
        note(
            f"warning: {directory}: the tokenizer has {tokenizer.vocab_size:,} ids, the model"
            f" {encoder.config.vocab_size:,}: check that its files are complete"
        )
    return encoder, tokenizer


def max_length(directory: Path, encoder: Encoder) -> int:
    """Returns the maximum number of tokens per text in tokenizer_config.json, or a default."""
    path, positions = directory / tokenizer_files.CONFIG, encoder.config.max_positions
    path = path if path.is_file() else peft.base_directory(directory) / tokenizer_files.CONFIG
    limit = read_optional_json(path).get("model_max_length")
    # transformers writes 1e30 for no limit.
    if limit is None or (isinstance(limit, int | float) and limit > 1_000_000):
        return positions or DEFAULT_LENGTH
    if not fits(limit, Count):
        raise UserError(f"{path}: model_max_length is {limit!r:.40}, but must be a number of tokens")
    return min(limit, positions or limit)


def write_encoder(
    directory: Path, config: BackboneConfig, params: Mapping[str, np.ndarray], *, pad_id: int
) -> None:
    """Writes config.json and model.safetensors into `directory`; the inverse of `read_encoder`."""
    write_json(directory / "config.json", hf_config.describe(config, pad_id))
    write_tensors(directory / SINGLE, tensors_of(config, params, pad_id=pad_id))


def tensors_of(
    config: BackboneConfig, params: Mapping[str, np.ndarray], *, pad_id: int
) -> dict[str, np.ndarray]:
    """Returns the tensors of an encoder under Hugging Face's names and in its layout."""
    tensors = _tensors_of_encoder(config, stored.encoder_shapes(config), pad_id)
    return {tensor.name: tensor.join(params) for tensor in tensors}


def kernels_of(config: BackboneConfig, pad_id: int) -> dict[str, peft.Tensor]:
    """Returns the kernels of an encoder by their modules' names in transformers."""
    shapes = stored.encoder_shapes(config)
    return {
        t.name.removesuffix(".weight"): peft.Tensor(
            {name: shapes[name] for name in t.ours}, functools.partial(t.split, shapes=shapes), t.join
        )
        for t in _tensors_of_encoder(config, shapes, pad_id)
        if t.ours[0].endswith(".kernel")
    }


def write_tower(directory: Path, model: StoredModel, *, tower: str) -> None:
    """Writes the encoder of a tower and the tokenizer. For an SDE, `tower` may be either name.

    If the model has adapters, only these are written, as a folder of PEFT.
    """
    config, pad_id = model.config, model.tokenizer.pad_swap or 0
    params = encoder_of(model.params, "encoder." if config.sharing == "sde" else f"{tower}_encoder.")
    if config.adapters is None:
        write_encoder(directory, config.backbone, params, pad_id=pad_id)
    else:
        kernels = kernels_of(config.backbone, pad_id)
        peft.write(directory, model.base.spec.partition(":")[2], config.adapters, params, kernels)
    save_tokenizer(directory, model, length_of(model, tower))


def encoder_of(params: Mapping[str, Any], prefix: str = "encoder.") -> dict[str, Any]:
    """Returns the parameters of an encoder in a model, by the encoder's own names."""
    return {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)}


def save_tokenizer(directory: Path, model: StoredModel, max_length: int) -> None:
    """Writes the tokenizer of a model that reads texts of at most `max_length` tokens."""
    token_types = model.config.backbone.num_token_types > 1
    tokenizer_files.save(model.tokenizer, directory, max_length=max_length, token_types=token_types)


def length_of(model: StoredModel, tower: str) -> int:
    """Returns the maximum number of tokens of a tower's texts; in an SDE, the larger one of both sides."""
    lengths = {"query": model.settings.query_max_length, "passage": model.settings.passage_max_length}
    return max(lengths.values()) if model.config.sharing == "sde" else lengths[tower]


def read_part(
    directory: Path, weights: Weights, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Returns the float32 parameters of a part of a model, such as a decoder, by the part's table."""
    tensors, found = _tensors(weights, shapes), read_tensors(directory)
    expected = _shapes_there(tensors, shapes)
    found = {name: value for name, value in found.items() if name in expected}
    return _split_all(tensors, found, shapes, expected, directory)


def read_ending(directory: Path, tensors: Mapping[str, Any], end: str, missing: str) -> np.ndarray:
    """Returns the tensor named `end`, with or without modules before it; `missing` ends the error message."""
    name = next((n for n in tensors if n == end or n.endswith(f".{end}")), None)
    if name is None:
        raise UserError(f"{directory}: no {end} among its weights{missing}")
    return np.array(tensors[name])


def tensors_of_part(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the tensors of a part of a model, such as a decoder; the inverse of `read_part`."""
    return {tensor.name: tensor.join(params) for tensor in _tensors(weights, shapes)}


def _to_params(
    config: BackboneConfig, found: dict[str, np.ndarray], pad_id: int, directory: Path
) -> dict[str, np.ndarray]:
    codec, shapes = hf_config.codec_of(config), stored.encoder_shapes(config)
    tensors = _tensors_of_encoder(config, shapes, pad_id)
    expected = _shapes_there(tensors, shapes)
    found = _renamed({current_name(name): value for name, value in found.items()}, codec)
    found = _strip_prefix(found, expected)
    for name, aliases in codec.aliases.items():
        for alias in aliases:  # a file may name the tensor by any alias
            if alias in found:
                found.setdefault(name, found[alias])
    found = {n: v for n, v in found.items() if n in expected or not n.startswith(codec.left_out)}
    return _split_all(tensors, found, shapes, expected, directory)


def _shapes_there(
    tensors: list[_Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    empty = {name: np.broadcast_to(np.False_, shape) for name, shape in shapes.items()}
    return {tensor.name: tensor.join(empty).shape for tensor in tensors}


def _split_all(
    tensors: list[_Tensor],
    found: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    directory: Path,
) -> dict[str, np.ndarray]:
    stored.check_params(found, expected, str(directory))
    params: dict[str, np.ndarray] = {}
    for tensor in tensors:
        params |= tensor.split(found[tensor.name], shapes)
    return params


def is_wrapped(name: str) -> bool:
    """Whether a tensor has the name that Fusion-in-Decoder's code gives it in T5's encoder."""
    return _WRAPPED.match(name) is not None


def current_name(name: str) -> str:
    """Returns a tensor's current name.

    BERT's first checkpoints use TensorFlow's names for norms. Fusion-in-Decoder's checkpoints
    (facebookresearch/FiD) wrap T5's encoder and each of its blocks.
    """
    name = _WRAPPED.sub(r"encoder.\1\2", name)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _renamed(tensors: dict[str, np.ndarray], codec: HuggingFace) -> dict[str, np.ndarray]:
    """Returns tensors by their current names; splits tensors that older folders concatenate."""
    for pattern, *names in codec.renamed:
        found = {}
        for name, value in tensors.items():
            if re.search(pattern, name) is None:
                found[name] = value
                continue
            parts = [value]
            if names[1:]:  # split rows, which are columns of the transposed tensor
                size = value.shape[0] // len(names)
                parts = [x.T for x in value.T.split([size * i for i in range(1, len(names))])]
            found |= {re.sub(pattern, new, name): part for new, part in zip(names, parts, strict=True)}
        tensors = found
    return tensors


def _strip_prefix(tensors: dict[str, np.ndarray], expected: Collection[str]) -> dict[str, np.ndarray]:
    """Removes the prefix that a checkpoint with heads puts before the encoder's names ("bert.")."""
    found: collections.Counter[str] = collections.Counter()
    for name in tensors:
        parts = name.split(".")
        for i in range(len(parts)):
            found[".".join([*parts[:i], ""])] += ".".join(parts[i:]) in expected
    # If some names are missing, the prefix with the most matches is removed.
    prefix = max(found, key=lambda prefix: (found[prefix], -len(prefix)), default="")
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def _tensors_of_encoder(
    config: BackboneConfig, shapes: Mapping[str, tuple[int, ...]], pad_id: int
) -> list[_Tensor]:
    codec, table = hf_config.codec_of(config), f"{config.token_table}.embedding"
    tensors = _tensors(codec.weights(config), shapes, first_layer=codec.first_layer)
    if not pad_id:
        return tensors

    def swap(x: Any) -> Any:
        if isinstance(x, LazyArray):
            return x.exchanged(0, pad_id)
        x = np.array(x)
        x[[0, pad_id]] = x[[pad_id, 0]]
        return x

    return [
        t._replace(read=_compose(t.read, swap), write=_compose(swap, t.write)) if t.ours == (table,) else t
        for t in tensors
    ]


def _tensors(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], *, first_layer: int = 0
) -> list[_Tensor]:
    """Returns the tensors that hold parameters, by a table of modules."""
    table, found = {}, {}
    for ours, theirs in weights.items():
        modules = (ours,) if isinstance(ours, str) else ours
        theirs = theirs if isinstance(theirs, Changed) else Changed(theirs, _identity, _identity)
        table |= dict.fromkeys(modules, (modules, theirs))
    for name in shapes:
        layer = (re.search(r"(?:^|\.)layers\.(\d+)\.", name) or ["", ""])[1]
        number = str(int(layer) + first_layer) if layer else ""
        any_layer = name.replace(f"layers.{layer}.", "layers.*.", 1) if layer else name
        if any_layer in weights:  # the table has this parameter's full name, not its module's
            tensor = weights[any_layer].replace("*", number)
            found[tensor] = _Tensor(tensor, (name,), _identity, _identity)
            continue
        module, _, leaf = name.rpartition(".")
        known = module if module in table else any_layer.rpartition(".")[0]
        if known not in table:
            raise UserError(
                f"the model's Hugging Face table lacks its module {known!r}: add it to `weights`"
                " (docs/adding_a_backbone.md)"
            )
        modules, theirs = table[known]
        ours = tuple(f"{m.replace('*', layer)}.{leaf}" for m in modules)
        tensor = theirs.name.replace("*", number) + (".bias" if leaf == "bias" else ".weight")
        read, write = theirs.read, theirs.write
        if leaf == "kernel":
            read, write = _compose(np.transpose, read), _compose(write, np.transpose)
        found[tensor] = _Tensor(tensor, ours, read, write)
    return list(found.values())


def _identity(x: np.ndarray) -> np.ndarray:
    return x


def _compose(first: _Change, second: _Change) -> _Change:
    return lambda x: second(first(x))

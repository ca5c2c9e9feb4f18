"""Reads and writes folders of BGE-M3: an encoder and FlagEmbedding's heads (`hub_files.HYBRID_HEADS`)."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, sentence_transformers
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights import torch_writing, torch_zip
from jaxir.interop.weights.lazy import loaded
from jaxir.interop.weights.weights import require
from jaxir.models import layers
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.hybrid_encoder import HybridEncoderConfig, HybridPooling

_LENGTH = 512  # maximum tokens per text if there is no modules.json, as in FlagEmbedding 1.4
_SPARSE, _TOKENS = hub_files.HYBRID_HEADS
_UNKNOWN = ("<unk>", "[UNK]")
# Kind of model that a single head is -> name of the head's configuration, and name of its parameters.
_VIEWS = {
    "dual_encoder": ("dense", "encoder."),
    "sparse_encoder": ("lexical", "token_weight."),
    "multi_vector_encoder": ("multi_vector", "token_modules."),
}


def is_one(directory: Path) -> bool:
    """Returns whether a folder has the files of the sparse and the multi-vector head."""
    return all((directory / name).is_file() for name in hub_files.HYBRID_HEADS)


def check(directory: Path) -> None:
    """Checks, before weights are downloaded, that the encoder is supported."""
    hf.read_architecture(directory)


def read(directory: Path) -> StoredModel:
    """Reads a folder; lengths and prompts come from its modules.json, if it has one."""
    if not is_one(directory):
        raise UserError(f"{directory}: a hybrid encoder has {_SPARSE} and {_TOKENS}; give another model")
    settings = None
    if (directory / hub_files.ST_MODULES).is_file():
        settings = sentence_transformers.read(directory).settings
    encoder, tokenizer = hf.read(directory)
    if settings is None:
        length = min(_LENGTH, encoder.config.max_positions or _LENGTH)
        settings = EncoderSettings(query_max_length=length, passage_max_length=length)
    heads = {name: torch_zip.open_file(directory / name) for name in hub_files.HYBRID_HEADS}
    kernels = {name: loaded(require(heads[name], "weight", directory / name)).T for name in heads}
    biases = {name: loaded(require(heads[name], "bias", directory / name)) for name in heads}
    config = HybridEncoderConfig(
        backbone=encoder.config,
        token_dimension=kernels[_TOKENS].shape[1],
        **special_tokens(tokenizer),
    )
    params: dict[str, Any] = dict(encoder.in_model)
    for part, name in (("token_weight", _SPARSE), ("token_modules.0.linear", _TOKENS)):
        params |= {f"{part}.kernel": np.ascontiguousarray(kernels[name]), f"{part}.bias": biases[name]}
    stored.check_params(params, stored.model_shapes(config), str(directory))
    return StoredModel(config=config, params=params, tokenizer=tokenizer, settings=settings)


def with_new_heads(model: StoredModel, *, dimension: int | None, seed: int, where: str) -> StoredModel:
    """Returns a hybrid encoder: a dual encoder's encoder with new heads; leaves a hybrid encoder unchanged.

    Both new linear maps are drawn from N(0, 1 / width), without bias.

    Args:
      model: a dual encoder with one encoder, one pooling and nothing after it, or a hybrid encoder.
      dimension: dimension of a token's vector; None: the encoder's width.
      seed: seed of the new maps.
      where: the model's name, with which errors begin.

    Raises:
      UserError: the model is of another form, or `dimension` differs from a given hybrid encoder's.
    """
    config = model.config
    if isinstance(config, HybridEncoderConfig):
        if dimension not in (None, config.token_dimension):
            raise UserError(
                f"{where}: the tokens' vectors have {config.token_dimension} dimensions, so they cannot get a"
                f" projection to {dimension}: leave projection out"
            )
        return model
    of_text = getattr(config, "pooling", None)
    if (
        not isinstance(config, DualEncoderConfig)
        or config.sharing != "sde"
        or of_text not in get_args(HybridPooling)
    ):
        raise UserError(
            f"{where}: a hybrid encoder starts from one encoder with one pooling, not from"
            f" {config.summary}; give a dual encoder with sharing='sde' and mean or cls pooling"
        )
    width = config.backbone.output_dim
    made = HybridEncoderConfig(
        backbone=config.backbone,
        token_dimension=dimension or width,
        pooling=of_text,
        adapters=config.adapters,
        **({} if model.tokenizer is None else special_tokens(model.tokenizer)),  # it is None in planning
    )
    params = {name: x for name, x in model.params.items() if name.startswith("encoder.")}
    keys = jax.random.split(jax.random.key(seed))
    parts = {"token_weight": 1, "token_modules.0.linear": made.token_dimension}
    for (part, size), key in zip(parts.items(), keys, strict=True):
        params[f"{part}.kernel"] = np.asarray(layers.normal(width**-0.5)(key, (width, size)))
        params[f"{part}.bias"] = np.zeros(size, np.float32)
    settings = dataclasses.replace(model.settings, pools_prompts=True)
    return dataclasses.replace(model, config=made, params=params, settings=settings)


def write(directory: Path, model: StoredModel) -> None:
    """Writes a folder that sentence-transformers opens as a dual encoder, and FlagEmbedding by all heads."""
    sentence_transformers.write(directory, view(model, "dual_encoder"))
    for part, name in (("token_weight", _SPARSE), ("token_modules.0.linear", _TOKENS)):
        kernel, bias = (np.asarray(model.params[f"{part}.{end}"]) for end in ("kernel", "bias"))
        torch_writing.write_file(directory / name, {"weight": kernel.T, "bias": bias})


def special_tokens(tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Returns the fields of a `HybridEncoderConfig` that the tokenizer decides.

    A text's first token has no vector of its own, and the tokens around a text, padding and unknown tokens
    have no weight.
    """
    ends = tokenizer.encode_batch([""], max_length=8)[0].tolist()
    unknown = [tokenizer.id_of(token) for token in _UNKNOWN]
    unweighted = {i for i in (*ends, *unknown) if i not in (None, PADDING_TOKEN, 0)}
    return {"skipped": tuple(ends[:1]), "unweighted": tuple(sorted(unweighted))}


def view(model: StoredModel, kind: str | None) -> StoredModel:
    """Returns a hybrid encoder as a model of another kind, with only the parameters of that kind's head.

    If `kind` is None or no head is of this kind, the model itself is returned.
    """
    config = model.config
    if not isinstance(config, HybridEncoderConfig) or kind not in _VIEWS:
        return model
    head, prefix = _VIEWS[kind]
    params = {name: x for name, x in model.params.items() if name.startswith(("encoder.", prefix))}
    return dataclasses.replace(model, config=getattr(config, head), params=params)

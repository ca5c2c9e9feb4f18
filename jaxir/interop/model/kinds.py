"""The kinds of models: what differs between them when a model is read, checked, identified and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxir.core.errors import UserError
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.models.cross_encoder import CrossEncoderConfig
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.hybrid_encoder import HybridEncoderConfig
from jaxir.models.masked_lm import MaskedLMConfig
from jaxir.models.multi_vector import MultiVectorConfig
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.models.sparse_config import SparseConfig

# MaskedLMConfig is not a storable kind: only objectives load it.
ModelConfig = (
    DualEncoderConfig
    | CrossEncoderConfig
    | Seq2SeqConfig
    | SparseConfig
    | MultiVectorConfig
    | HybridEncoderConfig
    | MaskedLMConfig
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Attributes:
      config: the class of its configurations.
      what: its description in messages.
      lengths: maps settings to {name of the setting: maximum number of tokens per input}; `lengths_of_sides`
        for encoders of queries and passages.
      of_tokenizer: fields of the configuration that the tokenizer decides, excluded from fingerprints.
      since: fields that a later version added, with the value that all earlier models have. A field with
        this value is excluded from fingerprints.
    """

    config: type[Any]
    what: str
    lengths: Callable[[EncoderSettings], dict[str, int]]
    of_tokenizer: tuple[str, ...] = ()
    since: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def lengths_of_sides(settings: EncoderSettings) -> dict[str, int]:
    """Returns the maximum numbers of tokens of queries and passages, by the names of the settings."""
    return {
        "query_max_length": settings.query_max_length,
        "passage_max_length": settings.passage_max_length,
    }


KINDS = {
    "dual_encoder": Kind(
        config=DualEncoderConfig,
        what="a dual encoder, which makes vectors of texts",
        lengths=lengths_of_sides,
        of_tokenizer=("query_prompt_tokens", "passage_prompt_tokens"),
        since={"after_pooling": (), "layers_from": None, "adapters": None},
    ),
    "cross_encoder": Kind(
        config=CrossEncoderConfig,
        what="a cross-encoder, which scores pairs of texts (jaxir.rerank)",
        lengths=lambda s: {"query_max_length + passage_max_length": s.pair_max_length},
        of_tokenizer=("separator",),
        since={"pooling": "cls", "normed": False, "adapters": None},
    ),
    "seq2seq": Kind(
        config=Seq2SeqConfig,
        what="a generator, which writes texts (jaxir.expand)",
        lengths=lengths_of_sides,
        since={"adapters": None},
    ),
    "sparse_encoder": Kind(
        config=SparseConfig,
        what="a sparse encoder, which makes token weights of texts (jaxir.SparseEncoder)",
        lengths=lengths_of_sides,
        of_tokenizer=("query_prompt_tokens", "passage_prompt_tokens"),
        since={
            "transform": True,
            "norm_bias": True,
            "tied": True,
            "factors": False,
            "frozen": False,
            "normalized": False,
            "score": "dot",
        },
    ),
    "multi_vector_encoder": Kind(
        config=MultiVectorConfig,
        what="a multi-vector encoder, which makes a vector of each token (jaxir.MultiVectorEncoder)",
        lengths=lengths_of_sides,
        since={"pooling": None},
    ),
    "hybrid_encoder": Kind(
        config=HybridEncoderConfig,
        what="a hybrid encoder, which makes a vector, token weights and token vectors (jaxir.HybridEncoder)",
        lengths=lengths_of_sides,
    ),
}


def register(name: str, kind: Kind) -> None:
    """Registers a kind of model, perhaps one outside jaxir, so that models of `kind.config` can be stored.

    Args:
      name: the name of the kind in `jaxir.json`.
      kind: the kind. Its configuration is a frozen dataclass with the field `backbone`, the properties
        `summary` and `make`, as those in `jaxir.models`.

    Raises:
      UserError: another kind has this name.
    """
    if name in KINDS and KINDS[name].config.__name__ != kind.config.__name__:
        raise UserError(f"there is already a kind of model {name!r}: give the new one another name")
    KINDS[name] = kind


def name_of(config: ModelConfig) -> str:
    """Returns the name of a model's kind.

    Raises:
      UserError: no kind has such a configuration.
    """
    # One form of sparse encoder is also a dual encoder, so the later, more special kinds are tried first.
    for name, kind in reversed(KINDS.items()):
        if isinstance(config, kind.config):
            return name
    raise UserError(
        f"{type(config).__name__} describes no kind of model that is known: register it with"
        " jaxir.interop.model.kinds.register"
    )


def of(config: ModelConfig) -> Kind:
    return KINDS[name_of(config)]

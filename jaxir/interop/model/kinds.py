"""The kinds of models: what differs between them when a model is read, checked, identified and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.models.cross_encoder import CrossEncoderConfig
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.masked_lm import MaskedLMConfig
from jaxir.models.multi_vector import MultiVectorConfig
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.models.sparse_config import SparseConfig

# MaskedLMConfig is not a storable kind: only objectives load it.
ModelConfig = (
    DualEncoderConfig | CrossEncoderConfig | Seq2SeqConfig | SparseConfig | MultiVectorConfig | MaskedLMConfig
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Attributes:
      config: the class of its configurations.
      what: its description in messages.
      lengths: maps settings to {name of the setting: maximum number of tokens per input}.
      of_tokenizer: fields of the configuration that the tokenizer decides, excluded from fingerprints.
      since: fields that a later version added, with the value that all earlier models have. A field with
        this value is excluded from fingerprints.
    """

    config: type[Any]
    what: str
    lengths: Callable[[EncoderSettings], dict[str, int]]
    of_tokenizer: tuple[str, ...] = ()
    since: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _of_either(settings: EncoderSettings) -> dict[str, int]:
    return {
        "query_max_length": settings.query_max_length,
        "passage_max_length": settings.passage_max_length,
    }


KINDS = {
    "dual_encoder": Kind(
        config=DualEncoderConfig,
        what="a dual encoder, which makes vectors of texts",
        lengths=_of_either,
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
        lengths=_of_either,
        since={"adapters": None},
    ),
    "sparse_encoder": Kind(
        config=SparseConfig,
        what="a sparse encoder, which makes token weights of texts (jaxir.SparseEncoder)",
        lengths=_of_either,
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
        lengths=_of_either,
        since={"pooling": None},
    ),
}


def name_of(config: ModelConfig) -> str:
    """Returns the name of a model's kind."""
    # A form of sparse encoders is a special dual encoder, so later kinds come first.
    return next(name for name, kind in reversed(KINDS.items()) if isinstance(config, kind.config))


def of(config: ModelConfig) -> Kind:
    return KINDS[name_of(config)]

"""The kinds of models: what is particular to one while it is read, checked, identified and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxir.models.cross_encoder import CrossEncoderConfig
from jaxir.models.dual_encoder import DualEncoderConfig

if TYPE_CHECKING:
    from jaxir.interop.stored import EncoderSettings

ModelConfig = DualEncoderConfig | CrossEncoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Attributes:
      config: the class that says what one is made of.
      what: what it is, for messages.
      lengths: settings -> the tokens of each of its inputs, by what sets them.
      of_tokenizer: fields of the configuration that the tokenizer decides: no part of a fingerprint.
      since: fields that came later, with what all models had before: with it no part of a fingerprint.
    """

    config: type[Any]
    what: str
    lengths: Callable[[EncoderSettings], dict[str, int]]
    of_tokenizer: tuple[str, ...] = ()
    since: Mapping[str, Any] = dataclasses.field(default_factory=dict)


KINDS = {
    "dual_encoder": Kind(
        config=DualEncoderConfig,
        what="a dual encoder, which makes vectors of texts",
        lengths=lambda s: {
            "query_max_length": s.query_max_length,
            "passage_max_length": s.passage_max_length,
        },
    ),
    "cross_encoder": Kind(
        config=CrossEncoderConfig,
        what="a cross-encoder, which scores pairs of texts (jaxir.rerank)",
        lengths=lambda s: {"query_max_length + passage_max_length": s.pair_max_length},
        of_tokenizer=("separator",),
        since={"pooling": "cls", "normed": False},
    ),
}


def name_of(config: ModelConfig) -> str:
    """Returns the name of a model's kind."""
    return next(name for name, kind in KINDS.items() if isinstance(config, kind.config))


def of(config: ModelConfig) -> Kind:
    """Returns a model's kind."""
    return KINDS[name_of(config)]

"""How a backbone says what a Hugging Face folder calls its settings and weights: tables, read both ways.

`interop.huggingface` reads and writes folders by them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_REQUIRED = object()


class Entry(NamedTuple):
    """An entry of config.json.

    Attributes:
      name: of the entry.
      default: where the file lacks it.
      values: theirs -> ours, where they differ; of several for one of ours the first is written.
    """

    name: str
    default: Any = _REQUIRED
    values: Mapping[str, Any] | None = None

    @property
    def required(self) -> bool:
        """Whether a file must have it."""
        return self.default is _REQUIRED


class Changed(NamedTuple):
    """A module of theirs whose arrays are not ours (kernels transposed) but a function of them."""

    name: str
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


# Modules of ours -> a module of theirs; "*" is the layer's number. Several of ours lie there one after the
# other along the output (a fused projection). Kernels (theirs are transposed), biases, tables, scales follow.
Weights = Mapping[str | tuple[str, ...], str | Changed]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The folders of one `model_type`.

    Attributes:
      model_type: of config.json.
      architecture: the class of the encoder alone, there.
      entries: field of ours -> entry of config.json, or its name where the file must have it and the values
        are the same.
      weights: from the configuration to the tables of weights.
      implied: field -> the value that every such model has. A model with another is not written.
      fixed: entry -> its one value. A folder with another is not read.
      written: entries that are written and not read.
      read_more: from config.json and the padding id to the fields that `entries` cannot say; a ValueError
        refuses the folder.
      write_more: from the configuration and the padding id to such entries; a ValueError refuses the model.
      pad_id: the padding id where config.json has none.
      first_layer: the number there of `layers.0`.
      aliases: tensor -> other names under which a folder may have it.
      left_out: beginnings of the names of tensors that are no part of the encoder (heads, buffers).
      masked_lm: `dense`, `norm` and `bias` of a masked language model's head -> their modules; empty where
        there is none.
    """

    model_type: str
    architecture: str
    entries: Mapping[str, str | Entry]
    weights: Callable[[Any], Weights]
    implied: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read_more: Callable[[Mapping[str, Any], int], dict[str, Any]] = lambda content, pad_id: {}
    write_more: Callable[[Any, int], dict[str, Any]] = lambda config, pad_id: {}
    pad_id: int = 0
    first_layer: int = 0
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    masked_lm: Mapping[str, str] = dataclasses.field(default_factory=dict)

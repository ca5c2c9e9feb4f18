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
class ScoreHead:
    """The head of a model for sequence classification with one label: two layers over the encoder's output.

    Attributes:
      pooler: the module there of the first layer. A folder may have more before it ("bert.").
      classifier: of the second layer.
      activations: what may lie between the layers; a folder that names none has the first.
      norm: the module of a norm between the layers, which then have no biases; None for no norm.
      prefix: what a folder that is written has before the encoder's names.
      pooler_prefix: before the pooler's name.
      poolings: what the head may read; a folder that names none has the first.
      entries: `pooling` or `activation` -> entry of config.json that names it.
      fixed: entry -> its one value. A folder with another is not read.
      widths: entries whose value is the encoder's width.
      written: entries that are written and not read.
    """

    pooler: str
    classifier: str = "classifier"
    activations: tuple[str, ...]
    norm: str | None = None
    prefix: str
    pooler_prefix: str = ""
    poolings: tuple[str, ...] = ("cls",)
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    widths: tuple[str, ...] = ()
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
      masked_lm_activation: of that head; None for the encoder's own.
      score_head: the head that scores pairs; None where there is none.
      begins: whether texts begin with a special token, which a new head reads; else it reads the mean.
      tokenizer_class: the class of transformers that reads the tokenizer of a folder that names no class.
      heeds_tokenizer_class: whether the class that a folder names decides how its tokenizer is read.
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
    masked_lm_activation: str | None = None
    score_head: ScoreHead | None = None
    begins: bool = True
    tokenizer_class: str = ""
    heeds_tokenizer_class: bool = True

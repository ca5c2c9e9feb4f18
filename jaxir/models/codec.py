"""Tables that map a backbone's settings and weights to a Hugging Face folder, and back.

`interop.huggingface` reads and writes folders with these tables.
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
      name: name of the entry.
      default: the value if the file lacks the entry.
      values: Hugging Face's value -> jaxir's, if they differ. If several map to the same one, the first is
        written.
    """

    name: str
    default: Any = _REQUIRED
    values: Mapping[str, Any] | None = None

    @property
    def required(self) -> bool:
        return self.default is _REQUIRED


class Changed(NamedTuple):
    """A module of a Hugging Face folder whose arrays are a function of jaxir's, not just transposed."""

    name: str
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


# Name of jaxir's module -> name of Hugging Face's module; "*" is the number of the layer. Several modules of
# jaxir are concatenated along the output (a fused projection). An entry covers a module's kernel
# (transposed), bias, table and scale. If a tensor's name does not end in ".weight" or ".bias", its entry is
# for the parameter alone: the parameter's whole name -> the tensor's whole name.
Weights = Mapping[str | tuple[str, ...], str | Changed]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreHead:
    """The head of a sequence classification model with one label: two layers over the encoder's output.

    Attributes:
      pooler: the module of the first layer. A folder may prefix it ("bert.").
      classifier: the module of the second layer.
      activations: possible activations between the layers; a folder that names none uses the first.
      norm: the module of a norm between the layers; it and the first layer have no bias. None: no norm.
      prefix: prefix of the encoder's names in a written folder.
      pooler_prefix: prefix of the pooler's name in a written folder.
      poolings: possible poolings of the encoder's output; a folder that names none uses the first.
      entries: `pooling` or `activation` -> entry of config.json that names it.
      fixed: entry -> its only supported value. A folder with another value is refused.
      widths: entries whose value is the encoder's width.
      written: entries that are written but never read.
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
class TokenHead:
    """The head of a masked language model: a dense layer, a norm, and products with the tokens' vectors.

    Attributes:
      dense: the module of the dense layer; None: the model has neither dense layer nor norm.
      norm: the module of the norm.
      decoder: the module of the products.
      bias: the module with the bias of the logits, if the decoder has none.
      prefix: prefix of the encoder's names in a written folder.
      activation: activation after the dense layer; None: the encoder's.
      activation_entry: entry of config.json that names the activation; empty: `activation` is always used.
      norm_bias: whether the norm has a bias.
      lacks_biases: whether a folder may lack the biases of the dense layer and of the logits, which are then
        0.
      tied: whether the decoder shares the encoder's token vectors if config.json has no entry for it.
      renamed: (pattern, new name) for tensors that have another name in some folders.
      written: entries of config.json that are written but never read.
    """

    dense: str | None
    norm: str | None
    decoder: str
    bias: str
    prefix: str
    activation: str | None = None
    activation_entry: str = ""
    norm_bias: bool = True
    lacks_biases: bool = False
    tied: bool = True
    renamed: tuple[tuple[str, str], ...] = ()
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The folders of one `model_type`.

    Attributes:
      model_type: `model_type` in config.json.
      architecture: the class in transformers of the encoder without a head.
      entries: jaxir's field -> entry of config.json; a plain name is a required entry with the same values.
      weights: function that maps the configuration to the table of weights.
      implied: field -> the value that every model of this type has. A model with another cannot be written.
      fixed: entry -> its only supported value. A folder with another value is refused.
      written: entries that are written but never read.
      read_more: function that maps config.json and the padding id to fields that `entries` cannot express; a
        ValueError refuses the folder.
      write_more: reverse of `read_more`, from configuration and padding id; a ValueError refuses the model.
      pad_id: the padding id if config.json has none.
      first_layer: the number in the folder of jaxir's `layers.0`.
      aliases: tensor -> other names that a folder may give it.
      renamed: (pattern, new names...) for tensors with another name in older folders, applied in this order
        with `re.sub`. A tensor with several new names is split into as many equal parts along its first
        dimension.
      renamed_entries: entry of older config.json files -> today's name, used if the file lacks the latter.
      text_entry: the object of config.json that has the settings of the text model, in folders that also hold
        models of images or sound; empty: config.json itself.
      counts_from_padding: whether the model counts positions from its padding id, so that the tokenizer must
        have the same padding id.
      ignores_pad_id: whether the model counts positions from `pad_id` even if config.json has another.
      left_out: prefixes of tensors that do not belong to the encoder (heads, buffers).
      token_head: the head of a masked language model; None: no such head.
      score_head: the head that scores pairs; None: no such head.
      begins: whether texts begin with a special token. A new head reads this token's vector if there is one,
        else the mean of all.
      tokenizer_class: the class of transformers that reads the tokenizer, if the folder names none.
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
    renamed: tuple[tuple[str, ...], ...] = ()
    renamed_entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    text_entry: str = ""
    counts_from_padding: bool = False
    ignores_pad_id: bool = False
    left_out: tuple[str, ...] = ()
    token_head: TokenHead | None = None
    score_head: ScoreHead | None = None
    begins: bool = True
    tokenizer_class: str = ""
    heeds_tokenizer_class: bool = True

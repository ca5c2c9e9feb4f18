"""What all exports share: a model's programs, README.md and jaxir_export.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.model import kinds
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import LoadedModel
from jaxir.models import any_length

if TYPE_CHECKING:
    import tensorflow as tf


class ExportedModel(NamedTuple):
    """A model to export, and its name as the user gave it."""

    name: str
    model: Any
    tokenizer: Tokenizer
    settings: EncoderSettings
    fingerprint: str

    @classmethod
    def of(cls, name: str, loaded: LoadedModel) -> ExportedModel:
        """Describes a loaded model, whose encoder must accept any number and length of texts."""
        if fault := any_length.export_error(loaded.model):
            raise UserError(fault)
        return cls(name, loaded.model, loaded.tokenizer, loaded.settings, loaded.fingerprint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedFunction:
    """A function of a model, from the tokens of one text or of a pair of texts to numbers.

    Attributes:
      name: its name.
      compute: maps a model and one int32 array [B, L] for each of `inputs` to float32 [B, D] or [B]. Programs
        that compute the same share one function.
      inputs: "ids", whose padding is 0, and "token_types" if the model reads them.
      output: the output's name, "vectors" or "scores".
      shape: the output's shape, as text.
      texts: the prompt of each tokenised text, by the text's name.
      max_length: maximum number of tokens per text or pair, special tokens included.
    """

    name: str
    compute: Callable[..., jax.Array]
    inputs: tuple[str, ...] = ("ids",)
    output: str
    shape: str
    texts: Mapping[str, str]
    max_length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a kind of model is exported; `output_note` and `limits_note` go into sentences of the README."""

    what: str
    output_note: str
    limits_note: str
    facts: Mapping[str, Any]
    programs: tuple[ExportedFunction, ...]


class Signature(NamedTuple):
    """A SavedModel's signature: its function, and the types of its inputs and outputs by name."""

    function: Any
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class GraphSearch(Protocol):
    """An index as TensorFlow operations (see `retrieval.saved_search`).

    Attributes:
      state: the TensorFlow object that a SavedModel must hold for the index.
      packages: the packages whose operations the index uses.
      about: a sentence about the index for the README.
      k: number of documents returned per query.
    """

    state: Any
    packages: tuple[str, ...]
    about: str
    k: int

    def __call__(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (document ids, string [B, K], scores, float32 [B, K]) of vectors [B, D]."""


def form_of(source: ExportedModel) -> Form:
    """Returns how a model is exported; refuses kinds of models that cannot be exported."""
    form = _FORMS.get(kinds.name_of(source.model.config))
    if form is None:
        what = kinds.of(source.model.config).what
        raise UserError(f"{source.name} is {what}; it cannot be exported as a graph: use --format=hf")
    return form(source)


def _of_towers(source: ExportedModel) -> Form:
    config, settings = source.model.config, source.settings

    def encoder(tower: str) -> Callable[..., jax.Array]:
        return lambda model, ids: model.encode(ids, tower=tower)

    query = encoder("query")
    how = {"output": "vectors", "shape": f"[B, {config.dimension}]"}
    programs = (
        ExportedFunction(
            name="query",
            compute=query,
            texts={"texts": settings.query_prompt},
            max_length=settings.query_max_length,
            **how,
        ),
        ExportedFunction(
            name="passage",
            compute=query if config.sharing == "sde" else encoder("passage"),
            texts={"texts": settings.passage_prompt},
            max_length=settings.passage_max_length,
            **how,
        ),
    )
    return Form(
        what="A dual encoder",
        output_note=f"Vectors have {config.dimension} dimensions and are compared by {config.similarity}",
        limits_note=f"queries are truncated to {settings.query_max_length} tokens"
        + (f" and begin with the prompt {settings.query_prompt!r}" if settings.query_prompt else "")
        + f", passages to {settings.passage_max_length}"
        + (f" and begin with {settings.passage_prompt!r}" if settings.passage_prompt else ""),
        facts={"similarity": config.similarity},
        programs=programs,
    )


def _of_pairs(source: ExportedModel) -> Form:
    config, settings = source.model.config, source.settings
    if settings.reads != "pair":
        raise UserError("a reranker of queries cannot be exported as a graph; use it in jaxir.expand rerank")

    def score(model: nnx.Module, ids: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        return model.score(ids, jnp.zeros_like(ids) if token_types is None else token_types)

    prompts = {"queries": settings.query_prompt, "passages": settings.passage_prompt}
    program = ExportedFunction(
        name="score",
        compute=score,
        inputs=("ids", "token_types") if config.backbone.num_token_types > 1 else ("ids",),
        output="scores",
        shape="[B]",
        texts=prompts,
        max_length=settings.pair_max_length,
    )
    return Form(
        what="A cross-encoder",
        output_note="Scores of a query and a passage are logits; a higher score is more relevant",
        limits_note=f"a query and its passage are together truncated to {program.max_length} tokens"
        + "".join(f"; {name} begin with the prompt {prompt!r}" for name, prompt in prompts.items() if prompt),
        facts={},
        programs=(program,),
    )


_FORMS = {"dual_encoder": _of_towers, "cross_encoder": _of_pairs}


def check_backend(what: str) -> None:
    """Refuses accelerators, because exported graphs would need their kernels."""
    if jax.default_backend() != "cpu":
        raise UserError(
            f"{what} must be written by JAX on the CPU, not on {jax.default_backend()}, whose kernels other"
            " platforms lack: set JAX_PLATFORMS=cpu"
        )


def describe(source: ExportedModel, format: str) -> list[str]:
    """Returns the first lines of a README: which model was exported, in which `format`."""
    form = form_of(source)
    return [
        f"# {source.name}",
        "",
        f"{form.what}, written by jaxir as {format}. Fingerprint: `{source.fingerprint}`.",
        f"{form.output_note}; matrix products are {source.model.config.backbone.dtype}.",
    ]


def write(directory: Path, source: ExportedModel, readme: Sequence[str], **facts: Any) -> None:
    """Writes README.md, and jaxir_export.json with `facts` and the entries of every export."""
    (directory / "README.md").write_text("\n".join(readme) + "\n", encoding="utf-8")
    content = {
        "model": source.name,
        "fingerprint": source.fingerprint,
        **facts,
        "dtype": source.model.config.backbone.dtype,
        **form_of(source).facts,
    }
    (directory / "jaxir_export.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Pretrained parts of an objective: a frozen model, or the initial weights of a head."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.models import layers
from jaxir.models.masked_lm import MaskedLanguageModel, MaskedLMConfig, MaskedLMHead
from jaxir.models.projector import TanhProjector

_PROMPTS = ("query_prompt", "passage_prompt")


@runtime_checkable
class MaskedLMSource(Protocol):
    """A stored masked language model, such as `PretrainedMaskedLM` of jaxir.interop.build."""

    source: str

    def outline(self) -> MaskedLMConfig:
        """Returns the configuration of the masked language model, without reading its weights."""

    def build(self) -> tuple[MaskedLanguageModel, str]:
        """Reads the masked language model; returns the model and the fingerprint of its vocabulary."""


@runtime_checkable
class GuideSource(Protocol):
    """A stored dual encoder, such as `PretrainedGuide` of jaxir.interop.build."""

    source: str

    def outline(self) -> tuple[Any, Any]:
        """Returns the configuration and the settings of the dual encoder, without its weights."""

    def build(self) -> Any:
        """Reads the dual encoder; returns a `LoadedModel`."""


@runtime_checkable
class PoolerSource(Protocol):
    """A stored BERT pooler, such as `PretrainedPooler` of jaxir.interop.build."""

    source: str

    def read(self) -> dict[str, np.ndarray]:
        """Reads the pooler's arrays: `kernel` [D, D] and `bias` [D]."""


def masked_lm_for(
    model: Any, source: MaskedLMSource, *, form: TextFormat, length: int, rngs: nnx.Rngs
) -> MaskedLanguageModel:
    """Returns a masked language model that accepts an encoder's token ids, up to `length` per text.

    If `model`, the encoder, has shapes but no values (in `jaxir.plan`), so has the result.
    """
    config = source.outline()
    limit = config.backbone.max_positions
    if limit is not None and length > limit:
        raise UserError(
            f"{source.source} reads at most {limit} tokens, and texts have up to {length}: reduce"
            " PASSAGE_LENGTH, or give another masked language model"
        )
    if layers.is_abstract(model):
        return config.make(rngs=rngs)
    found, vocabulary = source.build()
    if vocabulary != form.vocabulary:
        raise UserError(
            f"{source.source} has another vocabulary than the model that is trained, so the same token ids"
            " mean other words: give a masked language model with the tokenizer of the trained model"
        )
    return found


def guide_for(model: Any, source: GuideSource, *, form: TextFormat, rngs: nnx.Rngs) -> nnx.Module:
    """Returns a dual encoder that reads the token ids of the texts of `form`.

    If `model`, the trained model, has shapes but no values (in `jaxir.plan`), so has the result.
    """
    abstract = layers.is_abstract(model)
    loaded = None if abstract else source.build()
    config, settings = source.outline() if abstract else (loaded.model.config, loaded.settings)
    limit, length = config.backbone.max_positions, max(form.query_length, form.passage_length)
    if limit is not None and length > limit:
        raise UserError(
            f"the guide {source.source} reads at most {limit} tokens, and texts have up to {length}: reduce"
            " QUERY_LENGTH and PASSAGE_LENGTH, or give another guide"
        )
    prompts = [(name, getattr(settings, name), getattr(form, name)) for name in _PROMPTS]
    for name, of_guide, of_model in prompts:
        if of_guide != of_model:
            raise UserError(
                f"the guide {source.source} has the {name} {of_guide!r}, and the trained model {of_model!r},"
                " but both read the same tokens: give a guide with the prompts of the trained model"
            )
    if loaded is None:
        return config.make(rngs=rngs)
    if loaded.tokenizer.vocabulary != form.vocabulary:
        raise UserError(
            f"the guide {source.source} has another vocabulary than the model that is trained, so the same"
            " token ids mean other words: give a guide with the tokenizer of the trained model"
        )
    return loaded.model


def pooler_for(model: Any, source: PoolerSource | None, *, rngs: nnx.Rngs) -> TanhProjector:
    """Returns a pooler of an encoder's vectors, initialised from `source`, or at random if that is None."""
    made = TanhProjector(model.config.dimension, rngs=rngs)
    if source is None or layers.is_abstract(model):
        return made
    for name, value in source.read().items():
        parameter = getattr(made.dense, name)
        if value.shape != parameter[...].shape:
            raise UserError(
                f"the pooler of {source.source} is for vectors of {len(value)} numbers, but the encoder's"
                f" vectors have {model.config.dimension}: give a pooler of the same size, or none"
            )
        parameter[...] = jnp.asarray(value)
    return made


def head_for(model: Any, source: MaskedLMSource | None, *, form: TextFormat, rngs: nnx.Rngs) -> MaskedLMHead:
    """Returns an output head (masked LM) for an encoder, from `source`, or random if that is None."""
    backbone = model.config.backbone
    if source is None:
        return MaskedLMConfig(backbone=backbone).make_head(rngs=rngs)
    width = source.outline().backbone.embed_dim
    if width != backbone.embed_dim:
        raise UserError(
            f"the head of {source.source} is for vectors of {width} numbers, the encoder has"
            f" {backbone.embed_dim}: give the head of a model of the same size, or none"
        )
    head = masked_lm_for(model, source, form=form, length=1, rngs=rngs).head
    if head.dense is None or head.table is not None:
        raise UserError(
            f"the head of {source.source} has its own token vectors or no dense layer, so it does not fit"
            " another encoder: give the head of another masked language model, or none"
        )
    rows = jax.eval_shape(lambda: head.bias[...]).shape[0]
    if rows != backbone.vocab_size:
        raise UserError(
            f"the head of {source.source} is for {rows} tokens, but the encoder has {backbone.vocab_size}:"
            " give the head of a model with the same vocabulary, or none"
        )
    return head

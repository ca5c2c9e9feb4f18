"""Makes the multi-vector encoder that training starts from."""

import dataclasses
import string
from collections.abc import Mapping

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.model import kinds
from jaxir.interop.model.stored import StoredModel
from jaxir.models import layers
from jaxir.models.after_pooling import AfterPooling
from jaxir.models.multi_vector import Expansion, MultiVectorConfig

DIMENSION = 128  # number of dimensions of a token's vector, as in ColBERT and PyLate
LENGTHS = {"query": 32, "passage": 180}  # maximum numbers of tokens, as in PyLate 1.6


def of_dual_encoder(
    model: StoredModel,
    *,
    lengths: Mapping[str, int | None],
    dimension: int | None,
    seed: int,
    where: str,
) -> StoredModel:
    """Returns a multi-vector encoder with the encoder of a dual encoder and a new linear map.

    The map has no bias and is drawn from N(0, 1 / width). Vectors of tokens have length 1.

    Args:
      model: a dual encoder with one encoder; its pooling and what follows are left out.
      lengths: maximum numbers of tokens of a "query" and a "passage"; None: the smaller of the model's own
        and `LENGTHS`.
      dimension: dimension of a token's vector; None: `DIMENSION`.
      seed: seed of the map.
      where: the model's name, with which errors begin.
    """
    config, settings, tokenizer = model.config, model.settings, model.tokenizer
    if kinds.name_of(config) != "dual_encoder" or config.sharing != "sde":
        raise UserError(
            f"{where}: a multi-vector encoder starts from one encoder, not from {config.summary}; give a dual"
            " encoder with sharing='sde'"
        )
    own = {"query": settings.query_max_length, "passage": settings.passage_max_length}
    chosen = {side: lengths[side] or min(own[side], LENGTHS[side]) for side in own}
    backbone, width = config.backbone, config.backbone.output_dim
    dense = AfterPooling(
        kind="dense", dimension=dimension or DIMENSION, use_bias=False, activation="identity"
    )
    try:
        made = MultiVectorConfig(
            backbone=backbone,
            token_modules=(dense, AfterPooling(kind="normalize")),
            expansion=_expansion(tokenizer, chosen["query"], attend=not backbone.embeds_unattended),
            skipped=_punctuation(tokenizer),
            adapters=config.adapters,
        )
    except ValueError as error:
        raise UserError(f"{where}: {error}; set query_max_length (--query_length)") from error
    kernel = layers.normal(width**-0.5)(jax.random.key(seed), (width, dense.dimension))
    return dataclasses.replace(
        model,
        config=made,
        params={name: x for name, x in model.params.items() if name.startswith("encoder.")}
        | {"token_modules.0.linear.kernel": np.asarray(kernel)},
        settings=dataclasses.replace(
            settings,
            query_max_length=chosen["query"],
            passage_max_length=chosen["passage"],
            pools_prompts=True,
        ),
    )


def with_lengths(
    model: StoredModel, query_length: int | None, dimension: int | None, *, where: str
) -> StoredModel:
    """Returns a multi-vector encoder with queries expanded to at most `query_length` tokens (None: as is)."""
    config, own = model.config, model.config.dimension
    if dimension not in (None, own):
        raise UserError(
            f"{where}: the tokens' vectors have {own} dimensions, so they cannot get a projection to"
            f" {dimension}: leave projection out"
        )
    expansion = config.expansion
    if expansion is None or query_length is None:
        return model
    # If queries were always filled to their maximum length, they are filled to the new one.
    always = expansion.length == model.settings.query_max_length
    length = query_length if always else min(expansion.length, query_length)
    expansion = dataclasses.replace(expansion, length=length)
    return dataclasses.replace(model, config=dataclasses.replace(config, expansion=expansion))


def _expansion(tokenizer: Tokenizer | None, length: int, *, attend: bool) -> Expansion | None:
    """Returns the expansion of queries by mask tokens; None if there is no such token.

    A plan has no tokenizer, so its queries are filled with token 1 instead, which costs as much.
    """
    mask = 1 if tokenizer is None else tokenizer.mask_id
    if mask is None:
        return None
    return Expansion(length=length, token=mask or PADDING_TOKEN, attend=attend)


def _punctuation(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    ids = () if tokenizer is None else map(tokenizer.id_of, string.punctuation)
    return tuple(i for i in ids if i is not None)

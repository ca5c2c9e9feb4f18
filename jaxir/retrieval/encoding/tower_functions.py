"""The functions of a dual encoder that `Runner` compiles: token ids [B, L] -> vectors [B, D] of a tower.

Those of `PACKED` map rows of several texts, as `models.packed.encode` describes.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxir.models import packed
from jaxir.models.dual_encoder import DualEncoderModel

Tower = Literal["query", "passage"]


def _embed_query(model: DualEncoderModel, ids: jax.Array) -> jax.Array:
    return model.encode(ids, tower="query")


def _embed_passage(model: DualEncoderModel, ids: jax.Array) -> jax.Array:
    return model.encode(ids, tower="passage")


def _pack_query(model: DualEncoderModel, ids: jax.Array, texts: jax.Array) -> jax.Array:
    return packed.encode(model, ids, texts, tower="query")


def _pack_passage(model: DualEncoderModel, ids: jax.Array, texts: jax.Array) -> jax.Array:
    return packed.encode(model, ids, texts, tower="passage")


EMBED = {"query": _embed_query, "passage": _embed_passage}
PACKED = {"query": _pack_query, "passage": _pack_passage}


@functools.cache  # one function object for each program (see `batch_runner.Function`)
def embed_after(prompt_tokens: int, tower: Tower) -> Callable[[DualEncoderModel, jax.Array], jax.Array]:
    """Returns a function like those in `EMBED`, whose pooling leaves out the tokens of a prompt."""

    def embed(model: DualEncoderModel, ids: jax.Array) -> jax.Array:
        return model.encode(ids, tower=tower, left_out=jnp.full(len(ids), prompt_tokens))

    return embed

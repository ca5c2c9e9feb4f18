"""DiffCSE with a tiny generator, and its batches."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.models.bert import BertConfig
from jaxir.models.masked_lm import MaskedLMConfig
from jaxir.objectives.diffcse import DiffCSE
from jaxir.objectives.simcse import SimCSE
from tests.objectives.unlabelled import CLS, SEP, WORDS, batch_of


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A masked language model with large parameters, so that it writes many different words."""

    source: str = "a tiny one"
    vocabulary: str = "words"
    width: int = 32

    def outline(self):
        sizes = {"vocab_size": WORDS, "num_layers": 1, "num_heads": 2, "mlp_dim": 16, "max_positions": 16}
        return MaskedLMConfig(backbone=BertConfig(**sizes, embed_dim=self.width, dropout_rate=0.1))

    def build(self):
        graph, state = nnx.split(self.outline().make(rngs=nnx.Rngs(5)))
        return nnx.merge(graph, jax.tree.map(lambda x: x * 20, state)), self.vocabulary


def diffcse(**settings) -> DiffCSE:
    return DiffCSE(**{"generator": Tiny(), **settings})


def with_next(ids: jax.Array) -> dict[str, jax.Array]:
    """Returns a batch with the next text of each text; the last one's has only special tokens."""
    nothing = jnp.zeros(ids.shape[1], jnp.int32).at[:2].set(jnp.array([CLS, SEP]))
    return batch_of(ids) | {"next_ids": jnp.roll(ids, -1, axis=0).at[-1].set(nothing)}


def pairs(ids: jax.Array) -> dict[str, jax.Array]:
    key, query = batch_of(ids)["text_key"], ids[:, :8].at[:, 7].set(jnp.where(ids[:, 7] != 0, SEP, 0))
    return {"query_ids": query, "passage_ids": ids, "query_key": key, "passage_key": key}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutDropout(SimCSE):
    def auxiliary(self, model, *, form, rngs):
        return None

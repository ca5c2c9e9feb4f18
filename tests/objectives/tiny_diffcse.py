"""DiffCSE with a tiny generator, and its batches."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.models.bert import BertConfig
from jaxir.models.masked_lm import MaskedLMConfig
from jaxir.objectives.diffcse import DiffCSE
from jaxir.objectives.simcse import SimCSE
from tests.objectives import unlabelled
from tests.objectives.unlabelled import CLS, SEP, WORDS, batch_of

FORM = dataclasses.replace(unlabelled.FORM, vocabulary="words")


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A masked language model with large parameters, so that it writes many different words."""

    source: str = "a tiny one"
    vocabulary: str = "words"
    width: int = 32

    def outline(self):
        backbone = BertConfig(
            vocab_size=WORDS,
            embed_dim=self.width,
            num_layers=1,
            num_heads=2,
            mlp_dim=16,
            max_positions=16,
            dropout_rate=0.1,
        )
        return MaskedLMConfig(backbone=backbone)

    def build(self):
        model = self.outline().make(rngs=nnx.Rngs(5))
        graph, state = nnx.split(model)
        return nnx.merge(graph, jax.tree.map(lambda x: x * 20, state)), self.vocabulary


GENERATOR = Tiny()


def diffcse(**settings) -> DiffCSE:
    return DiffCSE(**{"generator": GENERATOR, **settings})


def made(objective, model, seed=1):
    return objective.auxiliary(model, form=FORM, rngs=nnx.Rngs(seed))


def with_next(ids: jax.Array) -> dict[str, jax.Array]:
    """A batch with the next text of each; the last one has none: only special tokens."""
    following = (
        jnp.roll(ids, -1, axis=0)
        .at[-1]
        .set(jnp.zeros(ids.shape[1], jnp.int32).at[:2].set(jnp.array([CLS, SEP])))
    )
    return batch_of(ids) | {"next_ids": following}


def pairs(ids: jax.Array) -> dict[str, jax.Array]:
    batch = batch_of(ids)
    return {
        "query_ids": ids[:, :8].at[:, 7].set(jnp.where(ids[:, 7] != 0, SEP, 0)),
        "passage_ids": ids,
        "query_key": batch["text_key"],
        "passage_key": batch["text_key"],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutDropout(SimCSE):
    def auxiliary(self, model, *, form, rngs):
        return None

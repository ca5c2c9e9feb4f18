"""Contrastive training in which a guide, a frozen dual encoder, leaves out false negatives (GISTEmbed)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.core.values import NotNegativeNumber, checked
from jaxir.losses.guide import Guide
from jaxir.objectives.contrastive import KEYS, Contrastive, Embeddings
from jaxir.objectives.objective import Batch, Metrics, RandomKey
from jaxir.objectives.pretrained_heads import GuideSource, guide_for


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Guided(Contrastive):
    """`Contrastive` without the negatives that a guide finds too similar (Solatorio 2024, arXiv:2402.16829).

    The guide embeds the batch, too; g is the similarity of its vectors. Row i leaves out every negative j,
    from either tower, with

        g(i, j) > g(q_i, p_i) - margin                     ("absolute")
        g(i, j) > g(q_i, p_i) - |g(q_i, p_i)| margin       ("relative")

    where g(i, j) compares the same two texts as the loss does. The guide reads the same tokens as the model,
    so both need one vocabulary and the same prompts. It is not trained and not exported.

    Attributes:
      guide: the guide, as `PretrainedGuide(...)` of jaxir.interop.build.
      margin: by how much less similar than the positive a negative has to be.
      margin_strategy: whether `margin` is a difference or a share of the positive's similarity.
    """

    guide: GuideSource
    margin: NotNegativeNumber = 0.0
    margin_strategy: Literal["absolute", "relative"] = "absolute"
    loss_inputs = (*KEYS, "guide")
    frozen = ("auxiliary.guide.*",)

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the guide; raises a UserError if it cannot read the model's tokens."""
        return nnx.Dict(guide=guide_for(model, self.guide, form=form, rngs=rngs))

    def guide_of(self, vectors: Embeddings) -> Guide:
        """Returns the guide's constants for the loss, from the guide's vectors of the batch."""
        query, passage, negatives = jax.lax.stop_gradient(vectors)
        positive = jnp.einsum("bd,bd->b", query, passage, precision="highest")
        unit = 1.0 if self.margin_strategy == "absolute" else jnp.abs(positive)
        return Guide(query, passage, negatives, positive - unit * self.margin)

    def loss_of(self, embeddings: Embeddings, batch: Batch) -> tuple[jax.Array, Metrics]:
        raise UserError("Guided cannot be the contrastive part of another objective: use Contrastive there")

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        guide = self.guide_of(self.embed(auxiliary["guide"], batch))
        keys = {name: batch.get(name) for name in KEYS}
        loss, metrics = self.loss(*self.embed(model, batch, key), **keys, guide=guide)
        # Compare each query with the passage of the next row: a sample of the batch that needs no [B, B]
        # array.
        other = jnp.einsum("bd,bd->b", guide.query, jnp.roll(guide.passage, -1, axis=0), precision="highest")
        metrics |= {"masked_by_guide": (other > guide.limit).astype(jnp.float32).mean()}
        if guide.negatives is not None:
            hard = jnp.einsum("bd,bnd->bn", guide.query, guide.negatives, precision="highest")
            masked = (hard > guide.limit[:, None]).astype(jnp.float32).mean()
            metrics |= {"hard_negatives_masked_by_guide": masked}
        return loss, metrics

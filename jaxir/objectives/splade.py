"""Training of sparse encoders (SPLADE): ranking losses, and regularisers that make weights sparse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jaxir.core.values import NotNegative, Warmup, checked
from jaxir.losses import sparsity
from jaxir.losses.distillation import margin_mse
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.objectives.contrastive import Contrastive, Embeddings
from jaxir.objectives.distillation import SCORES, Distillation
from jaxir.objectives.objective import Batch, InSteps, Metrics, RandomKey

Regularizer = Literal["flops", "l1"]
_REGULARIZERS = {"flops": sparsity.flops, "l1": sparsity.l1}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Sparsity:
    """The regularisers that are added to the loss of a sparse encoder, computed over the global batch.

    With R_q and R_d the regularisers of the queries, and of all passages and hard negatives together:

        ramp(step) * (lambda_q * R_q + lambda_d * R_d) + anti_zero * (Z_q + Z_d)

    where ramp(step) = min(1, step / regularizer_warmup)^2 (Formal et al. 2021, arXiv:2109.10086, section 3.2)
    and Z is `losses.sparsity.anti_zero`. Without Z, the sum is that of `SpladeLoss` of sentence-transformers
    6.2. In evaluation the ramp is 1.

    Attributes:
      lambda_q: weight of the queries' regulariser; 0: none.
      lambda_d: weight of the passages' regulariser; 0: none.
      query_regularizer: "flops" or "l1" (see `jaxir.losses.sparsity`).
      passage_regularizer: the same for passages.
      regularizer_warmup: number of steps, or below 1 the share of all steps, in which the ramp rises to 1.
      anti_zero: weight of the term that is large if a side has almost no weights; SPLADE's code has 1.
    """

    lambda_q: NotNegative = 5e-5
    lambda_d: NotNegative = 3e-5
    query_regularizer: Regularizer = "flops"
    passage_regularizer: Regularizer = "flops"
    regularizer_warmup: Warmup = 0.33
    anti_zero: NotNegative = 0.0

    def __call__(self, embeddings: Embeddings, step: jax.Array | None) -> tuple[jax.Array, Metrics]:
        """Returns the sum of the regularisers at a step (None: in evaluation), and metrics.

        `query_active_dims` and `passage_active_dims` are the mean numbers of weights of a text that are not
        0. `flops` is the expected number of products of a query with a passage (Paria et al. 2020, section
        3).
        """
        query, passage, negatives = embeddings
        if negatives is not None:
            passage = jnp.concatenate([passage, negatives.reshape(-1, passage.shape[1])])
        of_queries = _REGULARIZERS[self.query_regularizer](query)
        of_passages = _REGULARIZERS[self.passage_regularizer](passage)
        ramp = self._ramp(step)
        total = ramp * (self.lambda_q * of_queries + self.lambda_d * of_passages)
        if self.anti_zero:
            total += self.anti_zero * (sparsity.anti_zero(query) + sparsity.anti_zero(passage))
        shares = [(side > 0).astype(jnp.float32).mean(0) for side in (query, passage)]
        return total, {
            "query_active_dims": shares[0].sum(),
            "passage_active_dims": shares[1].sum(),
            "flops": (shares[0] * shares[1]).sum(),
            "query_regularizer": of_queries,
            "passage_regularizer": of_passages,
            "regularization": total,
        }

    def _ramp(self, step: jax.Array | None) -> jax.Array:
        if step is None or self.regularizer_warmup == 0:
            return jnp.float32(1)
        if self.regularizer_warmup < 1:
            raise ValueError("a share of steps only works in a training run (jaxir.train): give steps")
        return jnp.square(jnp.minimum(step.astype(jnp.float32) / self.regularizer_warmup, 1.0))

    def settled(self, in_steps: InSteps) -> Self:
        warmup = in_steps("regularizer_warmup", self.regularizer_warmup)
        return dataclasses.replace(self, regularizer_warmup=warmup)


class _Regularized:
    """Adds `sparsity` to the loss of a `Contrastive` or `Distillation`."""

    sparsity: Sparsity

    def settled(self, in_steps: InSteps) -> Any:
        return dataclasses.replace(self, sparsity=self.sparsity.settled(in_steps))  # type: ignore[type-var]

    def _with_sparsity(
        self, found: tuple[jax.Array, Metrics], embeddings: Embeddings, step: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        loss, metrics = found
        more, others = self.sparsity(embeddings, step)
        return loss + more, metrics | {"ranking_loss": loss} | others


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class Splade(_Regularized, Contrastive):
    """In-batch contrastive training of a sparse encoder (SPLADE; Formal et al. 2021, arXiv:2109.10086).

    Attributes:
      loss: a loss of `jaxir.losses` as for `Contrastive`; the similarity is the product of the weights.
      sparsity: the regularisers, which are added to the loss.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = in_batch_softmax
    sparsity: Sparsity = Sparsity()
    reads_with = "token_weights"

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        embeddings = self.embed(model, batch, key)
        return self._with_sparsity(self.loss_of(embeddings, batch), embeddings, step)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
@checked
class SpladeDistillation(_Regularized, Distillation):
    """`Distillation` of a sparse encoder: products of weights are fitted to a teacher's scores.

    Attributes:
      loss: `margin_mse` or `kl_distillation` of `jaxir.losses` with its settings bound.
      sparsity: the regularisers, which are added to the loss.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = margin_mse
    sparsity: Sparsity = Sparsity()
    reads_with = "token_weights"

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        embeddings = Splade(chunks=self.chunks).embed(model, batch, key)
        found = self.loss(*embeddings, **{name: batch[name] for name in SCORES})
        return self._with_sparsity(found, embeddings, step)

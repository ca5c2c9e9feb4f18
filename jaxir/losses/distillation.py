"""Losses that fit a model's scores to a teacher's, over the positive and hard negatives of each query."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, PositiveNumber
from jaxir.losses._types import Embedded, EmbeddedNegatives, Metrics, Scalar, TokenVectors
from jaxir.losses.maxsim import maxsim_of_lists
from jaxir.losses.xtr import check_xtr_k, xtr


@checked_shapes
def margin_mse(
    query: Embedded,
    passage: Embedded,
    negatives: EmbeddedNegatives,
    *,
    passage_score: Float32[Array, " B"],
    negative_scores: Float32[Array, "B N"],
    temperature: PositiveNumber = 1.0,
) -> tuple[Scalar, Metrics]:
    """Margin-MSE (Hofstätter et al. 2020, arXiv:2010.02666, section 3.1).

    The mean over rows i and hard negatives h of

        ((s(q_i, p_i) - s(q_i, n_ih)) - (t(q_i, p_i) - t(q_i, n_ih)))^2,  s(a, b) = a . b / temperature

    for embeddings [B, D] and [B, N, D], with the teacher's scores t, [B] and [B, N]. With `TokenVectors` s is
    MaxSim / temperature. The paper scores by inner products of vectors of any length. Vectors of length 1
    reach margins of at most 2 / temperature.

    Args:
      temperature: divides the model's scores.

    Returns:
      The loss and the metrics `margin` (the model's mean margin), `teacher_margin` and `agreement` (the share
      of negatives that model and teacher rank on the same side of the positive).
    """
    positive, negative = _scores(query, passage, negatives, 1.0 / temperature)
    margin, wanted = positive[:, None] - negative, passage_score[:, None] - negative_scores
    loss = jnp.square(margin - wanted).mean()
    agreement = ((margin > 0) == (wanted > 0)).astype(jnp.float32).mean()
    return loss, {"margin": margin.mean(), "teacher_margin": wanted.mean(), "agreement": agreement}


@checked_shapes
def kl_distillation(
    query: Embedded,
    passage: Embedded,
    negatives: EmbeddedNegatives,
    *,
    passage_score: Float32[Array, " B"],
    negative_scores: Float32[Array, "B N"],
    temperature: PositiveNumber = 0.05,
    teacher_temperature: PositiveNumber = 1.0,
    xtr_k: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """KL(teacher || model) over the list of each query's positive and hard negatives.

    The mean over rows i of sum_c P_i(c) (log P_i(c) - log Q_i(c)), where c runs over p_i and n_i1 ... n_iN. P
    is the softmax of t / teacher_temperature, and Q the softmax of (a . b) / temperature (as in Lin et al.
    2021, RepL4NLP, eq. 2, and Ren et al. 2021, RocketQAv2, arXiv:2110.07367, eq. 4). The other arguments are
    those of `margin_mse`.

    Args:
      temperature: divides the model's scores.
      teacher_temperature: divides the teacher's scores.
      xtr_k: with `TokenVectors`, score by XTR instead of MaxSim: only the xtr_k nearest tokens of all lists
        count for a query token (`losses.xtr`). None: MaxSim.

    Returns:
      The loss and the metrics `teacher_entropy` (nats; the cross-entropy is the loss plus this) and
      `agreement` (the share of rows in which model and teacher rank the same passage first).
    """
    positive, negative = _scores(query, passage, negatives, 1.0 / temperature, xtr_k)
    ours = jax.nn.log_softmax(jnp.concatenate([positive[:, None], negative], axis=1))
    scores = jnp.concatenate([passage_score[:, None], negative_scores], axis=1)
    theirs = jax.nn.log_softmax(scores / teacher_temperature)
    share = jnp.exp(theirs)
    loss = (share * (theirs - ours)).sum(1).mean()
    agreement = (ours.argmax(1) == scores.argmax(1)).astype(jnp.float32).mean()
    return loss, {"teacher_entropy": -(share * theirs).sum(1).mean(), "agreement": agreement}


def _scores(
    query: Embedded,
    passage: Embedded,
    negatives: EmbeddedNegatives,
    scale: float,
    xtr_k: int | None = None,
):
    if isinstance(query, TokenVectors):
        lists = passage.before(negatives)
        found = maxsim_of_lists(query, lists) if xtr_k is None else _xtr_of_lists(query, lists, xtr_k)
        return scale * found[:, 0], scale * found[:, 1:]
    check_xtr_k(query, xtr_k)
    positive = jnp.einsum("bd,bd->b", query, passage, precision="highest")
    return scale * positive, scale * jnp.einsum("bd,bnd->bn", query, negatives, precision="highest")


def _xtr_of_lists(query: TokenVectors, lists: TokenVectors, xtr_k: int) -> jax.Array:
    found = xtr(*query[:2], *lists.flat[:2], top_k=xtr_k)
    found = found.reshape(len(found), *lists.mask.shape[:2])
    # Sum over a one-hot axis instead of gathering, so rows stay on their device.
    return jnp.where(jnp.eye(len(found), dtype=bool)[..., None], found, 0.0).sum(1)

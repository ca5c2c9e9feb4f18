"""Logits, duplicate masks and log-sum-exps that the in-batch losses share.

A softmax denominator sums over groups of columns: passages of the batch, hard negatives, rows of the same
tower. Each group contributes one log-sum-exp per row, and groups join by logaddexp, so no loss concatenates
matrices.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxir.losses._types import (
    AllKeys,
    Embedded,
    EmbeddedNegatives,
    HybridVectors,
    Keys,
    Metrics,
    NegativeKeys,
    Negatives,
    Scalar,
    TokenVectors,
    Vectors,
)
from jaxir.losses.guide import Guide
from jaxir.losses.maxsim import maxsim


class Keep(NamedTuple):
    """Masks of the columns that the denominator of each row includes.

    Entry i, j of `passages` and `queries` is for query i and passage j: `passages` are columns of query i,
    `queries` are columns of passage j. Both are true for a row's own pair and for kept columns. `query_tower`
    and `passage_tower` are for rows of one tower, and false for the row itself. `negatives` are hard
    negatives.
    """

    passages: Bool[Array, "B B"]
    queries: Bool[Array, "B B"]
    query_tower: Bool[Array, "B B"]
    passage_tower: Bool[Array, "B B"]
    negatives: Bool[Array, "B M"] | None


class Terms(NamedTuple):
    """The terms of the in-batch softmax, one number per row.

    `positive` is a logit. `query_to_passage` is the log-sum-exp of logits over passages and hard negatives,
    `passage_to_query` the log-sum-exp over queries. `hardest` is the largest logit with another
    row's passage or a hard negative, -inf without any.
    """

    positive: Float32[Array, " B"]
    query_to_passage: Float32[Array, " B"]
    passage_to_query: Float32[Array, " B"]
    hardest: Float32[Array, " B"]


def keep_columns(
    batch: int,
    negatives: EmbeddedNegatives | HybridVectors | None,
    query_key: Keys | None,
    passage_key: Keys | None,
    negative_key: NegativeKeys | None,
    guide: Guide | None = None,
) -> Keep:
    """Masks row j for row i if their query keys or passage keys are equal, or if the guide masks it.

    A hard negative with the key of row i's passage is masked for row i. A key of None masks nothing.
    """
    own = jnp.eye(batch, dtype=bool)
    duplicate = jnp.zeros((batch, batch), bool)
    for key in (query_key, passage_key):
        if key is not None:
            duplicate |= equal(key, key)
    if negatives is None:
        hard = None
    elif passage_key is None or negative_key is None:
        hard = jnp.ones((batch, rows_of(flat(negatives))), bool)
    else:
        hard = ~equal(passage_key, negative_key.reshape(-1, 2))
    of_pairs, of_tower = own | ~duplicate, ~own & ~duplicate
    if guide is None:
        return Keep(of_pairs, of_pairs, of_tower, of_tower, hard)
    query, passage, others, limit = guide
    pairs = logits(query, passage, 1.0)
    if hard is not None:
        hard &= logits(query, others.reshape(-1, others.shape[-1]), 1.0) <= limit[:, None]
    return Keep(
        passages=of_pairs & (own | (pairs <= limit[:, None])),
        queries=of_pairs & (own | (pairs <= limit[None, :])),
        query_tower=of_tower & (logits(query, query, 1.0) <= limit[:, None]),
        passage_tower=of_tower & (logits(passage, passage, 1.0) <= limit[:, None]),
        negatives=hard,
    )


def logits(rows: Embedded, columns: Embedded, temperature: float) -> Float32[Array, "B C"]:
    if isinstance(rows, TokenVectors):
        scores = maxsim(*rows[:2], *columns[:2]) / temperature
        return scores if rows.weight is None else scores * rows.weight[:, None]
    # By default accelerators multiply float32 in bfloat16 or TF32: at temperature 0.01 that changes a logit
    # by up to 0.4.
    return jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST) / temperature


def rows_of(x: Embedded | HybridVectors) -> int:
    """Returns B, the number of texts."""
    if isinstance(x, HybridVectors):
        return len(x.ids)
    return len(x.mask if isinstance(x, TokenVectors) else x)


def flat(negatives: EmbeddedNegatives | HybridVectors) -> Embedded | HybridVectors:
    """Returns the hard negatives of all rows as columns."""
    if isinstance(negatives, TokenVectors | HybridVectors):
        return negatives.flat
    return negatives.reshape(-1, negatives.shape[-1])


def log_sum_exp(x: Float32[Array, "B C"], keep: Bool[Array, "B C"], *, axis: int = 1) -> Float32[Array, " R"]:
    """Returns log(sum(exp(x))) over kept elements along `axis`; -inf with zero gradient if none is kept."""
    x = jnp.where(keep, x, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.exp(x - top), axis=axis)
    some = total > 0
    # The inner where keeps the gradient of log away from zero: 0 * inf would be NaN.
    return jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + jnp.squeeze(top, axis), -jnp.inf)


def num_ordered_pairs(batch: int) -> float:
    """Returns the number of ordered pairs of different rows, at least 1."""
    return float(max(batch * (batch - 1), 1))  # a float, because from 46,342 rows on the number exceeds int32


def softmax_loss(terms: Terms, *, temperature: float, bidirectional: bool) -> tuple[Scalar, Metrics]:
    """Returns the mean of -log softmax of the positives, summed over directions, and metrics."""
    loss = jnp.mean(terms.query_to_passage - terms.positive)
    metrics = {
        "accuracy": jnp.mean((terms.positive > terms.hardest).astype(jnp.float32)),
        "positive_similarity": jnp.mean(terms.positive) * temperature,
        "rows_without_negatives": jnp.mean(jnp.isneginf(terms.hardest).astype(jnp.float32)),
        "loss_query_to_passage": loss,
    }
    if bidirectional:
        backward = jnp.mean(terms.passage_to_query - terms.positive)
        metrics["loss_passage_to_query"] = backward
        loss = loss + backward
    return loss, metrics


class Similarities(NamedTuple):
    """Similarities of each row with its passage and candidate negatives; `kept` is true for its negatives."""

    positive: Float32[Array, " B"]
    negative: Float32[Array, "B M"]
    kept: Bool[Array, "B M"]

    def metrics(self) -> Metrics:
        hardest = jnp.where(self.kept, self.negative, -jnp.inf).max(1)
        return {
            "accuracy": (self.positive > hardest).astype(jnp.float32).mean(),
            "positive_similarity": self.positive.mean(),
            "rows_without_negatives": (~self.kept.any(1)).astype(jnp.float32).mean(),
        }


def similarities(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None,
    keys: AllKeys,
    guide: Guide | None,
    others: Sequence[Literal["passages", "negatives", "queries"]],
) -> Similarities:
    """Compares each query with its own passage and with the `others` of the batch."""
    keep = keep_columns(len(query), negatives, *keys, guide)
    among = logits(query, passage, 1.0)
    columns, kept = [], []
    for name in others:
        if name == "passages":
            columns.append(among)
            kept.append(keep.passages & ~jnp.eye(len(query), dtype=bool))
        elif name == "queries":
            columns.append(logits(query, query, 1.0))
            kept.append(keep.query_tower)
        elif negatives is not None:
            columns.append(logits(query, negatives.reshape(-1, negatives.shape[-1]), 1.0))
            kept.append(keep.negatives)
    return Similarities(jnp.diagonal(among), jnp.concatenate(columns, 1), jnp.concatenate(kept, 1))


def equal(rows: Int32[Array, "B 2"], columns: Int32[Array, "C 2"]) -> Bool[Array, "B C"]:
    """Returns whether both halves of a row's key equal those of a column's key."""
    return jnp.all(rows[:, None, :] == columns[None, :, :], axis=-1)

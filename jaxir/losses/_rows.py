"""What the in-batch losses share: logits, duplicate masks and one log-sum-exp per row.

A softmax denominator is a sum over groups of columns: the batch's passages, the hard negatives, the same
tower. Each group costs one number per row, its log-sum-exp, and groups join by logaddexp. So no loss builds a
concatenated matrix, and a group may be summed in blocks without any loss knowing.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32


class Keep(NamedTuple):
    """Which columns stand in row i's denominator.

    Attributes:
      in_batch: [B, B], the pair itself and every row that is no duplicate of it.
      same_tower: [B, B], the same without the row itself.
      negatives: [B, B * N], every hard negative that is not the row's own passage; None without negatives.
    """

    in_batch: Bool[Array, "B B"]
    same_tower: Bool[Array, "B B"]
    negatives: Bool[Array, "B M"] | None


class Terms(NamedTuple):
    """The pieces of the in-batch softmax, one number per row ([B], float32).

    Attributes:
      positive: sim(q_i, p_i) / temperature.
      query_to_passage: log of the sum over passages and hard negatives of exp(sim(q_i, .) / temperature).
      passage_to_query: log of the sum over queries of exp(sim(., p_i) / temperature).
      hardest: the largest logit of q_i with a passage or hard negative that is not its own; -inf where
        there is none.
    """

    positive: Float32[Array, " B"]
    query_to_passage: Float32[Array, " B"]
    passage_to_query: Float32[Array, " B"]
    hardest: Float32[Array, " B"]


def keep_columns(
    batch: int,
    negatives: Float32[Array, "B N D"] | None,
    query_key: Int32[Array, "B 2"] | None,
    passage_key: Int32[Array, "B 2"] | None,
    negative_key: Int32[Array, "B N 2"] | None,
) -> Keep:
    """Drops row j from row i's columns where their query or passage keys are equal; None drops nothing."""
    own = jnp.eye(batch, dtype=bool)
    duplicate = jnp.zeros((batch, batch), bool)
    for key in (query_key, passage_key):
        if key is not None:
            duplicate |= equal(key, key)
    if negatives is None:
        hard = None
    elif passage_key is None or negative_key is None:
        hard = jnp.ones((batch, batch * negatives.shape[1]), bool)
    else:
        hard = ~equal(passage_key, negative_key.reshape(-1, 2))
    return Keep(in_batch=own | ~duplicate, same_tower=~own & ~duplicate, negatives=hard)


def logits(
    rows: Float32[Array, "B D"], columns: Float32[Array, "C D"], temperature: float
) -> Float32[Array, "B C"]:
    """Returns every row's dot product with every column over the temperature."""
    # Accelerators multiply float32 in bfloat16 or TF32 unless told otherwise: at temperature 0.01 that is an
    # error of up to 0.4 in a logit.
    return jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST) / temperature


def log_sum_exp(x: Float32[Array, "B C"], keep: Bool[Array, "B C"], *, axis: int = 1) -> Float32[Array, " R"]:
    """Returns log(sum(exp(x))) over what is kept along `axis`: -inf, with zero gradient, where nothing is."""
    x = jnp.where(keep, x, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.exp(x - top), axis=axis)
    some = total > 0
    # The inner where keeps the gradient of log away from zero: 0 * inf would be NaN.
    return jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + jnp.squeeze(top, axis), -jnp.inf)


def pairs_of(batch: int) -> float:
    """Returns the number of ordered pairs of different rows, at least 1."""
    return float(max(batch * (batch - 1), 1))  # of 46,342 rows on it exceeds int32


def same_tower(
    tower: Float32[Array, "B D"], keep: Keep, temperature: float
) -> tuple[Float32[Array, " B"], Float32[Array, ""]]:
    """Returns each row's log-sum-exp over the tower's other rows, and the mean similarity of such pairs."""
    x = logits(tower, tower, temperature)
    off_diagonal = jnp.where(jnp.eye(x.shape[0], dtype=bool), 0.0, x)
    return log_sum_exp(x, keep.same_tower), jnp.sum(off_diagonal) * temperature / pairs_of(x.shape[0])


def in_batch_terms(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None,
    keep: Keep,
    temperature: float,
) -> Terms:
    """Computes the pieces of both directions; hard negatives are columns of the query-to-passage one only."""
    x = logits(query, passage, temperature)
    own = jnp.eye(x.shape[0], dtype=bool)
    forward = log_sum_exp(x, keep.in_batch)
    hardest = jnp.max(jnp.where(keep.same_tower, x, -jnp.inf), axis=1)
    if negatives is not None:
        hard = logits(query, negatives.reshape(-1, negatives.shape[-1]), temperature)
        forward = jnp.logaddexp(forward, log_sum_exp(hard, keep.negatives))
        hardest = jnp.maximum(hardest, jnp.max(jnp.where(keep.negatives, hard, -jnp.inf), axis=1))
    return Terms(
        positive=jnp.sum(jnp.where(own, x, 0.0), axis=1),
        query_to_passage=forward,
        # Keep is symmetric, so the other direction is the same matrix summed over its rows.
        passage_to_query=log_sum_exp(x, keep.in_batch, axis=0),
        hardest=hardest,
    )


def softmax_loss(
    terms: Terms, *, temperature: float, bidirectional: bool
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
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


class Row(NamedTuple):
    """Similarities of each row, without a temperature.

    Attributes:
      positive: [B] with its own passage.
      negative: [B, M] with whatever may be its negative.
      kept: [B, M] which of these are.
    """

    positive: Float32[Array, " B"]
    negative: Float32[Array, "B M"]
    kept: Bool[Array, "B M"]


def similarities(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None,
    keys: tuple[Array | None, Array | None, Array | None],
    others: Sequence[Literal["passages", "negatives", "queries"]],
) -> Row:
    """Compares each query with its passage and, side by side, with the `others` of the batch."""
    keep = keep_columns(len(query), negatives, *keys)
    among = logits(query, passage, 1.0)
    columns, kept = [], []
    for name in others:
        if name == "passages":
            columns.append(among)
        elif name == "queries":
            columns.append(logits(query, query, 1.0))
        elif negatives is not None:
            columns.append(logits(query, negatives.reshape(-1, negatives.shape[-1]), 1.0))
        else:
            continue
        kept.append(keep.negatives if name == "negatives" else keep.same_tower)
    return Row(jnp.diagonal(among), jnp.concatenate(columns, 1), jnp.concatenate(kept, 1))


def nearness(row: Row) -> dict[str, Float32[Array, ""]]:
    """Returns the metrics of losses that compare a row's own passage with its nearest negative."""
    hardest = jnp.where(row.kept, row.negative, -jnp.inf).max(1)
    return {
        "accuracy": (row.positive > hardest).astype(jnp.float32).mean(),
        "positive_similarity": row.positive.mean(),
        "rows_without_negatives": (~row.kept.any(1)).astype(jnp.float32).mean(),
    }


def equal(rows: Int32[Array, "B 2"], columns: Int32[Array, "C 2"]) -> Bool[Array, "B C"]:
    """Returns where both halves of a row's key and of a column's are equal."""
    return jnp.all(rows[:, None, :] == columns[None, :, :], axis=-1)

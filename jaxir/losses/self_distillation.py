"""Training of the three heads of a hybrid encoder, which learn from the sum of their scores (BGE-M3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import NotNegative, PositiveNumber
from jaxir.losses import _rows
from jaxir.losses._types import HybridVectors, Keys, Metrics, NegativeKeys, Scalar

HEADS = ("dense", "sparse", "tokens")


@checked_shapes
def self_distillation(
    query: HybridVectors,
    passage: HybridVectors,
    negatives: HybridVectors | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    temperature: PositiveNumber = 0.02,
    sparse_weight: NotNegative = 0.3,
    sparse_loss_weight: NotNegative = 0.1,
    distillation: bool = True,
) -> tuple[Scalar, Metrics]:
    """Self-distillation of a hybrid encoder (Chen et al. 2024, arXiv:2402.03216, section 3.3).

    Each head h scores query i and passage j by s_h(i, j): the product of vectors, the product of the weights
    of the tokens, and MaxSim divided by the number of query tokens, each divided by the temperature. Their
    sum is s = s_dense + sparse_weight * s_sparse + s_tokens. With L(s) the in-batch softmax loss of scores s,

        L = (L(s_dense) + sparse_loss_weight * L(s_sparse) + L(s_tokens) + L(s)) / 4

    With H(s, s_h) the mean over queries of -sum_j softmax(s)_j log softmax(s_h)_j, through which no gradient
    flows to s,

        L' = (H(s, s_dense) + sparse_loss_weight * H(s, s_sparse) + H(s, s_tokens)) / 3

    The loss is (L + L') / 2, or L without `distillation`.

    Args:
      query: B queries; row i pairs with row i of `passage`.
      passage: B passages.
      negatives: N hard negatives of each row; each is a negative of every query.
      query_key: as in `in_batch_softmax`, which says what the keys mask.
      passage_key: likewise.
      negative_key: likewise.
      temperature: divides the scores.
      sparse_weight: the weight of the sparse head's score in the sum.
      sparse_loss_weight: the weight of the sparse head's terms in the loss.
      distillation: whether the heads learn from the sum, too.

    Returns:
      The loss and metrics, all float32 scalars: `accuracy`, `accuracy_dense`, `accuracy_sparse` and
      `accuracy_tokens` (the share of queries whose own passage scores highest, by the sum and by each head),
      `loss_sum`, `loss_dense`, `loss_sparse` and `loss_tokens` (the terms of L), and `distillation` (L'), if
      any.

    Raises:
      UserError: the temperature is not positive.
    """
    if not temperature > 0:
        raise UserError(f"temperature must be positive, not {temperature}")
    keep = _rows.keep_columns(len(query.ids), negatives, query_key, passage_key, negative_key)
    kept = keep.passages if negatives is None else jnp.concatenate([keep.passages, keep.negatives], 1)
    columns = [passage] if negatives is None else [passage, negatives.flat]
    parts = [hybrid_scores(query, side) for side in columns]
    scores = {name: jnp.concatenate([x[name] for x in parts], 1) / temperature for name in HEADS}
    total = scores["dense"] + sparse_weight * scores["sparse"] + scores["tokens"]
    shares = {"dense": 1.0, "sparse": sparse_loss_weight, "tokens": 1.0}
    logs = {name: _log_softmax(x, kept) for name, x in (scores | {"sum": total}).items()}
    losses = {name: -jnp.diagonal(x).mean() for name, x in logs.items()}
    loss = (losses["sum"] + sum(shares[name] * losses[name] for name in HEADS)) / 4
    metrics = {f"loss_{name}": x for name, x in losses.items()}
    metrics["accuracy"] = _accuracy(total, kept)
    metrics |= {f"accuracy_{name}": _accuracy(scores[name], kept) for name in HEADS}
    if distillation:
        target = jax.lax.stop_gradient(jnp.exp(logs["sum"]))
        crosses = {name: -jnp.where(kept, target * logs[name], 0.0).sum(1).mean() for name in HEADS}
        metrics["distillation"] = sum(shares[name] * crosses[name] for name in HEADS) / 3
        loss = (loss + metrics["distillation"]) / 2
    return loss, metrics


@checked_shapes
def hybrid_scores(query: HybridVectors, passage: HybridVectors) -> dict[str, Float32[Array, "Q P"]]:
    """Compares Q queries with P passages by each of the heads (`HEADS`): returns scores [Q, P]."""
    return {
        "dense": _rows.logits(query.dense, passage.dense, 1.0),
        "sparse": lexical_scores(query, passage),
        "tokens": _rows.logits(query.tokens, passage.tokens, 1.0),
    }


def lexical_scores(query: HybridVectors, passage: HybridVectors) -> Float32[Array, "Q P"]:
    """Sums the products of the weights of the tokens that a query and a passage share: [Q, P].

    Tokens are compared one query position at a time, so that neither the weights of a vocabulary nor an array
    [Q, P, Lq, Lp] is in memory.
    """

    @jax.checkpoint
    def of_position(total: jax.Array, position: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        ids, weights = position  # [Q]
        same = ids[:, None, None] == passage.ids[None]
        return total + weights[:, None] * jnp.where(same, passage.weights[None], 0.0).sum(2), None

    start = jnp.zeros((len(query.ids), len(passage.ids)), jnp.float32)
    return jax.lax.scan(of_position, start, (query.ids.T, query.weights.T))[0]


def _log_softmax(x: Float32[Array, "B C"], kept: Bool[Array, "B C"]) -> Float32[Array, "B C"]:
    """Returns the log of the softmax over kept columns, 0 elsewhere."""
    total = _rows.log_sum_exp(x, kept)
    return jnp.where(kept, x - total[:, None], 0.0)


def _accuracy(x: Float32[Array, "B C"], kept: Bool[Array, "B C"]) -> Scalar:
    own = jnp.eye(*x.shape, dtype=bool)
    others = jnp.where(kept & ~own, x, -jnp.inf).max(1)
    return (jnp.diagonal(x) > others).astype(jnp.float32).mean()

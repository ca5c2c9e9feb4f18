"""The softmax denominators of a batch, dense or blockwise, behind one interface."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxir.core.errors import UserError
from jaxir.losses import _blocks, _ring, _rows, _tiles
from jaxir.losses._types import AllKeys, Embedded, EmbeddedNegatives, Scalar, TokenVectors
from jaxir.losses.guide import Guide
from jaxir.losses.xtr import check_xtr_k, xtr

Tower = Literal["query", "passage"]


def of_batch(
    query: Embedded,
    passage: Embedded,
    negatives: EmbeddedNegatives | None,
    keys: AllKeys,
    guide: Guide | None,
    temperature: float,
    block_size: int | None,
    gradient_precision: _tiles.GradientPrecision,
    xtr_k: int | None = None,
) -> "DenseSums | BlockwiseSums":
    """Returns the sums of a batch, computed from [B, B] matrices, or from tiles if `block_size` is given."""
    if not temperature > 0:
        raise UserError(f"temperature must be positive, not {temperature}")
    check_xtr_k(query, xtr_k)
    if block_size is None:
        if gradient_precision != "highest":
            raise UserError(
                f'gradient_precision="{gradient_precision}" needs a block_size: without one the precision is'
                " always the highest"
            )
        keep = _rows.keep_columns(_rows.rows_of(query), negatives, *keys, guide)
        return DenseSums(query, passage, negatives, keep, temperature, xtr_k)
    if isinstance(query, TokenVectors):
        raise UserError("MaxSim chooses its blocks itself: leave out block_size")
    if block_size < 1:
        raise UserError(f"block_size must be at least 1, not {block_size}")
    return BlockwiseSums(query, passage, negatives, keys, guide, temperature, block_size, gradient_precision)


class DenseSums(NamedTuple):
    query: Embedded
    passage: Embedded
    negatives: EmbeddedNegatives | None
    keep: _rows.Keep
    temperature: float
    xtr_k: int | None = None

    def in_batch(self, *, bidirectional: bool) -> _rows.Terms:
        """Returns the terms of both directions. Only queries have hard negatives as columns."""
        keep, (x, hard) = self.keep, self._logits()
        own = jnp.eye(x.shape[0], dtype=bool)
        forward = _rows.log_sum_exp(x, keep.passages)
        hardest = jnp.max(jnp.where(keep.passages & ~own, x, -jnp.inf), axis=1)
        if hard is not None:
            forward = jnp.logaddexp(forward, _rows.log_sum_exp(hard, keep.negatives))
            hardest = jnp.maximum(hardest, jnp.max(jnp.where(keep.negatives, hard, -jnp.inf), axis=1))
        return _rows.Terms(
            positive=jnp.sum(jnp.where(own, x, 0.0), axis=1),
            query_to_passage=forward,
            passage_to_query=_rows.log_sum_exp(x, keep.queries, axis=0),
            hardest=hardest,
        )

    def _logits(self) -> tuple[Float32[Array, "B B"], Float32[Array, "B M"] | None]:
        """Returns the logits of queries with passages and with hard negatives."""
        if self.xtr_k is None:
            pairs = _rows.logits(self.query, self.passage, self.temperature)
            if self.negatives is None:
                return pairs, None
            return pairs, _rows.logits(self.query, _rows.flat(self.negatives), self.temperature)
        # XTR keeps the `xtr_k` nearest tokens of passages and hard negatives together.
        listed = None if self.negatives is None else self.passage.before(self.negatives)
        columns = self.passage if listed is None else listed.flat
        x = xtr(*self.query[:2], *columns[:2], top_k=self.xtr_k) / self.temperature
        if listed is None:
            return x, None
        x = x.reshape(len(x), *listed.mask.shape[:2])
        return x[:, :, 0], x[:, :, 1:].reshape(len(x), -1)

    def same_tower(self, tower: Tower) -> tuple[Float32[Array, " B"], Scalar]:
        """Returns each row's log-sum-exp over the tower's other rows, and their mean similarity."""
        vectors, keep = getattr(self, tower), getattr(self.keep, f"{tower}_tower")
        x = _rows.logits(vectors, vectors, self.temperature)
        off_diagonal = jnp.where(jnp.eye(x.shape[0], dtype=bool), 0.0, x)
        mean = jnp.sum(off_diagonal) * self.temperature / _rows.num_ordered_pairs(x.shape[0])
        return _rows.log_sum_exp(x, keep), mean


class BlockwiseSums(NamedTuple):
    query: jax.Array
    passage: jax.Array
    negatives: jax.Array | None
    keys: AllKeys
    guide: Guide | None
    temperature: float
    block_size: int
    gradient_precision: _tiles.GradientPrecision

    def in_batch(self, *, bidirectional: bool) -> _rows.Terms:
        """Like `DenseSums.in_batch`, but passage_to_query is zeros without `bidirectional`."""
        query, passage = self._side("query"), self._side("passage")
        rows, columns = _blocks.log_sums(self._sweep("pairs", both=bidirectional), query, passage)
        forward, hardest = rows["log_sum"], rows["hardest"]
        if self.negatives is not None:
            _, passage_key, negative_key = self.keys
            masked = passage_key is not None and negative_key is not None
            hard, _ = _blocks.log_sums(
                self._sweep("negatives", both=False),
                query._replace(keys=(passage_key,) if masked else ()),
                _tiles.Side(
                    self.negatives.reshape(-1, self.negatives.shape[-1]),
                    keys=(negative_key.reshape(-1, 2),) if masked else (),
                    guide=self.guide and self.guide.negatives.reshape(-1, self.guide.negatives.shape[-1]),
                ),
            )
            forward = jnp.logaddexp(forward, hard["log_sum"])
            hardest = jnp.maximum(hardest, hard["hardest"])
        return _rows.Terms(
            positive=rows["positive"],
            query_to_passage=forward,
            passage_to_query=columns["log_sum"] if bidirectional else jnp.zeros_like(forward),
            hardest=hardest,
        )

    def same_tower(self, tower: Tower) -> tuple[Float32[Array, " B"], Scalar]:
        """Like `DenseSums.same_tower`, but computed from tiles."""
        side = self._side(tower)
        rows, _ = _blocks.log_sums(self._sweep("tower", both=True), side, side)
        # sum_{i != j} x_i . x_j without a product of all pairs: |sum x|^2 less the sum of |x|^2.
        total = jnp.sum(jnp.square(jnp.sum(side.vectors, axis=0))) - jnp.sum(jnp.square(side.vectors))
        return rows["log_sum"], total / _rows.num_ordered_pairs(len(side.vectors))

    def _side(self, tower: Tower) -> _tiles.Side:
        keys = tuple(key for key in self.keys[:2] if key is not None)
        side = _tiles.Side(getattr(self, tower), keys)
        if self.guide is None:
            return side
        return side._replace(guide=getattr(self.guide, tower), limit=self.guide.limit)

    def _sweep(self, kind, *, both) -> _tiles.Sweep:
        return _tiles.Sweep(
            kind=kind,
            temperature=self.temperature,
            block_size=self.block_size,
            both=both,
            ring=_ring.ring_for(len(self.query)),
            gradient_precision=self.gradient_precision,
        )

"""The sums of a batch's softmax denominators, dense or blockwise: the losses do not know which."""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxir.core.errors import UserError
from jaxir.losses import _blocks, _rows, _tiles


class Sums(Protocol):
    """What a loss asks of a batch."""

    def in_batch(self, *, bidirectional: bool) -> _rows.Terms:
        """Returns the pieces of the in-batch softmax; `bidirectional` asks for passage-to-query."""

    def same_tower(self, tower: Float32[Array, "B D"]) -> tuple[Float32[Array, " B"], Float32[Array, ""]]:
        """Returns each row's log-sum-exp over the tower's other rows, and such pairs' mean similarity."""


def of_batch(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None,
    keys: tuple[Int32[Array, "B 2"] | None, Int32[Array, "B 2"] | None, Int32[Array, "B N 2"] | None],
    temperature: float,
    block_size: int | None,
    gradient_precision: _tiles.GradientPrecision,
) -> Sums:
    """Returns the sums of a batch: from [B, B] matrices, or in tiles where `block_size` is given.

    `keys` are of queries, passages and hard negatives.

    Raises:
      UserError: the temperature or the block size is not positive, or a dense loss is asked for a precision.
    """
    if not temperature > 0:
        raise UserError(f"temperature must be positive, not {temperature}")
    if block_size is None:
        if gradient_precision != "highest":
            raise UserError(
                f'gradient_precision="{gradient_precision}" needs a block_size: dense losses have the highest'
            )
        keep = _rows.keep_columns(len(query), negatives, *keys)
        return _Dense((query, passage, negatives), keep, temperature)
    if block_size < 1:
        raise UserError(f"block_size must be at least 1, not {block_size}")
    return _Blockwise(query, passage, negatives, keys, temperature, block_size, gradient_precision)


class _Dense(NamedTuple):
    embeddings: tuple[Any, ...]
    keep: _rows.Keep
    temperature: float

    def in_batch(self, *, bidirectional: bool) -> _rows.Terms:
        return _rows.in_batch_terms(*self.embeddings, self.keep, self.temperature)

    def same_tower(self, tower):
        return _rows.same_tower(tower, self.keep, self.temperature)


class _Blockwise(NamedTuple):
    query: Any
    passage: Any
    negatives: Any
    keys: tuple[Any, ...]
    temperature: float
    block_size: int
    gradient_precision: _tiles.GradientPrecision

    def in_batch(self, *, bidirectional: bool) -> _rows.Terms:
        sweep = self._sweep("pairs", both=bidirectional)
        rows, columns = _blocks.log_sums(sweep, self.query, self.passage, self._given, self._given)
        forward, hardest = rows["log_sum"], rows["hardest"]
        if self.negatives is not None:
            _, passage_key, negative_key = self.keys
            masked = passage_key is not None and negative_key is not None
            hard, _ = _blocks.log_sums(
                self._sweep("negatives", both=False),
                self.query,
                self.negatives.reshape(-1, self.negatives.shape[-1]),
                (passage_key,) if masked else (),
                (negative_key.reshape(-1, 2),) if masked else (),
            )
            forward = jnp.logaddexp(forward, hard["log_sum"])
            hardest = jnp.maximum(hardest, hard["hardest"])
        return _rows.Terms(
            positive=rows["positive"],
            query_to_passage=forward,
            passage_to_query=columns["log_sum"] if bidirectional else jnp.zeros_like(forward),
            hardest=hardest,
        )

    def same_tower(self, tower):
        rows, _ = _blocks.log_sums(self._sweep("tower", both=True), tower, tower, self._given, self._given)
        # sum_{i != j} x_i . x_j without a product of all pairs: |sum x|^2 less the sum of |x|^2.
        total = jnp.sum(jnp.square(jnp.sum(tower, axis=0))) - jnp.sum(jnp.square(tower))
        return rows["log_sum"], total / _rows.pairs_of(len(tower))

    @property
    def _given(self) -> tuple[Any, ...]:
        """The keys, of queries and passages, by which rows are duplicates of each other."""
        return tuple(key for key in self.keys[:2] if key is not None)

    def _sweep(self, kind, *, both) -> _tiles.Sweep:
        return _tiles.Sweep(
            kind=kind,
            temperature=self.temperature,
            block_size=self.block_size,
            both=both,
            ring=_tiles.ring_for(len(self.query)),
            gradient_precision=self.gradient_precision,
        )

"""The base classes of all datasets, and of datasets with random access."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol, Self

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Numbers, TokenCounts, Tokens, fields_of
from jaxir.data.batches.batch_plan import Batch, Batching, Plan, choose, in_one_order, mark_duplicates
from jaxir.data.text.truncation import Truncation


class Dataset(abc.ABC):
    """Examples with the fields that an objective's features name.

    A batch is a dict of arrays, one for each feature, of fixed shapes, so that a training step compiles once.

    Attributes:
      num_examples: number of examples.
      features: what a batch holds.
      fingerprint: identifies the examples; a run resumes only on data with the same fingerprint.
      order_depends_on_parts: whether the batches depend on the number of processes.
      tokenizer_fingerprint: fingerprint of the tokenizer that made the ids; None if unknown.
      truncation: counts of texts that were cut, by the name of `Tokens.table`; empty if unknown.
    """

    num_examples: int
    features: Features
    fingerprint: str
    order_depends_on_parts: bool = False
    tokenizer_fingerprint: str | None = None
    truncation: Mapping[str, Truncation] = {}

    def batches(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[Batch]:
        """Yields batches without end, from step `start_step` on: a pure function of (seed, step).

        Each epoch has its own order and drops the examples after its last whole batch. If an example has more
        list items than a batch holds, each epoch draws some; if it has fewer, they are repeated.

        Args:
          batch_size: examples of a step over all processes.
          seed: of the order and of the choice from lists; not negative.
          start_step: the first step; skipping costs nothing.
          process_index: which of the consecutive, equal shares of each batch to yield.
          process_count: number of processes.

        Raises:
          UserError: `batch_size` exceeds the number of examples or is no multiple of `process_count`.
        """
        return self.batched(Batching(batch_size, seed, start_step, process_index, process_count))

    @abc.abstractmethod
    def batched(self, how: Batching) -> Iterator[Batch]:
        """Yields batches; see `batches`."""

    def once(self, count: int | None = None) -> Batch:
        """Returns `count` examples, or all, without repeats, in the order of the first epoch of seed 0.

        List items keep the record's order. If an example has more items than a batch holds, they are those
        that the first epoch of seed 0 draws; if it has fewer, the list is repeated.
        """
        raise UserError(
            f"{type(self).__name__} has no `once`, which gives the examples that are evaluated"
            " (docs/adding_a_data_kind.md)"
        )

    def list_lengths(self) -> set[int]:
        """Returns the lengths of the examples' lists; empty if unknown."""
        return set()

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        """Counts the tokens of the distinct texts of a field."""
        raise UserError(
            f"the objective counts the words of its texts beforehand, which {type(self).__name__} cannot do"
        )

    def needed_lengths(self) -> dict[str, int]:
        """Returns a length that cuts no text, by the name of each feature of tokens."""
        return {name: f.length for name, f in self.features.items() if isinstance(f, Tokens)}

    def with_lengths(self, lengths: Mapping[str, int]) -> Self:
        """Returns the same examples with these lengths; `self` if they cannot be changed."""
        return self

    def shortened(self) -> Self:
        """Returns the same examples without padding that no text needs."""
        return self.with_lengths(self.needed_lengths())

    def scheduled(self, steps: int) -> Self:
        """Returns the same data for a training run of `steps` steps."""
        return self


class Block(Protocol):
    """The stored form of b examples. `items` [b, n] are positions in the lists of a list field.

    Attributes:
      counts: int64 [b], the number of items in each example's lists.
    """

    counts: np.ndarray

    def values(self, name: str, items: np.ndarray | None) -> np.ndarray:
        """Returns numbers: float32 [b] or [b, n]."""

    def keys(self, name: str, items: np.ndarray | None) -> np.ndarray:
        """Returns the keys of texts: int32 [b, 2] or [b, n, 2]."""

    def ids(self, name: str, items: np.ndarray | None, length: int) -> np.ndarray:
        """Returns zero-padded tokens: int32 [b, `length`] or [b, n, `length`]."""


class ExampleDataset(Dataset):
    """Examples with random access. A subclass defines `_block`."""

    def __init__(
        self,
        features: Features,
        num_examples: int,
        tokenizer_fingerprint: str,
        truncation: Mapping[str, Truncation] | None,
    ):
        self.features, self.num_examples = dict(features), num_examples
        self.tokenizer_fingerprint, self.truncation = tokenizer_fingerprint, dict(truncation or {})
        self._fields = fields_of(features)

    @abc.abstractmethod
    def _block(self, examples: np.ndarray) -> Block:
        """Reads examples [b]."""

    def _plan(self, how: Batching) -> Plan:
        single = any(isinstance(f, Tokens) and f.field == "text" for f in self.features.values())
        return Plan(self.num_examples, how, noun="texts" if single else "pairs")

    def batched(self, how: Batching) -> Iterator[Batch]:
        return (self._batch(step.examples, (how.seed, step.epoch)) for step in self._plan(how))

    def once(self, count: int | None = None) -> Batch:
        return self._batch(in_one_order(self.num_examples, count), (0, 0), in_order=True)

    def _batch(
        self, examples: np.ndarray, seed_and_epoch: tuple[int, int], *, in_order: bool = False
    ) -> Batch:
        block, batch = self._block(examples), {}
        counts = {f.count for f in self.features.values()} - {None}
        chosen = {n: choose(n, block.counts, examples, seed_and_epoch, in_order=in_order) for n in counts}
        for name, feature in self.features.items():
            items = chosen.get(feature.count)
            if isinstance(feature, Key):
                batch[name] = block.keys(feature.field, items)
            elif isinstance(feature, Numbers):
                batch[name] = block.values(feature.field, items)
            else:
                batch[name] = block.ids(feature.field, items, feature.length)
        return mark_duplicates(batch, self.features)

    def with_lengths(self, lengths: Mapping[str, int]) -> Self:
        found = copy.copy(self)
        found.features = {
            name: dataclasses.replace(f, length=lengths[name]) if name in lengths else f
            for name, f in self.features.items()
        }
        found._fields = fields_of(found.features)
        return found


def in_words(features: Features, num_examples: int) -> str:
    """Returns e.g. "64 pairs of 16 + 24 tokens, negatives 2"."""
    fields = fields_of(features)
    lengths = [str(f.length) for f in fields.values() if isinstance(f, Tokens) and f.count is None]
    lists = "".join(f", {name} {f.count}" for name, f in fields.items() if f.count is not None)
    noun = "pairs" if len(lengths) == 2 else "examples"
    return f"{num_examples} {noun} of {' + '.join(lengths)} tokens{lists}"

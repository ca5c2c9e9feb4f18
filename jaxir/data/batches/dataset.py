"""The base classes of all datasets, and of datasets with random access."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol, Self

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Numbers, PromptTokens, TokenCounts, Tokens, fields_of
from jaxir.data.batches.batch_plan import Batch, Batching, Plan, choose, in_one_order, mark_duplicates
from jaxir.data.text.truncation import Truncation


class Dataset(abc.ABC):
    """Training examples with the fields that an objective's features name.

    A batch is a dict of arrays of fixed shapes, one per feature, so that a training step compiles once.

    Attributes:
      num_examples: number of examples.
      features: {name: feature}, the arrays of a batch.
      fingerprint: identifies the examples; a run resumes only on data with the same fingerprint.
      order_depends_on_parts: whether the batches depend on the number of processes.
      tokenizer_fingerprint: fingerprint of the tokenizer that made the ids; None if unknown.
      truncation: counts of truncated texts, by the name of `Tokens.table`; empty if unknown.
      own_prompts: whether texts have other prompts than the model's.
    """

    num_examples: int
    features: Features
    fingerprint: str
    order_depends_on_parts: bool = False
    tokenizer_fingerprint: str | None = None
    truncation: Mapping[str, Truncation] = {}
    own_prompts: bool = False

    def batches(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[Batch]:
        """Yields batches without end, from step `start_step` on; each is a pure function of (seed, step).

        Each epoch has its own order and drops the examples after its last full batch. If an example has more
        list items than a batch holds, each epoch draws some of the items; if fewer, items are repeated.

        Args:
          batch_size: number of examples per step, over all processes.
          seed: determines the order and the choice of list items; not negative.
          start_step: the first step; earlier steps are not computed.
          process_index: index of this process, which yields its share of each batch; all shares are equal.
          process_count: number of processes.

        Raises:
          UserError: `batch_size` exceeds the number of examples or is not a multiple of `process_count`.
        """
        return self.batched(Batching(batch_size, seed, start_step, process_index, process_count))

    @abc.abstractmethod
    def batched(self, how: Batching) -> Iterator[Batch]:
        """Yields the batches that `how` describes; see `batches`."""

    def once(self, count: int | None = None) -> Batch:
        """Returns `count` examples (None: all) as a batch, without repeats, in the order of epoch 0, seed 0.

        List items keep the record's order. If an example has more items than a batch holds, the items are
        those that epoch 0 with seed 0 draws; if fewer, the list is repeated.
        """
        raise UserError(
            f"{type(self).__name__} cannot be evaluated on: it does not define `once`"
            " (see docs/adding_a_data_kind.md)"
        )

    def list_lengths(self) -> set[int]:
        """Returns the distinct lengths of the examples' lists; empty if unknown."""
        return set()

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        """Counts the tokens of the distinct texts of a field."""
        raise UserError(
            f"this objective needs the token counts of all texts, but {type(self).__name__} does not define"
            " `token_counts`: use other data"
        )

    def needed_lengths(self) -> dict[str, int]:
        """Returns for each feature of tokens, by name, a length that truncates no text."""
        return {name: f.length for name, f in self.features.items() if isinstance(f, Tokens)}

    def with_lengths(self, lengths: Mapping[str, int]) -> Self:
        """Returns the same examples with other padded lengths; `self` if lengths cannot be changed."""
        return self

    def shortened(self) -> Self:
        """Returns the same examples with padding removed that no text needs."""
        return self.with_lengths(self.needed_lengths())

    def scheduled(self, steps: int) -> Self:
        """Returns the same data for a training run of `steps` steps, a number on which some data depend."""
        return self


class Block(Protocol):
    """The stored form of b examples. `items` [b, n] are indices into the examples' lists; None: no list.

    Attributes:
      counts: int64 [b], the number of items in each example's lists.
    """

    counts: np.ndarray

    def values(self, name: str, items: np.ndarray | None) -> np.ndarray:
        """Returns the numbers of field `name`: float32 [b] or [b, n]."""

    def keys(self, name: str, items: np.ndarray | None) -> np.ndarray:
        """Returns the keys of the texts of field `name`: int32 [b, 2] or [b, n, 2]."""

    def ids(self, name: str, items: np.ndarray | None, length: int) -> np.ndarray:
        """Returns the zero-padded ids of field `name`: int32 [b, `length`] or [b, n, `length`]."""


class ExampleDataset(Dataset):
    """A dataset with random access to its examples. A subclass defines `_block`."""

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
        """Reads the examples with numbers `examples` [b]."""

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
            elif isinstance(feature, PromptTokens):
                batch[name] = np.full(len(examples), feature.value, np.int32)
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

"""Training examples of a stream of records: read in the stream's order, tokenised batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Record
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.batch_plan import Batch, Batching
from jaxir.data.batches.dataset import ExampleDataset, in_words
from jaxir.data.batches.record_arrays import RecordArrays, RecordReader
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.storage import fingerprints

_HASHED = 64  # records at the beginning of the stream that the fingerprint reads


class StreamDataset(ExampleDataset):
    """Examples of a stream, of which only one batch is in memory.

    A step's batch is a function of the step: epoch e is the first `num_examples` records of `open_epoch(e)`,
    without those after the last full batch. A resumed run reads the records before its step again and drops
    them, so it gets the same batches if the stream yields the same records again. Every process reads the
    entire stream and uses its share of each batch.

    Args:
      features: the arrays of a batch.
      tokenizer: the model's tokenizer.
      open_epoch: maps the number of an epoch to its records.
      num_examples: number of records in an epoch.
    """

    def __init__(
        self,
        features: Features,
        tokenizer: Tokenizer,
        open_epoch: Callable[[int], Iterable[Record]],
        num_examples: int,
    ):
        super().__init__(features, num_examples, tokenizer.fingerprint, None)
        self._tokenizer, self._open_epoch = tokenizer, open_epoch
        self._first: str | None = None

    @property
    def fingerprint(self) -> str:
        """A description, and a hash of the first records of the stream."""
        if self._first is None:
            first = itertools.islice(self._open_epoch(0), _HASHED)
            self._first = fingerprints.of_values(*(sorted(record.items()) for record in first))
        words = in_words(self.features, self.num_examples)
        return f"{words} of a stream, hash {self._first[: fingerprints.DIGITS]}"

    def batched(self, how: Batching) -> Iterator[Batch]:
        mine, size = how.share, how.batch_size
        if size > self.num_examples:
            raise UserError(
                f"batch_size is {size:,}, but there are only {self.num_examples:,} pairs in an epoch: give a"
                " smaller batch_size"
            )
        per_epoch = self.num_examples // size
        epoch, done = divmod(how.start_step, per_epoch)
        for number in itertools.count(epoch):
            records = itertools.islice(self._open_epoch(number), done * size, per_epoch * size)
            for step in range(done, per_epoch):
                rows = list(itertools.islice(records, size))
                first = step * size + mine.start
                yield self._piece(rows, step * size, size, mine, first)._batch(
                    first + np.arange(mine.stop - mine.start), (how.seed, number)
                )
            done = 0

    def _piece(self, rows: list[Record], start: int, size: int, mine: slice, first: int) -> _Piece:
        if len(rows) < size:
            raise UserError(
                f"the stream ended after {start + len(rows):,} of {self.num_examples:,} records: give"
                f" examples={start + len(rows)}"
            )
        arrays = RecordReader(self._tokenizer, self.features).arrays(rows[mine])
        return _Piece(self.features, arrays, self._tokenizer.fingerprint, first)

    def once(self, count: int | None = None) -> Batch:
        """Returns the first `count` records (None: an epoch) as a batch, in the stream's order."""
        count = self.num_examples if count is None else min(count, self.num_examples)
        rows = list(itertools.islice(self._open_epoch(0), count))
        piece = self._piece(rows, 0, count, slice(0, count), 0)
        return piece._batch(np.arange(count), (0, 0), in_order=True)

    def _block(self, examples: np.ndarray) -> object:
        raise NotImplementedError  # only a `_Piece` of the stream has random access


class _Piece(ArrayDataset):
    """Consecutive records of a stream, with their numbers in the epoch, from `first` on."""

    def __init__(self, features: Features, arrays: RecordArrays, tokenizer_fingerprint: str, first: int):
        ExampleDataset.__init__(self, features, len(arrays.offsets) - 1, tokenizer_fingerprint, None)
        self._tables, self._columns, self._offsets = arrays.tables, arrays.columns, arrays.offsets
        self._first = first
        lists = [name for name, field in self._fields.items() if field.count is not None]
        empty = np.flatnonzero(np.diff(arrays.offsets) == 0)
        if lists and len(empty):
            raise UserError(
                f"record {first + int(empty[0])} of the stream has no {lists[0]}, of which a batch needs"
                f" {self._fields[lists[0]].count} per example: leave such records out of the stream"
            )

    def _block(self, examples: np.ndarray) -> object:
        return super()._block(examples - self._first)

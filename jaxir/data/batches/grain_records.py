"""Training data larger than memory: examples in ArrayRecord files, read by Grain in the order of an epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Numbers, TokenCounts, fields_of
from jaxir.core.installation import require
from jaxir.core.progress import progress
from jaxir.core.values import Count, checked
from jaxir.data.batches.batch_plan import Batch, Plan, choose, in_one_order, keys_of_twins, noun_of
from jaxir.data.batches.record_arrays import check_list
from jaxir.data.batches.record_files import MEND, Block, read_description
from jaxir.data.batches.text_data import TextData
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.storage import fingerprints
from jaxir.storage.files import local_path
from jaxir.storage.saved_arrays import check_same, in_words

if TYPE_CHECKING:
    from grain.sources import ArrayRecordDataSource

# Of the reader of a file: records that are far from each other.
_READER_OPTIONS = {"max_parallelism": "0"}
# How ArrayRecord says that a file is not what it wrote.
_DAMAGE = (ValueError, IndexError, RuntimeError, OSError)
_COUNT_AT_ONCE = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class GrainRecords(TextData):
    """Examples that `jaxir.prepare records` has tokenised and written, more than memory holds.

    The same batches, bit for bit, as the examples themselves would give. None of them can be malformed.

    Attributes:
      directory: where they are.
      threads: how many steps' batches are read at a time, ahead of the training.
    """

    directory: str
    threads: Count = 4

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> RecordDataset:
        """Opens the files; tokenizer, lengths and prompts must be those they were made with.

        Raises:
          UserError: no such files, damaged ones, or made with another tokenizer, other lengths or prompts.
        """
        found = RecordDataset(self.directory, features, threads=self.threads)
        if found.tokenizer_fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{self.directory} was made with another tokenizer than the model's; make it again"
            )
        return found


class RecordDataset:
    """Examples on a disk; what a trainer reads. Each batch is read when it is due, by Grain's threads.

    In memory are the batches that are ahead, the order of an epoch (see `batch_plan.order_of`), the indexes
    of the files, 8 bytes an example, and some 100 MB of ArrayRecord's buffers.

    Attributes:
      num_examples: how many.
      features: what a batch holds.
      tokenizer_fingerprint: of the tokenizer that made the ids.
      truncation: counts of texts that were cut, by the name of `Tokens.table`; empty if not known.
      order_depends_on_parts: whether other batches come where more processes share them: never.
    """

    order_depends_on_parts = False

    def __init__(self, directory: str | Path, features: Features, *, threads: int):
        """Opens what `record_files.write_records` wrote.

        Args:
          directory: where it is.
          features: what a batch holds: fields of those that were written, as they were. Of a list any number
            can be asked for.
          threads: how many steps are read at a time.

        Raises:
          UserError: no such files, damaged ones, files that lack a field or have it in another form, or
            grain is not installed.
        """
        require("grain", "grain", "array_record")
        self._directory = local_path(directory)
        self._written = read_description(self._directory)
        self._fields, self._threads = fields_of(features), threads
        self.features = dict(features)
        self.num_examples = self._written.counts.examples
        self.tokenizer_fingerprint = self._written.tokenizer_fingerprint
        self.truncation = self._written.truncation
        for name, field in self._fields.items():
            if name not in self._written.fields:
                raise UserError(
                    f"the objective reads the field {name!r}, but {self._directory} has only"
                    f" {', '.join(self._written.fields)}; make it again"
                )
            check_same(self._directory, name, self._written.fields[name], field)
            if field.count is not None:
                check_list(name, field, self._written.counts)
        self._files = self._open()

    def __repr__(self) -> str:
        return f"RecordDataset({in_words(self.features, self.num_examples)} in {self._directory})"

    @property
    def fingerprint(self) -> str:
        """Tells these examples from others, in words with a hash that was made as they were written."""
        found = self._written.hash[: fingerprints.DIGITS]
        return f"{in_words(self.features, self.num_examples)} in records, hash {found}"

    def batches(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[Batch]:
        """Yields batches without end, from step `start_step` on: those of `ArrayDataset.batches`.

        Args and errors are the same; reading raises a UserError where a file is damaged.
        """
        plan = Plan(
            self.num_examples,
            batch_size=batch_size,
            seed=seed,
            process_index=process_index,
            process_count=process_count,
            noun=noun_of(self.features),
        )
        return self._ahead(_Steps(self, plan, seed), start_step)

    def once(self, count: int | None = None) -> Batch:
        """Returns `count` examples, or all, as `ArrayDataset.once`."""
        return self._batch(in_one_order(self.num_examples, count), (0, 0), in_order=True)

    def list_lengths(self) -> set[int]:
        """Returns the lengths that the lists of examples have: one pass over the files."""
        found: set[int] = set()
        for examples in self._in_turn("looking at lists"):
            found.update(np.unique(self._read(examples).counts).tolist())
        return found

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        """Counts the tokens of the different texts of a field, which is no list: two passes over the files.

        Keys of the texts and their places are in memory meanwhile, 26 bytes an example.
        """
        keys = np.empty([self.num_examples, 2], np.int32)
        for examples in self._in_turn("looking for texts that come twice"):
            keys[examples] = self._read(examples).keys(field, None)
        first = np.zeros(self.num_examples, bool)
        first[np.unique(keys.view(np.int64)[:, 0], return_index=True)[1]] = True
        texts, texts_with, occurrences = 0, *np.zeros((2, vocab_size), np.int64)
        for examples in self._in_turn("counting tokens"):
            found = self._read(examples).table(field, first[examples]).token_counts(vocab_size)
            texts, texts_with = texts + found.texts, texts_with + found.texts_with
            occurrences += found.occurrences
        return TokenCounts(texts, texts_with, occurrences)

    def _in_turn(self, what: str) -> Iterator[np.ndarray]:
        with progress(total=self.num_examples, what=what, unit="examples") as bar:
            for first in range(0, self.num_examples, _COUNT_AT_ONCE):
                examples = np.arange(first, min(first + _COUNT_AT_ONCE, self.num_examples))
                yield examples
                bar.update(len(examples))

    def _ahead(self, steps: _Steps, start_step: int) -> Iterator[Batch]:
        import grain

        options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=self._threads + 1)
        iterator = iter(grain.MapDataset.source(steps).to_iter_dataset(options))
        # All that Grain would keep in a checkpoint is the number of the step, which a run has there anyway.
        iterator.set_state({"next_index": start_step})
        with contextlib.closing(iterator):
            yield from iterator

    def _batch(
        self, examples: np.ndarray, seed_and_epoch: tuple[int, int], *, in_order: bool = False
    ) -> Batch:
        block, batch = self._read(examples), {}
        for name, feature in self.features.items():
            items = None
            if feature.count is not None:
                items = choose(feature.count, block.counts, examples, seed_and_epoch, in_order=in_order)
            if isinstance(feature, Key):
                batch[name] = block.keys(feature.field, items)
            elif isinstance(feature, Numbers):
                batch[name] = block.values(feature.field, items)
            else:
                batch[name] = block.ids(feature.field, items, feature.length)
        return keys_of_twins(batch, self.features)

    def _open(self) -> ArrayRecordDataSource:
        from grain.sources import ArrayRecordDataSource

        # With the numbers of records none is opened before it is read from.
        places = [(self._directory / name, count) for name, (count, _) in self._written.files.items()]
        return ArrayRecordDataSource([f"{path}[0:{count}]" for path, count in places], _READER_OPTIONS)

    def _read(self, examples: np.ndarray) -> Block:
        try:
            return self._block(examples)
        except _DAMAGE:
            ends = np.cumsum([count for count, _ in self._written.files.values()])
            for number, name in enumerate(self._written.files):
                of_file = examples[np.searchsorted(ends, examples, side="right") == number]
                if len(of_file):
                    self._check(of_file, name)
            raise

    def _check(self, examples: np.ndarray, name: str) -> None:
        try:
            self._block(examples)
        except _DAMAGE as error:
            words = " ".join(str(error).split())
            raise UserError(f"{self._directory} is damaged: {name}: {words:.200}; {MEND}") from error

    def _block(self, examples: np.ndarray) -> Block:
        block = Block(self._files.__getitems__(examples.tolist()), self._written)
        if (block.numbers != examples).any():
            raise ValueError("its records are in the place of others")
        return block


class _Steps:
    """The batch of each step, in Grain's terms a source with random access."""

    def __init__(self, dataset: RecordDataset, plan: Plan, seed: int):
        self._dataset, self._plan, self._seed = dataset, plan, seed

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> dict[str, Any]:
        drawn = self._plan(step)
        return self._dataset._batch(drawn.examples, (self._seed, drawn.epoch))

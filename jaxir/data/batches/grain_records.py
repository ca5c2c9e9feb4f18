"""Training data larger than memory, in ArrayRecord files that Grain reads in the order of an epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Numbers, TokenCounts, Tokens
from jaxir.core.installation import require
from jaxir.core.progress import progress
from jaxir.core.values import Count, checked
from jaxir.data.batches.batch_plan import Batch, Batching
from jaxir.data.batches.dataset import ExampleDataset, in_words
from jaxir.data.batches.record_arrays import check_list
from jaxir.data.batches.record_files import MEND, REMAKE, Block, read_description
from jaxir.data.batches.text_data import TextData
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.storage import fingerprints
from jaxir.storage.files import local_path

_READER_OPTIONS = {"max_parallelism": "0"}  # no read-ahead, because examples are read in random order
_COUNT_AT_ONCE = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class GrainRecords(TextData):
    """Training data that `jaxir.prepare records` has tokenised and written, which may exceed memory.

    The batches are bit-identical to those of the same data in memory.

    Attributes:
      directory: directory that `jaxir.prepare records` wrote.
      threads: number of threads that read batches before training needs them.
    """

    directory: str
    threads: Count = 4

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> RecordDataset:
        """Opens the files; raises UserError if tokenizer, lengths or prompts differ from the files'."""
        found = RecordDataset(self.directory, features, threads=self.threads)
        if found.tokenizer_fingerprint != tokenizer.fingerprint:
            raise UserError(f"{self.directory} was made with another tokenizer than the model's; {REMAKE}")
        return found


class RecordDataset(ExampleDataset):
    """Tokenised examples on disk. Grain's threads read each batch shortly before it is needed.

    Memory holds the next few batches, the order of an epoch (see `batch_plan.order_of`), an index of 8
    bytes per example, and some 100 MB of ArrayRecord's buffers.
    """

    def __init__(self, directory: str | Path, features: Features, *, threads: int):
        """Opens files of `record_files.write_records`; the number of list items per batch may differ."""
        require("grain", "grain", "array_record")
        from grain.sources import ArrayRecordDataSource

        self._directory, self._threads = local_path(directory), threads
        self._written = written = read_description(self._directory)
        super().__init__(features, written.counts.examples, written.tokenizer_fingerprint, written.truncation)
        for name, field in self._fields.items():
            if name not in written.fields:
                raise UserError(
                    f"the objective reads the field {name!r}, but {self._directory} has only"
                    f" {', '.join(written.fields)}; {REMAKE}"
                )
            _check_same(self._directory, name, written.fields[name], field)
            if field.count is not None:
                check_list(name, field, written.counts)
        # A path with a range of records keeps the reader from opening all files at once to count records.
        paths = [f"{self._directory / name}[0:{count}]" for name, (count, _) in written.files.items()]
        self._files = ArrayRecordDataSource(paths, _READER_OPTIONS)

    def __repr__(self) -> str:
        return f"RecordDataset({in_words(self.features, self.num_examples)} in {self._directory})"

    @property
    def fingerprint(self) -> str:
        """A description and the hash that was computed when the records were written."""
        found = self._written.hash[: fingerprints.DIGITS]
        return f"{in_words(self.features, self.num_examples)} in records, hash {found}"

    def batched(self, how: Batching) -> Iterator[Batch]:
        plan = self._plan(how)

        def batch(number: int) -> Batch:
            step = plan(number)
            return self._batch(step.examples, (how.seed, step.epoch))

        return self._read_ahead(_Steps(batch), how.start_step)

    def list_lengths(self) -> set[int]:
        found: set[int] = set()
        for examples in self._in_turn("looking at lists"):
            found.update(np.unique(self._block(examples).counts).tolist())
        return found

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        """Counts the tokens of the distinct texts in two passes over the files, with 26 bytes per example."""
        keys = np.empty([self.num_examples, 2], np.int32)
        for examples in self._in_turn("looking for repeated texts"):
            keys[examples] = self._block(examples).keys(field, None)
        first = np.zeros(self.num_examples, bool)
        first[np.unique(keys.view(np.int64)[:, 0], return_index=True)[1]] = True
        total = TokenCounts(0, *np.zeros((2, vocab_size), np.int64))
        for examples in self._in_turn("counting tokens"):
            found = self._block(examples).table(field, first[examples]).token_counts(vocab_size)
            total = TokenCounts(*map(sum, zip(total, found, strict=True)))
        return total

    def _in_turn(self, what: str) -> Iterator[np.ndarray]:
        with progress(total=self.num_examples, what=what, unit="examples") as bar:
            for first in range(0, self.num_examples, _COUNT_AT_ONCE):
                examples = np.arange(first, min(first + _COUNT_AT_ONCE, self.num_examples))
                yield examples
                bar.update(len(examples))

    def _read_ahead(self, steps: _Steps, start_step: int) -> Iterator[Batch]:
        import grain

        options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=self._threads + 1)
        iterator = iter(grain.MapDataset.source(steps).to_iter_dataset(options))
        iterator.set_state({"next_index": start_step})
        with contextlib.closing(iterator):
            yield from iterator

    def _block(self, examples: np.ndarray) -> Block:
        try:
            block = Block(self._files.__getitems__(examples.tolist()), self._written)
            if (block.numbers != examples).any():
                raise ValueError("its record files were renamed")
            return block
        except (ValueError, IndexError, RuntimeError, OSError) as error:  # ArrayRecord raises all of these
            words = " ".join(str(error).split())
            raise UserError(f"{self._directory} is damaged: {words:.200}; {MEND}") from error


class _Steps:
    """A Grain source whose item i is the batch of step i."""

    def __init__(self, batch: Callable[[int], Batch]):
        self._batch = batch

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> Batch:
        return self._batch(step)


def _check_same(directory: Path, name: str, saved: Tokens | Numbers, wanted: Tokens | Numbers) -> None:
    """Raises UserError if a field's stored form is not `wanted`; only the number of items may differ."""
    if (saved.count is None) != (wanted.count is None) or type(saved) is not type(wanted):
        raise UserError(
            f"{directory} has other values in the field {name!r} than the objective reads; {REMAKE}"
        )
    was, now = (dataclasses.asdict(field) for field in (saved, wanted))
    for part in was:
        if part != "count" and was[part] != now[part]:
            raise UserError(
                f"{directory} was made with {part} {was[part]!r} of {name}, not {now[part]!r}; {REMAKE}"
            )

"""Training examples as arrays: tokenised once, compact, batched as a pure function of (seed, step)."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Record, TokenCounts, Tokens, fields_of
from jaxir.core.progress import progress
from jaxir.data.batches.batch_plan import Batch, choose, draw, in_one_order, keys_of_twins, noun_of
from jaxir.data.batches.record_arrays import ListCounts, RecordReader, check_list
from jaxir.data.batches.text_table import TextTable
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.data.text.truncation import Truncation, as_json, from_json
from jaxir.storage import fingerprints
from jaxir.storage.checksums import check, directory_with_checksums
from jaxir.storage.files import local_path
from jaxir.storage.saved_arrays import FORMAT, META, as_pairs_were_named, check_same, in_words, read


class ArrayDataset:
    """Examples with the fields that an objective's features name; what a trainer reads.

    A batch is a dict of arrays, one for each feature, of fixed shapes, so that a training step compiles once.
    Needs no TensorFlow. Made by `from_records` or `load`.

    Attributes:
      num_examples: how many.
      features: what a batch holds.
      tokenizer_fingerprint: of the tokenizer that made the ids.
      truncation: counts of texts that were cut, by the name of `Tokens.table`; empty if not known.
      order_depends_on_parts: whether other batches come where more processes share them: never.
    """

    order_depends_on_parts = False

    def __init__(
        self,
        *,
        features: Features,
        tables: Mapping[str, TextTable],
        columns: Mapping[str, np.ndarray],
        offsets: np.ndarray,
        tokenizer_fingerprint: str,
        left_out: int = 0,
        without_others: int = 0,
        truncation: Mapping[str, Truncation] | None = None,
    ):
        """Takes arrays as they are.

        Args:
          features: what a batch holds.
          tables: distinct texts, by the name of `Tokens.table`.
          columns: by field: of a text int32, rows of its table; of a number float32. [P], or [K] of a list.
          offsets: int64 [P + 1]; example p has items offsets[p] to offsets[p + 1] of each list.
          tokenizer_fingerprint: of the tokenizer that made the ids.
          left_out: how many texts of lists were left out, being the same as the text they should be unlike
            once cut; told where they are read.
          without_others: how many examples have no items but such, which is told likewise.
          truncation: counts of texts that were cut; None: not known.

        Raises:
          UserError: there is no example, or lists are read that are empty for some, or in which everything is
            like what it should be unlike.
        """
        self.features, self.tokenizer_fingerprint = dict(features), tokenizer_fingerprint
        self.truncation = dict(truncation or {})
        self.num_examples = len(offsets) - 1
        self._fields = fields_of(features)
        self._tables, self._columns, self._offsets = dict(tables), dict(columns), offsets
        self._left_out, self._without_others = left_out, without_others
        self._content: str | None = None
        if not self.num_examples:
            raise UserError("there are no training examples")
        empty = int(np.sum(np.diff(offsets) == 0))
        counts = ListCounts(self.num_examples, int(offsets[-1]), empty, left_out, without_others)
        for name, field in self._fields.items():
            if field.count is not None:
                check_list(name, field, counts)

    def __repr__(self) -> str:
        parts = []
        for name, field in self._fields.items():
            if field.count is not None:
                parts.append(f"{field.count} {name} each")
            elif isinstance(field, Tokens):
                parts.append(
                    f"{len(self._tables[field.table].keys):,} {field.table} of {field.length} tokens"
                )
        return f"ArrayDataset({self.num_examples:,} examples: {', '.join(parts)})"

    @property
    def fingerprint(self) -> str:
        """Tells these examples from others, in words with a hash of every token, key and number in its order.

        The first call reads all arrays once; of examples that were saved with their hash it reads none.
        """
        return f"{in_words(self.features, self.num_examples)}, hash {self._hash()[: fingerprints.DIGITS]}"

    def _hash(self) -> str:
        if self._content is None:
            self._content = fingerprints.of_arrays(as_pairs_were_named(self.features, self._arrays()))
        return self._content

    @classmethod
    def from_records(
        cls, records: Iterable[Record], tokenizer: Tokenizer, features: Features
    ) -> ArrayDataset:
        """Tokenises `records`, each distinct text once, under a progress bar.

        Args:
          records: the examples; texts are not kept.
          tokenizer: makes the ids.
          features: what a batch holds.

        Raises:
          UserError: there is no record, one lacks a field, has another kind of value in it, or lists that are
            not equally long or empty where they are read.
        """
        reader = RecordReader(tokenizer, features)
        arrays = reader.arrays(progress(records, what="tokenising pairs", unit="pairs"))
        reader.tell_alike()
        return cls(
            features=features,
            **arrays._asdict(),
            tokenizer_fingerprint=tokenizer.fingerprint,
            truncation=reader.truncation(),
        )

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

        Each epoch has its own order; the examples left over from its last whole batch are not used in it.
        Where an example has more items in its lists than a batch holds, each epoch draws some; where fewer,
        they are repeated.

        Args:
          batch_size: examples of a step over all processes.
          seed: of the order and of the choice from lists; not negative.
          start_step: where to begin, at no cost.
          process_index: which share of each batch to yield: the shares of processes 0, 1, ... are its
            consecutive parts.
          process_count: number of processes.

        Raises:
          UserError: fewer examples than `batch_size`, or it does not divide by `process_count`.
        """
        drawn = draw(
            self.num_examples,
            batch_size=batch_size,
            seed=seed,
            start_step=start_step,
            process_index=process_index,
            process_count=process_count,
            noun=noun_of(self.features),
        )
        return (self._batch(one.examples, (seed, one.epoch)) for one in drawn)

    def once(self, count: int | None = None) -> Batch:
        """Returns `count` examples, or all, each once and shuffled: as the first epoch of seed 0 has them.

        Items of a list stand in the record's order. If an example has more items than a batch holds, they are
        those that the first epoch of seed 0 draws; if it has fewer, the list begins again.
        """
        return self._batch(in_one_order(self.num_examples, count), (0, 0), in_order=True)

    def list_lengths(self) -> set[int]:
        """Returns the lengths that the lists of examples have."""
        return set(np.unique(np.diff(self._offsets)).tolist())

    def _batch(
        self, examples: np.ndarray, seed_and_epoch: tuple[int, int], *, in_order: bool = False
    ) -> Batch:
        starts = self._offsets[examples]
        counts = self._offsets[examples + 1] - starts

        def values(field: str, count: int | None) -> np.ndarray:
            at = examples
            if count is not None:
                at = starts[:, None] + choose(count, counts, examples, seed_and_epoch, in_order=in_order)
            return self._columns[field][at]

        batch: Batch = {}
        for name, feature in self.features.items():
            found = values(feature.field, feature.count)
            if isinstance(feature, Key):
                table = self._tables[self._fields[feature.field].table]
                batch[name] = table.keys[found]
            elif isinstance(feature, Tokens):
                batch[name] = self._tables[feature.table].ids(found, feature.length)
            else:
                batch[name] = found
        return keys_of_twins(batch, self.features)

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        """Counts the tokens of the different texts of a field that is read: one pass over them."""
        return self._tables[self._fields[field].table].token_counts(vocab_size)

    def keys(self, field: str) -> np.ndarray:
        """Returns int32 [M, 2], the keys of the different texts of a field that is read."""
        return self._tables[self._fields[field].table].keys

    def shortened(self) -> ArrayDataset:
        """Returns the same examples with the smallest lengths, multiples of 16, that cut no text."""
        return self.with_lengths(self.needed_lengths())

    def needed_lengths(self) -> dict[str, int]:
        """Returns by the name of each feature of tokens the length that `shortened` gives it."""

        def enough(table: TextTable, length: int) -> int:
            return min(length, -(-int(np.max(np.diff(table.offsets), initial=1)) // 16) * 16)

        tokens = {name: f for name, f in self.features.items() if isinstance(f, Tokens)}
        return {name: enough(self._tables[f.table], f.length) for name, f in tokens.items()}

    def with_lengths(self, lengths: Mapping[str, int]) -> ArrayDataset:
        """Returns the same examples with other lengths, by the name of the feature; none may cut a text."""
        found = copy.copy(self)
        found.features = {
            name: dataclasses.replace(f, length=lengths[name]) if name in lengths else f
            for name, f in self.features.items()
        }
        found._fields = fields_of(found.features)
        return found

    def save(self, directory: str | Path) -> None:
        """Writes the arrays (.npy) and their description into a new directory, all or nothing."""
        meta = {
            "format": FORMAT,
            "fields": {name: dataclasses.asdict(field) for name, field in self._fields.items()},
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "num_examples": self.num_examples,
            "left_out": self._left_out,
            "without_others": self._without_others,
            "hash": self._hash(),
            "truncation": as_json(self.truncation),
        }
        with directory_with_checksums(directory) as aside:
            for name, array in self._arrays().items():
                np.save(aside / f"{name}.npy", array)
            (aside / META).write_text(json.dumps(meta, indent=2) + "\n")

    @classmethod
    def load(cls, directory: str | Path, features: Features) -> ArrayDataset:
        """Opens what `save` wrote; the arrays stay on disk and are read as they are needed.

        Args:
          directory: where they are.
          features: what a batch holds: fields of those that were saved, as they were. Of a list that was
            saved any number can be asked for.

        Raises:
          UserError: no such dataset, a damaged one, or one that lacks a field or has it in another form.
        """
        directory = local_path(directory)
        check(directory)
        try:
            meta, saved, arrays = read(directory)
            wanted = fields_of(features)
            for name, field in wanted.items():
                if name not in saved:
                    raise UserError(
                        f"the objective reads the field {name!r}, but {directory} has only"
                        f" {', '.join(saved)}; make it again"
                    )
                check_same(directory, name, saved[name], field)
            tables = {
                field.table: TextTable(*(arrays[f"{field.table}_{part}"] for part in TextTable._fields))
                for field in wanted.values()
                if isinstance(field, Tokens)
            }
            sizes = {False: meta["num_examples"], True: int(arrays["offsets"][-1])}
            if len(arrays["offsets"]) != meta["num_examples"] + 1 or any(
                len(arrays[name]) != sizes[field.count is not None] for name, field in wanted.items()
            ):
                raise UserError(f"{directory} is damaged: its arrays do not belong together")
            found = cls(
                features=features,
                tables=tables,
                columns={name: arrays[name] for name in wanted},
                offsets=arrays["offsets"],
                tokenizer_fingerprint=meta["tokenizer_fingerprint"],
                left_out=meta["left_out"],
                without_others=meta["without_others"],
                truncation=from_json(meta.get("truncation")),
            )
            found._content = meta.get("hash")
            return found
        except FileNotFoundError as error:
            raise UserError(f"{directory} holds no saved examples: {META} is missing") from error
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, IndexError) as error:
            raise UserError(f"{directory} is damaged: {error}") from error

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"offsets": self._offsets} | self._columns
        for name, table in self._tables.items():
            arrays |= {f"{name}_{part}": array for part, array in table._asdict().items()}
        return arrays

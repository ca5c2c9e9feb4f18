"""Training examples that are tokenised once, before training, and kept in memory as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Record, TokenCounts, Tokens
from jaxir.core.progress import progress
from jaxir.data.batches.dataset import ExampleDataset, in_words
from jaxir.data.batches.record_arrays import ListCounts, RecordArrays, RecordReader, check_list
from jaxir.data.batches.text_table import TextTable
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.data.text.truncation import Truncation
from jaxir.objectives.pair_batch import pair_format
from jaxir.storage import fingerprints


class ArrayDataset(ExampleDataset):
    """Tokenised examples in memory. Create one with `from_records`."""

    def __init__(
        self,
        features: Features,
        arrays: RecordArrays,
        *,
        tokenizer_fingerprint: str,
        truncation: Mapping[str, Truncation] | None = None,
    ):
        offsets = arrays.offsets
        super().__init__(features, len(offsets) - 1, tokenizer_fingerprint, truncation)
        self._tables, self._columns, self._offsets = arrays.tables, arrays.columns, offsets
        self._content: str | None = None
        if not self.num_examples:
            raise UserError("there are no training examples: the data have no records")
        empty = int(np.sum(np.diff(offsets) == 0))
        counts = ListCounts(self.num_examples, int(offsets[-1]), empty, *arrays[-2:])
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
        """A description and a hash of all tokens, keys and numbers, which is computed on first access."""
        if self._content is None:
            self._content = fingerprints.of_arrays(self._hashed_arrays())
        return f"{in_words(self.features, self.num_examples)}, hash {self._content[: fingerprints.DIGITS]}"

    @classmethod
    def from_records(
        cls, records: Iterable[Record], tokenizer: Tokenizer, features: Features
    ) -> ArrayDataset:
        """Tokenises `records`, each distinct text once, with a progress bar. Does not keep the texts.

        Raises:
          UserError: there is no record, a field is missing or of the wrong type, or lists differ in length.
        """
        reader = RecordReader(tokenizer, features)
        arrays = reader.arrays(progress(records, what="tokenising pairs", unit="pairs"))
        reader.warn_of_equal_tokens()
        counts = reader.truncation()
        return cls(features, arrays, tokenizer_fingerprint=tokenizer.fingerprint, truncation=counts)

    def list_lengths(self) -> set[int]:
        return set(np.unique(np.diff(self._offsets)).tolist())

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        return self._table(field).token_counts(vocab_size)

    def keys(self, field: str) -> np.ndarray:
        """Returns the keys of a field's distinct texts: int32 [M, 2]."""
        return self._table(field).keys

    def needed_lengths(self) -> dict[str, int]:
        """Returns for each feature of tokens the smallest multiple of 16 that truncates no text."""

        def enough(table: TextTable, length: int) -> int:
            return min(length, -(-int(np.max(np.diff(table.offsets), initial=1)) // 16) * 16)

        tokens = {name: f for name, f in self.features.items() if isinstance(f, Tokens)}
        return {name: enough(self._tables[f.table], f.length) for name, f in tokens.items()}

    def _table(self, field: str) -> TextTable:
        return self._tables[self._fields[field].table]

    def _block(self, examples: np.ndarray) -> _Rows:
        return _Rows(self, examples)

    def _hashed_arrays(self) -> dict[str, np.ndarray]:
        """Returns all arrays; pairs keep the array names of older versions, and so their fingerprints."""
        arrays = {"offsets": self._offsets} | self._columns
        for name, table in self._tables.items():
            arrays |= {f"{name}_{part}": array for part, array in table._asdict().items()}
        if pair_format(self.features) is None:
            return arrays
        arrays["pairs"] = np.stack([arrays.pop("query"), arrays.pop("passage")], axis=1)
        arrays["negative_offsets"] = arrays.pop("offsets")
        return {"negatives": np.zeros(0, np.int32)} | arrays


class _Rows:
    """Some examples of an `ArrayDataset`; implements `dataset.Block`."""

    def __init__(self, dataset: ArrayDataset, examples: np.ndarray):
        self._dataset, self._examples = dataset, examples
        self._starts = dataset._offsets[examples]
        self.counts = dataset._offsets[examples + 1] - self._starts

    def values(self, name: str, items: np.ndarray | None) -> np.ndarray:
        at = self._examples if items is None else self._starts[:, None] + items
        return self._dataset._columns[name][at]

    def keys(self, name: str, items: np.ndarray | None) -> np.ndarray:
        return self._dataset._table(name).keys[self.values(name, items)]

    def ids(self, name: str, items: np.ndarray | None, length: int) -> np.ndarray:
        return self._dataset._table(name).ids(self.values(name, items), length)

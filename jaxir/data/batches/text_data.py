"""The base classes of training data: their settings, from which `build` makes a dataset for a tokenizer."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Record
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.dataset import Dataset
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.text.tokenizer import Tokenizer


def check_data(what: str, data: Any) -> None:
    if not isinstance(data, TextData | Dataset):
        known = "Pairs(queries, passages) or BeirPairs(directory=...)"
        raise UserError(f"{what} must be training data, such as {known}, not {data!r:.80}")


def dataset_of(
    data: TextData | Dataset, tokenizer: Tokenizer, features: Features, *, on_bad_input: OnBadInput | Policy
) -> Dataset:
    """Builds the dataset of `data`; if `data` is a dataset already, checks its features and tokenizer."""
    if isinstance(data, TextData):
        return data.build(tokenizer, features, on_bad_input=on_bad_input)
    if lacking := [name for name in features if name not in data.features]:
        raise UserError(
            f"the dataset was built with {', '.join(data.features)}, but the objective also needs"
            f" {', '.join(lacking)}: build it with the objective's features, or pass the data instead"
        )
    made_by = data.tokenizer_fingerprint
    if made_by is not None and tokenizer is not None and made_by != tokenizer.fingerprint:
        raise UserError(
            "the dataset was built with another tokenizer than the model's, so its ids mean other tokens:"
            " build it with the model's tokenizer, or pass the data instead of the dataset"
        )
    return data


class TextData(abc.ABC):
    """The base class of all kinds of training data. A subclass defines `dataset`."""

    def build(
        self, tokenizer: Tokenizer, features: Features, *, on_bad_input: OnBadInput | Policy = "stop"
    ) -> Dataset:
        """Reads all files once, builds the dataset, and reports the records that were skipped.

        Args:
          tokenizer: the model's tokenizer.
          features: the arrays of a batch: an objective's `features`.
          on_bad_input: what to do with malformed records.

        Raises:
          BadInputError: a record is malformed, unless malformed records are skipped.
          UserError: the data have no records, or lack a field of `features`.
        """
        collector = on_bad_input if isinstance(on_bad_input, OnBadInput) else OnBadInput(on_bad_input)
        dataset = self.dataset(tokenizer, features, collector)
        collector.report()
        return dataset

    @abc.abstractmethod
    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> Dataset:
        """Builds the dataset; records malformed records in `on_bad_input`, which the caller reports."""


class RecordSource(TextData):
    """The base class of data that are read record by record into memory. A subclass defines `records`."""

    @abc.abstractmethod
    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        """Yields the examples as {field: value}."""

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> ArrayDataset:
        return ArrayDataset.from_records(self.records(on_bad_input), tokenizer, features)

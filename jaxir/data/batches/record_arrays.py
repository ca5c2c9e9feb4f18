"""Converts records to arrays: tokenises each distinct text once, drops negatives equal to the positive."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Numbers, Record, Tokens, check_record, fields_of
from jaxir.data.batches.batch_plan import drop_duplicates
from jaxir.data.batches.text_table import TableBuilder, TextTable
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.data.text.truncation import Truncation


class RecordArrays(NamedTuple):
    """P examples as arrays; their lists have K items in all.

    Attributes:
      tables: distinct texts, by the name of `Tokens.table`.
      columns: {field: int32 rows of the text field's table, or float32 numbers}, [P], or [K] for a list.
      offsets: int64 [P + 1]; the items of example p in each list are offsets[p] to offsets[p + 1].
      left_out: number of list items dropped because, once truncated, they equal the text that they must
          differ from.
      without_others: number of examples whose items all equal the text they must differ from.
    """

    tables: dict[str, TextTable]
    columns: dict[str, np.ndarray]
    offsets: np.ndarray
    left_out: int = 0
    without_others: int = 0


class RecordReader:
    def __init__(self, tokenizer: Tokenizer, features: Features):
        self._fields = fields_of(features)
        self._builders: dict[str, TableBuilder] = {}
        for field in self._fields.values():
            if isinstance(field, Tokens) and field.table not in self._builders:
                self._builders[field.table] = TableBuilder(
                    tokenizer, field.length, field.prompt, what=field.table
                )
        self._count = 0

    def arrays(self, records: Iterable[Record]) -> RecordArrays:
        """Returns the arrays of `records`; example numbers in errors go on from earlier calls."""
        columns: dict[str, list[Any]] = {name: [] for name in self._fields}
        offsets = [0]
        for record in records:
            check_record(record, self._fields, self._count)
            sizes = set()
            for name, field in self._fields.items():
                value = record[name]
                items = [value] if field.count is None else value
                if isinstance(field, Tokens):
                    builder = self._builders[field.table]
                    columns[name].extend(builder.row(*item, self._count) for item in items)
                else:
                    columns[name].extend(items)
                if field.count is not None:
                    sizes.add(len(items))
            if len(sizes) > 1:
                lists = ", ".join(
                    f"{len(record[n])} {n}" for n, f in self._fields.items() if f.count is not None
                )
                raise UserError(f"example {self._count}: the lists must have equal lengths, got {lists}")
            offsets.append(offsets[-1] + (sizes.pop() if sizes else 0))
            self._count += 1
        tables = {name: builder.take() for name, builder in self._builders.items()}
        arrays = {
            name: np.array(column, np.int32 if isinstance(self._fields[name], Tokens) else np.float32)
            for name, column in columns.items()
        }
        return self._drop_duplicates(tables, arrays, np.array(offsets, np.int64))

    def truncation(self) -> dict[str, Truncation]:
        return {name: builder.truncation for name, builder in self._builders.items()}

    def warn_of_equal_tokens(self) -> None:
        for builder in self._builders.values():
            builder.warn_of_equal_tokens()

    def _drop_duplicates(
        self, tables: dict[str, TextTable], columns: dict[str, np.ndarray], offsets: np.ndarray
    ) -> RecordArrays:
        left_out, without_others = 0, 0
        for name, field in self._fields.items():
            if isinstance(field, Tokens) and field.unlike is not None:
                keep, offsets, without_others = drop_duplicates(
                    tables[field.table], columns[field.unlike], columns[name], offsets
                )
                left_out = len(keep) - int(keep.sum())
                for other, of in self._fields.items():
                    if of.count is not None:
                        columns[other] = columns[other][keep]
        return RecordArrays(tables, columns, offsets, left_out, without_others)


class ListCounts(NamedTuple):
    """Counts of the items in the lists of examples.

    Attributes:
      examples: number of examples.
      items: number of items in the lists of all examples.
      empty: number of examples with empty lists.
      left_out: number of items dropped because, truncated, they equal the text they must differ from.
      without_others: number of examples whose items all equal the text they must differ from.
    """

    examples: int
    items: int
    empty: int
    left_out: int
    without_others: int


def check_list(name: str, field: Tokens | Numbers, counts: ListCounts) -> None:
    """Raises UserError if a list field is empty for some examples; prints how many items were left out."""
    count = counts.examples
    hint = ": set num_negatives to 0, or mine negatives for them" if name == "negatives" else ""
    if counts.empty:
        raise UserError(
            f"a batch needs {field.count} {name} per example, but {counts.empty:,} of {count:,} have none"
            f"{hint}"
        )
    if not isinstance(field, Tokens) or field.unlike is None:
        return
    if counts.without_others == count:
        raise UserError(
            f"all {name}, truncated to {field.length} tokens, equal the {field.unlike} of their example"
            f"{hint.replace('for them', 'that differ from it')}"
        )
    cut = f"truncated to {field.length} tokens"
    if counts.left_out:
        print(
            f"{counts.left_out:,} of {counts.left_out + counts.items:,} {name} left out: {cut}, they equal"
            f" the {field.unlike} of their example",
            file=sys.stderr,
        )
    if counts.without_others:
        print(
            f"warning: {counts.without_others:,} of {count:,} examples have only {name} that, {cut}, equal"
            f" their {field.unlike}: these examples are trained without {name}",
            file=sys.stderr,
        )

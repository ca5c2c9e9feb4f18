"""The user's own pairs, from memory or from a file with any column names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import OnBadInput, Policy, has_text
from jaxir.data.formats.pair_table import PairColumns, PairTable, Positives
from jaxir.data.formats.sources import PairExample, text_id
from jaxir.data.sets.dataset_pairs import DatasetPairs, StreamedPairs, pairs_of_dataset
from jaxir.data.sets.pair_sources import PairSource
from jaxir.storage.files import local_path


class Pairs(PairSource):
    """Pairs of a query and a passage that answers it. Equal texts are never used as each other's negatives.

        Pairs(["how do I undo a commit?"], ["git revert makes a new commit that ..."])
        Pairs.read("faq.csv")
        Pairs.of_dataset(datasets.load_dataset(NAME, split="train"))

    Attributes:
      queries: N texts.
      passages: N texts.
      negatives: N lists of passages that do not answer the query; a list may be empty.

    Args:
      queries: N texts.
      passages: N texts.
      negatives: N lists of passages that do not answer the query; None: empty lists.

    Raises:
      UserError: lists are empty or of unequal length, or an item is not a text.
    """

    def __init__(
        self,
        queries: Sequence[str],
        passages: Sequence[str],
        negatives: Sequence[Sequence[str]] | None = None,
    ):
        for number, texts in enumerate(() if negatives is None else negatives):
            if isinstance(texts, str) or not isinstance(texts, Iterable):
                raise UserError(f"pair {number}: the negatives must be a list of texts, not {texts!r:.40}")
        self.queries, self.passages = list(queries), list(passages)
        self.negatives = [[] for _ in self.queries] if negatives is None else [list(n) for n in negatives]
        if not len(self.queries) == len(self.passages) == len(self.negatives):
            raise UserError(
                f"{len(self.queries):,} queries, {len(self.passages):,} passages and {len(self.negatives):,}"
                " lists of negatives were given: give one passage (and one list of negatives) per query"
            )
        if not self.queries:
            raise UserError("queries and passages are empty: give at least one pair")
        for number, texts in enumerate(zip(self.queries, self.passages, self.negatives, strict=True)):
            query, passage, negatives = texts
            for name, text in (("query", query), ("passage", passage), *(("negative", n) for n in negatives)):
                if not isinstance(text, str) or not has_text(text):
                    raise UserError(f"pair {number}: the {name} must be a text, not {text!r:.40}")

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        query: str | None = None,
        passage: str | None = None,
        negatives: str | None = None,
        title: str | None = None,
        on_bad_input: Policy = "stop",
    ) -> Pairs:
        """Reads pairs from a JSONL, TSV, CSV (also gzipped) or Parquet file, like `jaxir.prepare`.

        Args:
          path: the file.
          query: the column of the queries; None: the column with a usual name, such as question.
          passage: the column of the passages; None: the column with a usual name, such as answer.
          negatives: the column of irrelevant passages; None: the column with a usual name, if any.
          title: the column of the passages' titles; None: the column with a usual name, if any.
          on_bad_input: stop at the first malformed record, or skip and count them.

        Raises:
          BadInputError: a record is malformed.
          UserError: the file or a column does not exist, or not exactly one column has a usual name.
        """
        columns = PairColumns(query=query, passage=passage, negatives=negatives, title=title)
        collector = OnBadInput(on_bad_input)
        found: dict[tuple[str, str], list[str]] = {}  # joins the negatives of a repeated pair
        positives, pairs = Positives(), []
        for pair in PairTable(path, columns).pairs(collector):
            positives.add(pair)
            pairs.append(pair)
        for example in (positives.without(pair).example for pair in pairs):
            of_pair = found.setdefault((example.query, example.passage), [])
            of_pair.extend(text for _, text in example.negatives)
        collector.report()
        positives.report(local_path(path))
        queries, passages = zip(*found, strict=True)
        return cls(queries, passages, list(found.values()))

    @staticmethod
    def of_dataset(
        data: Any,
        *,
        query: str | None = None,
        passage: str | None = None,
        negatives: str | None = None,
        title: str | None = None,
        query_id: str | None = None,
        passage_id: str | None = None,
        examples: int | None = None,
    ) -> DatasetPairs | StreamedPairs:
        """Returns training data of a `datasets.Dataset`, or of an `IterableDataset`, which is streamed.

        A `Dataset` is tokenised once, before training; its token ids are in memory, its texts are not. For a
        stream, only one batch is in memory. A stream keeps its order; `shuffle(buffer_size=N)` of `datasets`
        changes it. A resumed run reads the rows before its step again and drops them.

        Args:
          data: one split, with named columns.
          query: the column of the queries; None: the column with a usual name, such as anchor.
          passage: the column of the passages; None: the column with a usual name, such as positive.
          negatives: the column of irrelevant passages, a text or a list; None: a usual name, if any.
          title: the column of the passages' titles; None: a usual name, if any.
          query_id: the column of the queries' ids; None: a usual name, else hashes of the texts.
          passage_id: the column of the passages' ids; None: a usual name, else hashes of the texts.
          examples: for a stream, the number of rows in an epoch; None: the number in its metadata.

        Raises:
          UserError: a column does not exist, or the number of rows is unknown.
        """
        columns = PairColumns(query, passage, negatives, title, query_id, passage_id)
        return pairs_of_dataset(data, columns, examples)

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pairs; the ids are hashes of the texts."""
        for query, passage, negatives in zip(self.queries, self.passages, self.negatives, strict=True):
            yield PairExample(
                text_id(query), query, text_id(passage), passage, tuple((text_id(n), n) for n in negatives)
            )

    def __len__(self) -> int:
        return len(self.queries)

    def __repr__(self) -> str:
        count = sum(map(len, self.negatives))
        negatives = f", {count:,} negatives" if count else ""
        first = f"{self.queries[0]:.40}{'...' if len(self.queries[0]) > 40 else ''}"
        return f"Pairs({len(self):,} pairs{negatives}; the first query: {first!r})"

"""Training pairs as token arrays: tokenised once, compact, batched as a pure function of (seed, step)."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxir.checksums import check, directory_with_checksums
from jaxir.data import fingerprints
from jaxir.data.batch_plan import Batch, choose, features_of, negative_keys, share, without_positives
from jaxir.data.sources import PairExample
from jaxir.data.text_table import TableBuilder, TextTable
from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.files import local_path
from jaxir.progress import progress

_FORMAT = 1
_META = "pairs.json"


class PairDataset:
    """(query, passage) pairs with optional hard negatives; what a trainer reads.

    A batch is a dict of int32 arrays: query_ids [b, Lq], passage_ids [b, Lp], query_key, passage_key [b, 2]
    and, where `num_negatives` is N > 0, negative_ids [b, N, Lp] and negative_key [b, N, 2]. Lengths are
    fixed, so that a training step compiles once. Needs no TensorFlow. Made by `from_examples` or `load`.

    Attributes:
      num_examples: number of pairs.
      query_length, passage_length: Lq and Lp.
      num_negatives: N.
      tokenizer_fingerprint: of the tokenizer that made the ids.
      query_prompt, passage_prompt: what stands before each text.
      order_depends_on_parts: whether other batches come where more processes share them: never.
    """

    order_depends_on_parts = False

    def __init__(
        self,
        *,
        queries: TextTable,
        passages: TextTable,
        pairs: np.ndarray,
        negatives: np.ndarray,
        negative_offsets: np.ndarray,
        query_length: int,
        passage_length: int,
        num_negatives: int,
        tokenizer_fingerprint: str,
        query_prompt: str = "",
        passage_prompt: str = "",
        negatives_left_out: int = 0,
        pairs_without_negatives: int = 0,
    ):
        """Takes arrays as they are.

        Args:
          queries: distinct queries.
          passages: distinct passages, negatives among them.
          pairs: int32 [P, 2], rows of `queries` and `passages`.
          negatives: int32 [K], rows of `passages`.
          negative_offsets: int64 [P + 1]; pair p has negatives[negative_offsets[p]:negative_offsets[p + 1]].
          query_length: Lq.
          passage_length: Lp.
          num_negatives: N.
          tokenizer_fingerprint: of the tokenizer that made the ids.
          query_prompt: what stands before each query.
          passage_prompt: what stands before each passage.
          negatives_left_out: how many others there were, the same as their positive once cut, which is told
            where negatives are wanted.
          pairs_without_negatives: how many pairs have no negatives but such, which is told likewise.

        Raises:
          UserError: there is no pair, or negatives are wanted where a pair has none, or where no pair has one
            that is not its positive.
        """
        self.num_examples = len(pairs)
        self.query_length, self.passage_length = query_length, passage_length
        self.num_negatives = num_negatives
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.query_prompt, self.passage_prompt = query_prompt, passage_prompt
        self._queries, self._passages = queries, passages
        self._pairs, self._negatives, self._negative_offsets = pairs, negatives, negative_offsets
        if num_negatives < 0:
            raise UserError(f"num_negatives must be 0 or more, got {num_negatives}")
        if not self.num_examples:
            raise UserError("there are no training pairs")
        without = int(np.sum(np.diff(negative_offsets) == 0))
        if num_negatives and without:
            raise UserError(
                f"num_negatives is {num_negatives}, but {without:,} of {self.num_examples:,} pairs have no"
                " negative passage: set num_negatives to 0, or mine negatives for them"
            )
        if num_negatives and pairs_without_negatives == self.num_examples:
            raise UserError(
                f"every hard negative, cut at {passage_length} tokens, is the same as its positive: set"
                " num_negatives to 0, or mine others"
            )
        self._negatives_left_out, self._pairs_without_negatives = negatives_left_out, pairs_without_negatives
        self._content: str | None = None
        if num_negatives and negatives_left_out:
            print(
                f"{negatives_left_out:,} of {negatives_left_out + len(negatives):,} hard negatives left out:"
                f" cut at {passage_length} tokens they are the same as their positive",
                file=sys.stderr,
            )
        if num_negatives and pairs_without_negatives:
            print(
                f"warning: {pairs_without_negatives:,} of {self.num_examples:,} pairs have no hard negative"
                f" that, cut at {passage_length} tokens, is not their positive: they are trained without",
                file=sys.stderr,
            )

    def __repr__(self) -> str:
        queries, passages = len(self._queries.keys), len(self._passages.keys)
        negatives = f", {self.num_negatives} negatives each" if self.num_negatives else ""
        return (
            f"PairDataset({self.num_examples:,} pairs of {queries:,} queries of {self.query_length} tokens"
            f" and {passages:,} passages of {self.passage_length}{negatives})"
        )

    @property
    def features(self) -> dict[str, tuple[int, ...]]:
        """The features of a batch and the shape that one example has in each."""
        return features_of(self.query_length, self.passage_length, self.num_negatives)

    @property
    def fingerprint(self) -> str:
        """Tells these pairs from others, in words with a hash of every token, key and pair in its order.

        The first call reads all arrays once; of pairs that were saved with their hash it reads none.
        """
        negatives = f", negatives {self.num_negatives}" if self.num_negatives else ""
        return (
            f"{self.num_examples} pairs of {self.query_length} + {self.passage_length} tokens{negatives},"
            f" hash {self._hash()[: fingerprints.DIGITS]}"
        )

    def _hash(self) -> str:
        if self._content is None:
            self._content = fingerprints.of_arrays(self._arrays())
        return self._content

    @classmethod
    def from_examples(
        cls,
        examples: Iterable[PairExample],
        tokenizer: Tokenizer,
        *,
        query_length: int,
        passage_length: int,
        num_negatives: int = 0,
        query_prompt: str = "",
        passage_prompt: str = "",
    ) -> PairDataset:
        """Tokenises `examples`, each distinct text once, under a progress bar.

        Args:
          examples: the pairs; texts are not kept.
          tokenizer: makes the ids.
          query_length: most tokens of a query; longer ones are truncated.
          passage_length: most tokens of a passage or negative.
          num_negatives: negatives of a pair in a batch. One that, once cut, is the very tokens of its pair's
            passage is left out if the pair has another, and this is said on standard error; if not, it has
            the passage's key.
          query_prompt: put before each query, as the encoder will.
          passage_prompt: put before each passage and negative.

        Raises:
          UserError: there is no pair, or negatives are wanted where a pair has none.
        """
        queries = TableBuilder(tokenizer, query_length, query_prompt, what="queries")
        passages = TableBuilder(tokenizer, passage_length, passage_prompt, what="passages")
        pairs: list[tuple[int, int]] = []
        negatives: list[int] = []
        negative_offsets = [0]
        for example in progress(examples, what="tokenising pairs", unit="pairs"):
            row = (
                queries.row(example.query_id, example.query),
                passages.row(example.passage_id, example.passage),
            )
            pairs.append(row)
            negatives.extend(passages.row(*negative) for negative in example.negatives)
            negative_offsets.append(len(negatives))
        table, rows = passages.table(), np.array(pairs, np.int32).reshape(-1, 2)
        kept, offsets, without = without_positives(
            table, rows[:, 1], np.array(negatives, np.int32), np.array(negative_offsets, np.int64)
        )
        return cls(
            queries=queries.table(),
            passages=table,
            pairs=rows,
            negatives=kept,
            negative_offsets=offsets,
            query_length=query_length,
            passage_length=passage_length,
            num_negatives=num_negatives,
            tokenizer_fingerprint=tokenizer.fingerprint,
            query_prompt=query_prompt,
            passage_prompt=passage_prompt,
            negatives_left_out=len(negatives) - len(kept),
            pairs_without_negatives=without,
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
        Where a pair has more than N negatives, each epoch draws N of them; where fewer, they are repeated.

        Args:
          batch_size: examples of a step over all processes.
          seed: of the order and of the choice of negatives; not negative.
          start_step: where to begin, at no cost.
          process_index: which share of each batch to yield: the shares of processes 0, 1, ... are its
            consecutive parts.
          process_count: number of processes.

        Raises:
          UserError: fewer pairs than `batch_size`, or it does not divide by `process_count`.
        """
        if seed < 0:
            raise UserError(f"seed must be 0 or more, got {seed}")
        mine = share(batch_size, process_index, process_count)
        steps_per_epoch = self._steps_per_epoch(batch_size)
        return self._batches(batch_size, seed, start_step, mine, steps_per_epoch)

    def _batches(
        self, batch_size: int, seed: int, step: int, mine: slice, steps_per_epoch: int
    ) -> Iterator[Batch]:
        epoch, order = -1, np.empty(0, np.int64)
        while True:
            if step // steps_per_epoch != epoch:
                epoch = step // steps_per_epoch
                order = np.random.default_rng([seed, epoch]).permutation(self.num_examples)
            start = step % steps_per_epoch * batch_size
            yield self._batch(order[start : start + batch_size][mine], (seed, epoch))
            step += 1

    def ordered(self, batch_size: int, *, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Yields the pairs once, in their own order, each with its first N negatives.

        Every batch is whole, as in training: pairs left over from the last one are not used.

        Raises:
          UserError: fewer pairs than `batch_size`, or it does not divide by `process_count`.
        """
        mine = share(batch_size, process_index, process_count)
        order = np.arange(self.num_examples)
        for step in range(self._steps_per_epoch(batch_size)):
            yield self._batch(order[step * batch_size : (step + 1) * batch_size][mine], None)

    def shortened(self) -> PairDataset:
        """Returns the same pairs with the smallest lengths, multiples of 16, that leave every text whole."""

        def enough(table: TextTable, length: int) -> int:
            return min(length, -(-int(np.max(np.diff(table.offsets), initial=1)) // 16) * 16)

        found = copy.copy(self)
        found.query_length = enough(self._queries, self.query_length)
        found.passage_length = enough(self._passages, self.passage_length)
        return found

    def save(self, directory: str | Path) -> None:
        """Writes the arrays (.npy) and their description into a new directory, all or nothing."""
        meta = {
            "format": _FORMAT,
            "query_length": self.query_length,
            "passage_length": self.passage_length,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "query_prompt": self.query_prompt,
            "passage_prompt": self.passage_prompt,
            "num_examples": self.num_examples,
            "negatives_left_out": self._negatives_left_out,
            "pairs_without_negatives": self._pairs_without_negatives,
            "hash": self._hash(),
        }
        with directory_with_checksums(directory) as aside:
            for name, array in self._arrays().items():
                np.save(aside / f"{name}.npy", array)
            (aside / _META).write_text(json.dumps(meta, indent=2) + "\n")

    @classmethod
    def load(cls, directory: str | Path, *, num_negatives: int = 0) -> PairDataset:
        """Opens what `save` wrote; the arrays stay on disk and are read as they are needed.

        Raises:
          UserError: no such dataset, or a damaged one.
        """
        directory = local_path(directory)
        check(directory)
        try:
            meta = json.loads((directory / _META).read_text())
            if meta.pop("format") != _FORMAT:
                raise UserError(f"{directory} is of another format; make it again")
            arrays = {p.stem: np.asarray(np.load(p, mmap_mode="r")) for p in directory.glob("*.npy")}
            tables = {
                name: TextTable(*(arrays[f"{name}_{field}"] for field in TextTable._fields))
                for name in ("queries", "passages")
            }
            offsets = arrays["negative_offsets"]
            if meta.pop("num_examples") != len(arrays["pairs"]) or len(offsets) != len(arrays["pairs"]) + 1:
                raise UserError(f"{directory} is damaged: its arrays do not belong together")
            content = meta.pop("hash", None)  # earlier ones have none
            found = cls(
                **tables,
                pairs=arrays["pairs"],
                negatives=arrays["negatives"],
                negative_offsets=offsets,
                num_negatives=num_negatives,
                **meta,
            )
            found._content = content
            return found
        except FileNotFoundError as error:
            raise UserError(f"{directory} holds no saved pairs: {_META} is missing") from error
        except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise UserError(f"{directory} is damaged: {error}") from error

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"pairs": self._pairs, "negatives": self._negatives}
        arrays["negative_offsets"] = self._negative_offsets
        for name, table in (("queries", self._queries), ("passages", self._passages)):
            arrays |= {f"{name}_{field}": array for field, array in table._asdict().items()}
        return arrays

    def _steps_per_epoch(self, batch_size: int) -> int:
        if batch_size > self.num_examples:
            raise UserError(
                f"batch_size is {batch_size:,}, but there are only {self.num_examples:,} pairs:"
                " give a smaller one"
            )
        return self.num_examples // batch_size

    def _batch(self, examples: np.ndarray, seed_and_epoch: tuple[int, int] | None) -> Batch:
        query_rows, passage_rows = self._pairs[examples].T
        batch = {
            "query_ids": self._queries.ids(query_rows, self.query_length),
            "passage_ids": self._passages.ids(passage_rows, self.passage_length),
            "query_key": self._queries.keys[query_rows],
            "passage_key": self._passages.keys[passage_rows],
        }
        if self.num_negatives:
            starts = self._negative_offsets[examples]
            counts = self._negative_offsets[examples + 1] - starts
            chosen = choose(self.num_negatives, counts, examples, seed_and_epoch)
            rows = self._negatives[starts[:, None] + chosen]
            batch["negative_ids"] = self._passages.ids(rows, self.passage_length)
            batch["negative_key"] = negative_keys(batch["negative_ids"], self._passages.keys[rows], batch)
        return batch

"""Batches of pairs whose documents are expanded with queries that are chosen anew at each step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Key, TokenCounts, Tokens
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.batch_plan import Batch, Batching, uniforms
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.text_table import TextTable
from jaxir.data.expanded.joining import Joiner
from jaxir.data.expanded.rouge import rouge_l
from jaxir.data.expanded.selection import First, Gold, Selection
from jaxir.storage import fingerprints

_RANKED_AT_ONCE = 1 << 18  # pairs of queries that are compared at once, in some 100 MB


class DocumentQueries(NamedTuple):
    """The Q queries of M documents.

    Attributes:
      keys: int32 [M, 2], the hash of each document's id (`sources.stable_keys`).
      starts: int64 [M]; document m has the queries starts[m] to starts[m] + counts[m].
      counts: int64 [M], the number of queries per document.
      tokens: the token ids that `Joiner.queries` returns for each query; the table has no keys.
      words: the word numbers of each query, from `rouge.Words`; the table has no keys.
      texts: int64 [Q], a hash of each query; equal queries have equal hashes.
    """

    keys: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: TextTable
    words: TextTable
    texts: np.ndarray


class ExpandedDataset(Dataset):
    """Pairs whose documents are expanded with queries. Created by `ExpandedPairs.build`.

    `documents` holds the generated queries; `selection` chooses `appended` of them for each document. `golds`
    holds the gold queries (the pairs' own), each under its own key; only `Gold` needs their tokens.
    """

    def __init__(
        self,
        base: ArrayDataset,
        *,
        joiner: Joiner,
        documents: DocumentQueries,
        golds: DocumentQueries,
        selection: Selection,
        appended: int,
    ):
        self._base, self._joiner, self._documents, self._golds = base, joiner, documents, golds
        self._selection, self._appended = selection, appended
        self._steps: int | None = None
        self._row_of = {"documents": _Lookup(documents.keys), "golds": _Lookup(golds.keys)}
        self.num_examples, self.features = base.num_examples, base.features
        self.tokenizer_fingerprint, self.truncation = base.tokenizer_fingerprint, base.truncation

    def __repr__(self) -> str:
        count = len(self._documents.tokens.offsets) - 1
        return f"ExpandedDataset({self._base!r}, {count:,} generated queries, {self._selection!r})"

    @property
    def fingerprint(self) -> str:
        """A hash of the pairs, all queries and their selection."""
        parts = [self._base.fingerprint, repr(self._selection), self._appended]
        for queries in (self._documents, self._golds):
            arrays = {"keys": queries.keys, "starts": queries.starts, "counts": queries.counts}
            arrays["texts"] = queries.texts
            for name, table in (("tokens", queries.tokens), ("words", queries.words)):
                arrays |= {name: table.flat, f"{name}_offsets": table.offsets}
            parts.append(fingerprints.of_arrays(arrays))
        found = fingerprints.of_values(*parts)[: fingerprints.DIGITS]
        return f"{self._base.fingerprint}, expanded by {self._selection!r}, hash {found}"

    def scheduled(self, steps: int) -> ExpandedDataset:
        found = copy.copy(self)
        found._steps = steps
        return found

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        """Counts the tokens of texts without their expansions."""
        return self._base.token_counts(field, vocab_size)

    def batched(self, how: Batching) -> Iterator[Batch]:
        if self._selection.follows_steps and self._steps is None:
            raise UserError(
                f"{self._selection!r} depends on the step of the training run, which is unknown in a mixture:"
                " use another selection, such as Random()"
            )
        given = {"selection": self._selection, "seed": how.seed, "first": how.share.start}
        batches = enumerate(self._base.batched(how), how.start_step)
        return (self._expanded(batch, step=step, **given) for step, batch in batches)

    def once(self, count: int | None = None) -> Batch:
        """Like `Dataset.once`, with each document expanded with its first queries, as in evaluation."""
        return self._expanded(self._base.once(count), selection=First(), seed=0, step=0, first=0)

    def list_lengths(self) -> set[int]:
        return self._base.list_lengths()

    def _expanded(self, batch: Batch, *, selection: Selection, seed: int, step: int, first: int) -> Batch:
        """Expands the documents of a batch, whose first example has index `first` in the global batch."""
        keys = {f.field: name for name, f in self.features.items() if isinstance(f, Key)}
        tokens = [f for f in self.features.values() if isinstance(f, Tokens)]
        query = next(f.field for f in tokens if f.table == "queries" and f.field in keys)
        golds = self._row_of["golds"](batch[keys[query]])
        found, slots = dict(batch), 0
        for name, feature in self.features.items():
            if not isinstance(feature, Tokens) or feature.table != "passages" or feature.field not in keys:
                continue
            each = feature.count or 1
            rows, columns = np.indices((len(golds), each)).reshape(2, -1)
            places = np.stack([first + rows, slots + columns])
            ids = batch[name].reshape(len(rows), -1)
            documents = self._row_of["documents"](batch[keys[feature.field]].reshape(-1, 2))
            if isinstance(selection, Gold):
                chosen = [[self._golds.tokens.row(gold)] for gold in golds[rows]]
            else:
                chosen = self._chosen(selection, documents, golds[rows], (seed, step), places)
            found[name] = self._join(ids, chosen).reshape(batch[name].shape)
            slots += each
        return found

    def _join(self, ids: np.ndarray, chosen: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """Returns documents [P, L] with the chosen queries appended."""
        joined = np.zeros_like(ids)
        for row, (document, queries) in enumerate(zip(ids, chosen, strict=True)):
            tokens = self._joiner.join(document[document != 0], queries)
            joined[row, : len(tokens)] = tokens
        return joined

    def _chosen(
        self,
        selection: Selection,
        documents: np.ndarray,
        golds: np.ndarray,
        seed_and_step: tuple[int, int],
        places: np.ndarray,
    ) -> list[list[np.ndarray]]:
        """Returns the tokens of the queries that are chosen for each of P documents, given its gold query.

        `places` [2, P] has each document's example index in the batch, and its own index in that example.
        """
        seed, step = seed_and_step
        counts = self._documents.counts[documents]
        ends = np.cumsum(counts)
        pair = np.repeat(np.arange(len(documents)), counts)
        number = np.arange(len(pair)) - np.repeat(ends - counts, counts)
        queries = self._documents.starts[documents][pair] + number
        relevance = np.zeros(len(queries))
        if selection.ranks:
            relevance = _relevance(self._golds, golds[pair], self._documents, queries)
        own = self._documents.texts[queries] == self._golds.texts[golds[pair]]
        random = np.zeros(len(queries))
        if selection.draws:
            random = uniforms(seed, np.array([step]), *places[:, pair], number)
        chosen = []
        for start, end in zip(ends - counts, ends, strict=True):
            some = np.empty(0, np.int64)
            if start < end:
                part = slice(start, end)
                some = self._choose(selection, relevance[part], own[part], random[part], step)
            chosen.append([self._documents.tokens.row(query) for query in queries[start:end][some]])
        return chosen

    def _choose(
        self, selection: Selection, relevance: np.ndarray, own: np.ndarray, random: np.ndarray, step: int
    ) -> np.ndarray:
        """Returns the indices of the queries chosen from n; `own` [n] marks copies of the gold query."""
        order = np.arange(len(relevance))
        if selection.ranks:
            order = np.argsort(-relevance, kind="stable")
            others = order[~own[order]]
            order = others if len(others) else order
        first, end = selection.among(len(order), step, self._steps or 1)
        order = order[first:end]
        if selection.draws:
            order = order[np.argsort(random[order], kind="stable")]
        return order[: self._appended]


class _Lookup:
    """Returns the rows of some of the keys [M, 2]; all keys looked up must exist."""

    def __init__(self, keys: np.ndarray):
        whole = _as_one(keys)
        self._order = np.argsort(whole)
        self._sorted = whole[self._order]

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        return self._order[np.searchsorted(self._sorted, _as_one(keys))]


def _as_one(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys).view(np.int64)[:, 0]


def _relevance(
    golds: DocumentQueries, of_golds: np.ndarray, generated: DocumentQueries, queries: np.ndarray
) -> np.ndarray:
    """Returns ROUGE-L of P pairs of gold and generated queries."""

    def padded(table: TextTable, rows: np.ndarray) -> np.ndarray:
        sizes = table.offsets[rows + 1] - table.offsets[rows]
        return table.ids(rows, int(np.max(sizes, initial=0)))

    found = [np.empty(0)]
    for at in range(0, len(queries), _RANKED_AT_ONCE):
        some = slice(at, at + _RANKED_AT_ONCE)
        found.append(rouge_l(padded(golds.words, of_golds[some]), padded(generated.words, queries[some])))
    return np.concatenate(found)

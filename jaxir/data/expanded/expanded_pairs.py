"""Pairs whose documents are expanded with generated queries, to train a dual-cross-encoder."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Key, Record, Tokens
from jaxir.core.progress import progress
from jaxir.core.values import Count, Natural, checked
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.text_data import RecordSource, TextData
from jaxir.data.batches.text_table import TextTable
from jaxir.data.expanded.expanded_dataset import DocumentQueries, ExpandedDataset
from jaxir.data.expanded.joining import Joiner
from jaxir.data.expanded.rouge import Words
from jaxir.data.expanded.selection import Curriculum, First, Gold, Selection
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.expansions import read_expansions
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import folded, key_digest, read_corpus
from jaxir.data.sets.pair_sources import TevatronPairs
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.storage.files import local_path

_TOKENISE_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ExpandedPairs(TextData):
    """Pairs in which each passage and each hard negative is read with a generated query (He et al. 2022).

    `selection` chooses the query by its ROUGE-L with the pair's own query, the gold query. Repeated queries
    of a document are used once. A selection that ranks leaves out queries equal to the gold query (ignoring
    case, white space and final punctuation) if others remain. A document without queries is not expanded.
    Batches have the fields of the pairs' batches, so any objective for pairs can use them.

    Attributes:
      pairs: the training pairs, such as BeirPairs(...) or TevatronPairs(...).
      expansions: file or folder of generated queries for the corpus; see `data.formats.expansions`.
      corpus: a corpus.jsonl[.gz] or a BEIR folder; the pairs' documents have its ids.
      selection: how a query is chosen, from `data.expanded.selection`.
      appended: number of queries appended per document: 1, or more for document expansion (figure 5).
      most: maximum number of queries read per document (the first ones); None: all.
    """

    pairs: RecordSource
    expansions: str
    corpus: str
    selection: Selection = dataclasses.field(default_factory=Curriculum)
    appended: Count = 1
    most: Count | None = None

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> ExpandedDataset:
        """Reads the pairs, then the queries of their documents."""
        gold = isinstance(self.selection, Gold)
        if gold and self.appended > 1:
            raise UserError(
                f"appended is {self.appended}, but Gold() has one query per document: set appended to 1"
            )
        passages, query = _expanded_features(features)
        golds = _GoldQueries(Words(), texts_too=gold)
        joiner = Joiner(tokenizer, features[passages[0]].length, features[query].length)
        records = self.pairs.records(on_bad_input)
        base = ArrayDataset.from_records(golds.noted(records, features[query].field), tokenizer, features)
        documents = base.keys(features[passages[0]].field)
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        found = self._queries(documents, joiner, golds.words, dtype, on_bad_input)
        return ExpandedDataset(
            base,
            joiner=joiner,
            documents=found,
            golds=golds.table(base.keys(features[query].field), joiner),
            selection=self.selection,
            appended=self.appended,
        )

    def _queries(
        self, documents: np.ndarray, joiner: Joiner, words: Words, dtype: type, on_bad_input: OnBadInput
    ) -> DocumentQueries:
        """Reads the queries of documents with keys [M, 2]; token ids have type `dtype`."""
        row_of = {key.tobytes(): row for row, key in enumerate(documents)}
        starts, counts = np.zeros((2, len(documents)), np.int64)
        seen = np.zeros(len(documents), bool)
        tokens, as_words, hashes, pending = _Rows(dtype), _Rows(np.int32), [], []

        def flush() -> None:
            tokens.extend(np.maximum(query, 0) for query in joiner.queries(pending))
            as_words.extend(map(words, pending))
            hashes.append(_hashes(pending))
            pending.clear()

        place = local_path(self.corpus)
        corpus = BeirFolder(place).corpus_path if place.is_dir() else place
        # Reading the pairs has already reported malformed documents.
        ids = [document.id for document in read_corpus(corpus, OnBadInput(on_bad_input.policy))]
        read = read_expansions(self.expansions, ids, on_bad_input=on_bad_input)
        total = 0
        for identifier, outputs in progress(read, what="reading generated queries", unit="documents"):
            row = row_of.get(key_digest(identifier))
            if row is None:
                continue
            texts = list(dict.fromkeys(outputs))[: self.most]
            starts[row], counts[row], seen[row] = total, len(texts), True
            total += len(texts)
            pending += texts
            if len(pending) >= _TOKENISE_AT_ONCE:
                flush()
        flush()
        if on_bad_input.policy == "stop" and not seen.all():
            raise UserError(
                f"{self.corpus} lacks {np.sum(~seen):,} of the {len(seen):,} documents of the pairs, which"
                " therefore have no generated queries: give the corpus of the pairs"
            )
        if not counts.any():
            raise UserError(
                f"{self.expansions} has no query for any of the pairs' documents: give the file generated for"
                " them"
            )
        alone = int(np.sum(counts == 0))
        if alone and not isinstance(self.selection, Gold):
            print(
                f"{alone:,} of {len(counts):,} documents have no generated query and are not expanded",
                file=sys.stderr,
            )
        return DocumentQueries(
            documents, starts, counts, tokens.table(), as_words.table(), np.concatenate(hashes)
        )


def pairs_or_mined(pairs: RecordSource, mined: str | None, negatives: Natural) -> RecordSource:
    """Returns `pairs`, or the pairs with hard negatives of the file `mined` that `jaxir.mine` wrote."""
    if mined is None:
        return pairs
    if not negatives:
        raise UserError(
            f"{mined} has hard negatives, but none would be used: set NEGATIVES, the number used per pair"
        )
    return TevatronPairs(path=mined)


def dev_pairs(
    pairs: RecordSource | None, expansions: str, corpus: str, appended: int = 1
) -> ExpandedPairs | None:
    """Returns `pairs` with each passage's first queries, to evaluate on in training; None if it is None."""
    if pairs is None:
        return None
    return ExpandedPairs(
        pairs=pairs, expansions=expansions, corpus=corpus, selection=First(), appended=appended, most=appended
    )


class _GoldQueries:
    """Collects the queries of records while they are read."""

    def __init__(self, words: Words, *, texts_too: bool):
        self.words = words
        self._texts_too = texts_too
        self._words: dict[bytes, np.ndarray] = {}
        self._hashes: dict[bytes, np.ndarray] = {}
        self._texts: dict[bytes, str] = {}

    def noted(self, records: Iterable[Record], field: str) -> Iterator[Record]:
        for record in records:
            if field in record:
                identifier, text = record[field]
                key = key_digest(identifier)
                if key not in self._words:
                    self._words[key], self._hashes[key] = self.words(text), _hashes([text])
                    if self._texts_too:
                        self._texts[key] = text
            yield record

    def table(self, keys: np.ndarray, joiner: Joiner) -> DocumentQueries:
        """Returns the gold queries with `keys` [M, 2], in the form of documents with one query each."""
        ordered = [key.tobytes() for key in keys]
        tokens, words = _Rows(np.int32), _Rows(np.int32)
        words.extend(self._words[key] for key in ordered)
        if self._texts_too:
            tokens.extend(joiner.queries([self._texts[key] for key in ordered]))
        every = np.arange(len(keys))
        texts = np.concatenate([self._hashes[key] for key in ordered])
        return DocumentQueries(keys, every, np.ones_like(every), tokens.table(), words.table(), texts)


def _hashes(texts: list[str]) -> np.ndarray:
    """Returns int64 [N], hashes of queries, ignoring case, repeated white space and final punctuation."""
    compared = (folded(text).rstrip(" ?!.؟。！？") for text in texts)
    return np.frombuffer(b"".join(map(key_digest, compared)), "<i8")


class _Rows:
    """Collects rows of numbers into one `TextTable`."""

    def __init__(self, dtype: type):
        self._nothing = np.empty(0, dtype)
        self._parts, self._sizes = [self._nothing], []

    def extend(self, rows: Iterable[np.ndarray]) -> None:
        rows = list(rows)
        self._parts.append(np.concatenate([self._nothing, *rows]).astype(self._nothing.dtype))
        self._sizes.extend(map(len, rows))

    def table(self) -> TextTable:
        offsets = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)]).astype(np.int64)
        return TextTable(np.concatenate(self._parts), offsets, np.empty((0, 2), np.int32))


def _expanded_features(features: Features) -> tuple[list[str], str]:
    """Returns the names of the features that hold documents, and the name of the feature with queries."""
    keyed = {feature.field for feature in features.values() if isinstance(feature, Key)}
    tokens = {n: f for n, f in features.items() if isinstance(f, Tokens) and f.field in keyed}
    passages = [name for name, feature in tokens.items() if feature.table == "passages"]
    queries = [name for name, feature in tokens.items() if feature.table == "queries"]
    if not passages or not queries:
        raise UserError(
            "ExpandedPairs needs an objective that reads queries and passages, such as in_batch_softmax: use"
            " such an objective"
        )
    return passages, queries[0]

"""BM25 in numpy, by the package bm25s: no Java, no separate process, arrays that are mapped into memory."""

from __future__ import annotations

import array
import importlib
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.data.formats.lines import Policy
from jaxir.retrieval.indexes.base_index import check_k
from jaxir.retrieval.indexes.best_rows import best_rows
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.english_words import words_of
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.retrieval.indexes.keyword_index import Corpus, KeywordIndex, bm25_info, build_of_corpus
from jaxir.sidecar.lucene_settings import PYSERINI_BM25, Bm25

FILES = "bm25s"
FEW = 100  # no progress bar for up to this many queries, such as a server gets
_IMPORTING = threading.Lock()


class Bm25Index(KeywordIndex):
    """BM25 over a corpus by Lucene's formula (Kamphuis et al. 2020) and Lucene's English analysis.

    A document is its title, a space and its text. Scores differ from Lucene's only because Lucene rounds
    document lengths to one byte, and this index does not. Each word's scores are computed when the index is
    built, with the k1 and b of index.json. Documents of equal score are in descending order of id, like in
    trec_eval: the rows of the index are in that order, documents without words last.
    """

    engine = "bm25s"

    def __init__(self, info: IndexInfo, ids: list[str], documents: Documents | None, directory: Path):
        super().__init__(info, ids, documents)
        # Memory-mapped arrays stay readable after the directory was removed or replaced.
        self._words = _bm25s().BM25.load(directory, mmap=True)

    def _save_engine(self, directory: Path) -> None:
        self._words.save(directory / FILES, show_progress=False)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> Bm25Index:
        try:
            return cls(info, ids, documents, directory / FILES)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{directory} is damaged: {error}; build the index again") from None

    def _index_again(self, directory: Path, documents: Corpus) -> tuple[IndexInfo, list[str]]:
        return _index(directory, documents, Bm25(**self.info.settings))

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but for texts. Only finds documents that share a word with the query."""
        check_k(k)
        k = min(k, self.info.count)
        scores, ids = np.full([len(queries), k], -math.inf, np.float32), []
        numbered = enumerate(queries)
        for row, query in progress(
            numbered, total=len(queries), what="searching", unit="queries", hidden=len(queries) <= FEW
        ):
            of_all = self._words.get_scores_from_ids(self._words.get_tokens_ids(words_of(query)))
            best = best_rows(of_all, k)
            scores[row, : len(best)] = of_all[best]
            ids.append([self.ids[number] for number in best])
        return scores, ids


def build_bm25_index(
    corpus: str | Path, output: str | Path, *, bm25: Bm25 = PYSERINI_BM25, on_bad_input: Policy = "stop"
) -> Bm25Index:
    """Indexes the words of a corpus in a new directory, and stores its documents to show them with results.

    Documents with neither title nor text are left out.

    Args:
      corpus: the corpus file, in a format that `read_documents` reads.
      output: the index directory, which appears only when complete.
      bm25: the parameters of BM25; the defaults are Pyserini's.
      on_bad_input: stop at the first malformed line, or skip and count malformed lines.
    """

    def write(directory: Path, documents: Corpus) -> tuple[IndexInfo, list[str]]:
        return _index(directory, documents, bm25)

    info, ids, documents = build_of_corpus(corpus, output, write, on_bad_input)
    return Bm25Index(info, ids, documents, Path(output) / FILES)


def _index(directory: Path, documents: Corpus, bm25: Bm25) -> tuple[IndexInfo, list[str]]:
    """Writes the files of bm25s into an index directory; returns the index's description and ids."""
    found, words, without_words = [], _Words(), []
    for document in progress(documents(), what="indexing", unit="documents"):
        ids = found if words.add(document.contents) else without_words
        ids.append(document.id)
    info = bm25_info(Bm25Index.engine, [*found, *without_words], {"k1": bm25.k1, "b": bm25.b})
    if not found:
        raise UserError("all texts are stop words or signs, so no word can be indexed: give another corpus")
    order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
    words.ids = _Rows(words, order)
    # Documents without words get no row, because Lucene's mean length does not count them either.
    model = _bm25s().BM25(method="lucene", k1=bm25.k1, b=bm25.b)
    model.index(words, create_empty_token=False, show_progress=False)
    model.save(directory / FILES, show_progress=False)
    return info, [*(found[row] for row in order), *sorted(without_words, reverse=True)]


class _Words:
    """The words of documents as numbers, 4 bytes each. bm25s reads the attributes `vocab` and `ids`."""

    def __init__(self) -> None:
        self.vocab: dict[str, int] = {}
        self.numbers, self.ends = array.array("i"), array.array("q", [0])
        self.ids: _Rows | None = None

    def add(self, text: str) -> bool:
        """Adds a document if it has words; returns whether it has."""
        words = words_of(text)
        if words:
            self.numbers.extend([self.vocab.setdefault(word, len(self.vocab)) for word in words])
            self.ends.append(len(self.numbers))
        return bool(words)


class _Rows:
    """The lists of word numbers of documents, in the order of the index's rows."""

    def __init__(self, words: _Words, order: list[int]):
        self._words, self._order = words, order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[list[int]]:
        numbers, ends = self._words.numbers, self._words.ends
        return (numbers[ends[row] : ends[row + 1]].tolist() for row in self._order)


def _bm25s() -> Any:
    """Imports bm25s without JAX: bm25s would run a JAX program, which takes the accelerator from others."""
    with _IMPORTING:
        if "bm25s" in sys.modules:
            return sys.modules["bm25s"]
        known = sys.modules.get("jax.lax")
        sys.modules["jax.lax"] = None  # makes `import jax.lax` raise ImportError, which bm25s expects
        try:
            return importlib.import_module("bm25s")
        finally:
            if known is None:
                del sys.modules["jax.lax"]
            else:
                sys.modules["jax.lax"] = known

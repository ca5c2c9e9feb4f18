"""BM25 and impact search with Lucene, which runs in the Pyserini sidecar."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.data.formats.lines import MalformedRecord, OnBadInput, Policy
from jaxir.data.formats.sparse_vectors import SparseVector, read_sparse_vectors, weights_of
from jaxir.retrieval.indexes.base_index import Index, check_k
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.index_info import IndexInfo, describe
from jaxir.retrieval.indexes.keyword_index import BLANK, Corpus, KeywordIndex, bm25_info, build_of_corpus
from jaxir.sidecar.client import Hits, Sidecar
from jaxir.sidecar.environment import shared
from jaxir.sidecar.lucene_settings import PYSERINI_BM25, Bm25, LuceneDocument, Rm3, Rocchio
from jaxir.sidecar.server.protocol import identity_of
from jaxir.storage.checksums import directory_with_checksums

Fields = Literal["flat", "multifield"]
FILES = "lucene"
FEW = 100  # no progress bar for up to this many queries, such as a server gets
# Placeholder text of a document that only has a title, because Anserini skips empty documents. It is a stop
# word, so Lucene does not index it.
NOTHING = "the"


class _LuceneIndex(Index):
    def __init__(
        self,
        info: IndexInfo,
        ids: list[str],
        documents: Documents | None,
        directory: Path,
        sidecar: Sidecar | None = None,
    ):
        super().__init__(info, ids, documents)
        self._directory, self.sidecar = directory, sidecar or shared()
        self._opened = identity_of(directory)

    def _save_engine(self, directory: Path) -> None:
        shutil.copytree(self._directory, directory / FILES)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> _LuceneIndex:
        if not any((directory / FILES).glob("segments_*")):
            raise UserError(f"{directory} is damaged: it has no Lucene files; build the index again")
        return cls(info, ids, documents, directory / FILES)


class LuceneIndex(_LuceneIndex, KeywordIndex):
    """BM25 over a corpus, like in Pyserini: Porter stemming, Lucene's 33 English stop words.

    "flat" indexes title and text as one field, "multifield" as two fields whose scores are added: the two
    BM25 baselines of BEIR. Scores are those of Pyserini's `LuceneSearcher`: rounded to 1e-4, ties separated
    by 1e-6 in ascending order of document id. For scores above 16, float32 cannot represent all of these
    differences; documents whose scores stay equal are in descending order of id, like in trec_eval.
    """

    engine = "lucene"
    _bm25: Bm25 = PYSERINI_BM25
    _feedback: Rm3 | Rocchio | None = None

    def ranked_by(self, bm25: Bm25 = PYSERINI_BM25, feedback: Rm3 | Rocchio | None = None) -> LuceneIndex:
        """Returns this index with other BM25 parameters, or with feedback (flat indexes only)."""
        if feedback is not None and self.info.settings["fields"] != "flat":
            raise UserError(
                "feedback needs a flat index; this one is multifield: build one with --fields=flat"
            )
        other = LuceneIndex(self.info, self.ids, self.documents, self._directory, self.sidecar)
        other._bm25, other._feedback = bm25, feedback
        other._opened = self._opened
        return other

    def _index_again(self, directory: Path, documents: Corpus) -> tuple[IndexInfo, list[str]]:
        return _index(directory, documents, self.info.settings["fields"], self.sidecar)

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but for texts. Only finds documents that share a word with the query."""
        check_k(k)
        k = min(k, self.info.count)
        fields = {"contents": 1.0, "title": 1.0} if self.info.settings["fields"] == "multifield" else None
        few = len(queries) <= FEW
        with progress(total=len(queries), what="searching", unit="queries", hidden=few) as bar:
            hits = self.sidecar.search(
                self._directory,
                queries,
                k,
                bm25=self._bm25,
                feedback=self._feedback,
                fields=fields,
                opened=self._opened,
                on_progress=lambda count: bar.update(count - bar.n),
            )
        return _as_arrays(hits, k)


class LuceneImpactIndex(_LuceneIndex):
    """Inner products of learned sparse vectors (DeepImpact, uniCOIL, SPLADE) with whole-number weights."""

    engine = "lucene_impact"
    query_kind = "weights"

    def search(self, queries: Sequence[Mapping[str, int]], k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but each query is a dict of tokens and whole-number weights."""
        check_k(k)
        checked = [_checked(f"query {number}", query) for number, query in enumerate(queries)]
        k = min(k, self.info.count)
        given = [number for number, query in enumerate(checked) if query]
        hits: list[Hits] = [[] for _ in checked]
        if given:
            weights = [checked[number] for number in given]
            found = self.sidecar.search_impact(self._directory, weights, k, opened=self._opened)
            for number, of_query in zip(given, found, strict=True):
                hits[number] = of_query
        return _as_arrays(hits, k)


def build_lucene_index(
    corpus: str | Path,
    output: str | Path,
    *,
    fields: Fields = "flat",
    on_bad_input: Policy = "stop",
    sidecar: Sidecar | None = None,
) -> LuceneIndex:
    """Indexes a corpus in a new directory, and stores its documents to show them with search results.

    Documents with neither title nor text are left out, like in Pyserini.

    Args:
      corpus: the corpus file, in a format that `read_documents` reads.
      output: the index directory, which appears only when complete.
      fields: "flat" (title, a space and text in one field) or "multifield".
      on_bad_input: stop at the first malformed line, or skip and count malformed lines.
      sidecar: the process that runs Lucene; None uses the sidecar of this process.
    """
    sidecar = sidecar or shared()

    def write(directory: Path, documents: Corpus) -> tuple[IndexInfo, list[str]]:
        return _index(directory, documents, fields, sidecar)

    info, ids, documents = build_of_corpus(corpus, output, write, on_bad_input)
    return LuceneIndex(info, ids, documents, Path(output) / FILES, sidecar)


def _index(
    directory: Path, documents: Corpus, fields: Fields, sidecar: Sidecar
) -> tuple[IndexInfo, list[str]]:
    """Writes Lucene's files into an index directory; returns the index's description and ids."""
    ids: list[str] = []

    def records() -> Iterator[LuceneDocument]:
        ids.clear()
        for document in documents():
            ids.append(document.id)
            if fields == "flat":
                yield LuceneDocument(document.id, document.contents)
            else:
                contents = document.text if document.text.strip(BLANK) else NOTHING
                yield LuceneDocument(document.id, contents, {"title": document.title})

    extra = ("title",) if fields == "multifield" else ()
    with progress(what="indexing", unit="documents") as bar:
        sidecar.index(
            directory / FILES, records, fields=extra, on_progress=lambda count: bar.update(count - bar.n)
        )
    return bm25_info(LuceneIndex.engine, ids, {"fields": fields}), ids


def build_impact_index(
    vectors: Mapping[str, Mapping[str, int]] | str | Path,
    output: str | Path,
    *,
    corpus: str | Path | None = None,
    on_bad_input: Policy = "stop",
    sidecar: Sidecar | None = None,
) -> LuceneImpactIndex:
    """Indexes learned sparse vectors in a new directory. Documents without any weight are left out.

    Args:
      vectors: {id: {token: weight}} with whole-number (quantised) weights and tokens without white space; or
        a file of such vectors (see `read_sparse_vectors`), which is streamed.
      output: the index directory, which appears only when complete.
      corpus: corpus.jsonl[.gz] with the documents, stored to show them with search results.
      on_bad_input: stop at the first malformed line of a file of vectors, or skip and count malformed lines.
      sidecar: the process that runs Lucene; None uses the sidecar of this process.
    """
    collector, ids = OnBadInput(on_bad_input), []
    if isinstance(vectors, Mapping):  # fail on wrong vectors before Java starts
        checked = [SparseVector(i, _checked(f"document {i!r}", v)) for i, v in vectors.items()]

    def records() -> Iterator[tuple[str, Mapping[str, int]]]:
        ids.clear()
        for vector in checked if isinstance(vectors, Mapping) else read_sparse_vectors(vectors, collector):
            if vector.weights:
                ids.append(vector.id)
                yield vector

    sidecar = sidecar or shared()
    with directory_with_checksums(output) as temporary:
        with progress(what="indexing", unit="documents") as bar:
            sidecar.index_impact(
                temporary / FILES, records, on_progress=lambda count: bar.update(count - bar.n)
            )
        collector.report()
        if not ids:
            raise UserError("there are no documents to index: give vectors with weights")
        info = IndexInfo(engine="lucene_impact", similarity="impact", dimension=0, count=len(ids))
        if corpus is not None:
            Documents.write(temporary, corpus, ids)
        describe(temporary, info, ids)
    return LuceneImpactIndex(info, ids, Documents.open(Path(output), ids), Path(output) / FILES, sidecar)


def _checked(name: str, vector: Mapping[str, int]) -> dict[str, int]:
    try:
        return weights_of(vector)
    except MalformedRecord as fault:
        raise UserError(f"{name}: {fault.kind} {fault.detail}") from None


def _as_arrays(hits: list[Hits], k: int) -> tuple[np.ndarray, list[list[str]]]:
    scores, ids = np.full([len(hits), k], -math.inf, np.float32), []
    for row, found in enumerate(hits):
        found.sort(key=lambda hit: hit[0], reverse=True)
        found.sort(key=lambda hit: -hit[1])
        scores[row, : len(found)] = [score for _, score in found]
        ids.append([doc_id for doc_id, _ in found])
    return scores, ids

"""An inverted index of token weights (SPLADE, uniCOIL), in numpy and SciPy: exact, and without Java."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import sparse

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.retrieval.encoding.sparse_similarity import normalized
from jaxir.retrieval.indexes.base_index import Index, check_k
from jaxir.retrieval.indexes.best_rows import best_rows
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.ids import check_distinct
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.storage.json_files import read_json
from jaxir.storage.npy import read_npy, write_npy

Storage = Literal["float32", "int8"]
FEW = 100  # no progress bar for up to this many queries, such as a server gets
LEVELS = 255  # largest weight of "int8" storage, which stores each weight as a byte from 0 to 255
_DTYPES = {"float32": np.float32, "int8": np.uint8}


@dataclasses.dataclass(frozen=True)
class Postings:
    """The weights of N documents and V tokens, token by token.

    Attributes:
      starts: int64 [V + 1], where each token's postings begin.
      rows: int32 [P], the documents of each posting, ascending within a token.
      weights: float32 or uint8 [P].
    """

    starts: np.ndarray
    rows: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, matrix: sparse.csr_matrix, storage: Storage) -> tuple[Postings, float]:
        """Returns the postings of weights [N, V], and the unit of the stored weights, 1 for "float32".

        "int8" rounds to multiples of a unit, 1/255 of the largest weight; weights that round to 0 are left
        out.
        """
        columns = sparse.csc_matrix(matrix, dtype=np.float32)
        columns.sort_indices()
        unit = 1.0
        if storage == "int8":
            unit = float(columns.data.max(initial=0.0)) / LEVELS or 1.0
            columns.data = np.rint(columns.data / unit)
        columns.eliminate_zeros()
        weights = columns.data.astype(_DTYPES[storage])
        return cls(columns.indptr.astype(np.int64), columns.indices.astype(np.int32), weights), unit

    def scores(self, tokens: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
        """Returns the products float32 [count] of a query's token weights with all documents."""
        spans = [slice(self.starts[token], self.starts[token + 1]) for token in tokens]
        rows = np.concatenate([self.rows[span] for span in spans])
        of_rows = np.concatenate([self.weights[span] for span in spans]).astype(np.float32, copy=False)
        ends = np.cumsum([0, *(span.stop - span.start for span in spans)])
        matrix = sparse.csc_matrix((of_rows, rows, ends), shape=(count, len(tokens)))
        return matrix @ weights


class SparseIndex(Index):
    """N documents as weights of a vocabulary's tokens; exact scores, by products or cosines.

    Documents of equal score are in descending order of id, as in trec_eval, because the rows are sorted.
    Only documents that share a token with the query are found.

    An index that names a model is searched with weights [Q, V] of `SparseEncoder.encode_queries`. An index
    made from a file of vectors has no model, and is searched with dicts {token: weight}.
    """

    engine = "sparse"
    query_kind = "sparse"

    def __init__(
        self,
        info: IndexInfo,
        ids: list[str],
        documents: Documents | None,
        postings: Postings,
        tokens: Sequence[str] | None,
    ):
        super().__init__(info, ids, documents)
        self._postings, self._tokens = postings, tokens
        self._ids_of_tokens = None if tokens is None else {token: i for i, token in enumerate(tokens)}
        self._unit = np.float32(info.settings["unit"])
        if tokens is not None:
            self.query_kind = "weights"

    @classmethod
    def build(
        cls,
        weights: sparse.csr_matrix,
        ids: Sequence[str],
        *,
        tokens: Sequence[str] | None = None,
        storage: Storage = "float32",
        similarity: Literal["dot", "cosine"] = "dot",
        **facts: Any,
    ) -> SparseIndex:
        """Makes an index in memory.

        Args:
          weights: [N, V], none negative.
          ids: N distinct ids.
          tokens: the V tokens, if queries are dicts; None: queries are weights [Q, V].
          storage: "float32", or "int8": one byte a weight, rounded to multiples of the largest / 255.
          similarity: "cosine" scales the weights of each document, and of each query, to length 1.
          **facts: fields of `IndexInfo` about the model.

        Raises:
          UserError: there are no weights, one is negative or not finite, or an id occurs twice.
        """
        if weights.shape[0] != len(ids):
            raise UserError(f"there are {weights.shape[0]} vectors but {len(ids)} ids: give one id for each")
        check_distinct(ids)
        if not weights.nnz:
            raise UserError("there are no weights to index: give documents with weights above 0")
        if not (np.isfinite(weights.data).all() and weights.data.min() >= 0):
            raise UserError("a weight is negative or not finite: give weights of 0 or more")
        order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)
        weights = normalized(weights) if similarity == "cosine" else weights
        postings, unit = Postings.of(weights[order], storage)
        info = IndexInfo(
            engine=cls.engine,
            similarity=similarity if tokens is None else "impact",
            dimension=weights.shape[1],
            count=len(ids),
            settings={"storage": storage, "unit": unit, "postings": len(postings.rows)},
            **facts,
        )
        return cls(info, [ids[row] for row in order], None, postings, tokens)

    def search(
        self, queries: sparse.csr_matrix | Sequence[Mapping[str, float]], k: int
    ) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, for weights [Q, V], or for dicts if the index has no model.

        Raises:
          UserError: k < 1, or the weights have another number of tokens than the index.
        """
        check_k(k)
        count = queries.shape[0] if sparse.issparse(queries) else len(queries)
        k = min(k, self.info.count)
        scores, ids = np.full([count, k], -math.inf, np.float32), []
        asked = progress(
            self._rows_of(queries), total=count, what="searching", unit="queries", hidden=count <= FEW
        )
        for row, (tokens, weights) in enumerate(asked):
            if not len(tokens):
                ids.append([])
                continue
            found = self._postings.scores(tokens, weights * self._unit, self.info.count)
            best = best_rows(found, k)
            scores[row, : len(best)] = found[best]
            ids.append([self.ids[number] for number in best])
        return scores, ids

    def _rows_of(
        self, queries: sparse.csr_matrix | Sequence[Mapping[str, float]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids and weights of each query's tokens; tokens that the index lacks are left out."""
        if not sparse.issparse(queries):
            known = self._ids_of_tokens or {}
            for query in queries:
                found = {known[token]: weight for token, weight in query.items() if token in known}
                yield np.array([*found], np.int64), np.array([*found.values()], np.float32)
            return
        if queries.shape[1] != self.info.dimension:
            raise UserError(
                f"the queries have weights of {queries.shape[1]:,} tokens and the index of"
                f" {self.info.dimension:,}: encode the queries with the model of the index"
            )
        queries = sparse.csr_matrix(queries, dtype=np.float32)
        queries = normalized(queries) if self.info.similarity == "cosine" else queries
        for start, end in zip(queries.indptr, queries.indptr[1:], strict=False):
            yield queries.indices[start:end], queries.data[start:end]

    def _save_engine(self, directory: Path) -> None:
        for field in dataclasses.fields(Postings):
            with (directory / f"{field.name}.npy").open("wb") as file:
                write_npy(file, [getattr(self._postings, field.name)])
        if self._tokens is not None:
            text = json.dumps(list(self._tokens), ensure_ascii=False)
            (directory / "tokens.json").write_text(text, encoding="utf-8")

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> SparseIndex:
        size = info.settings["postings"]
        postings = Postings(
            starts=read_npy(directory / "starts.npy", np.int64, (info.dimension + 1,)),
            rows=read_npy(directory / "rows.npy", np.int32, (size,)),
            weights=read_npy(directory / "weights.npy", _DTYPES[info.settings["storage"]], (size,)),
        )
        path = directory / "tokens.json"
        return cls(info, ids, documents, postings, read_json(path, list[str]) if path.is_file() else None)

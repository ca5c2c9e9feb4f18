"""An index of token vectors, searched by MaxSim (late interaction)."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.encoding.lengths import UnusableVectorError
from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings
from jaxir.retrieval.indexes.base_index import Index, check_k
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.retrieval.indexes.maxsim_search import Best, best_of_all, descending, first_of
from jaxir.retrieval.indexes.token_codec import TokenCodes, encode
from jaxir.retrieval.indexes.token_lists import TokenLists
from jaxir.storage.npy import read_npy, write_npy

CANDIDATES = 256  # default number of passages that are compared with a query by MaxSim
_AT_ONCE = 1024  # number of passages that are compared at once, so that malloc reuses the memory of products
_BITS = {"2bit": 2, "4bit": 4, "float16": 16}

Queries = Sequence[np.ndarray]  # Q arrays [tokens, D]


class MaxSimIndex(Index):
    """N passages with a vector for each token, searched by MaxSim.

    With candidates, a query's tokens first choose passages by their nearest centroids, and MaxSim compares
    only the chosen passages. Without candidates, MaxSim compares all passages, which is exact for the stored
    vectors.
    """

    engine = "maxsim"
    query_kind = "token_vectors"

    def __init__(
        self,
        info: IndexInfo,
        ids: list[str],
        documents: Documents | None,
        codes: TokenCodes,
        lengths: np.ndarray,
        lists: TokenLists,
    ):
        super().__init__(info, ids, documents)
        self._codes, self._lengths, self._lists = codes, lengths, lists
        self._ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._rank = descending(ids)

    @classmethod
    def build(
        cls,
        stored: StoredEmbeddings,
        *,
        token_storage: Literal["2bit", "4bit", "float16"] = "4bit",
        candidates: int = CANDIDATES,
        model: str | None = None,
    ) -> MaxSimIndex:
        """Indexes the output of `jaxir.encode` with a multi-vector encoder.

        Args:
          stored: token vectors and their ids.
          token_storage: how a vector is stored: a centroid and 2 or 4 bits for each component, or float16.
          candidates: number of passages that are compared with a query by MaxSim; 0: all.
          model: the model that encodes queries; None: the passages' model.

        Raises:
          UserError: no passage has a token vector.
        """
        about = stored.info
        lengths = np.concatenate(stored.lengths)
        if not lengths.sum():
            raise UserError(
                "no passage has a token that is scored, so there is nothing to index: give other texts"
            )
        info = IndexInfo(
            engine=cls.engine,
            similarity=about.similarity,
            dimension=about.dimension,
            count=len(stored.ids),
            fingerprint=about.fingerprint,
            model=model or about.model,
            tower=about.tower,
            step=about.step if model in (None, about.model) else None,
            max_length=about.max_length,
            cut=about.cut,
        )
        codes = encode(stored.shards, _BITS[token_storage])
        info = dataclasses.replace(info, settings={"token_storage": token_storage, "candidates": candidates})
        lists = TokenLists.of(codes.nearest, lengths, len(codes.centroids))
        return cls(info, list(stored.ids), None, codes, lengths, lists)

    def search(self, queries: Queries, k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but for arrays [tokens, D] of a multi-vector encoder.

        A query without tokens finds nothing, and candidates may be fewer than k passages.
        """
        check_k(k)
        queries = [np.asarray(query, np.float32) for query in queries]
        for number, query in enumerate(queries):
            if query.ndim != 2 or query.shape[1] != self.info.dimension:
                raise UserError(
                    f"the tokens of a query have the shape {query.shape}, and the index has"
                    f" {self.info.dimension} dimensions: encode the queries with the model of the index"
                )
            if not np.isfinite(query).all():
                raise UnusableVectorError(f"the vectors of query {number + 1}", number, "are not all finite")
        k, candidates = min(k, self.info.count), self.info.settings["candidates"]
        count = max(k, candidates) if candidates else self.info.count
        some = count < self.info.count
        found = self._of_candidates(queries, k, count) if some else self._of_all(queries, k)
        scores, ids = np.full([len(queries), k], -math.inf, np.float32), []
        for number, (rows, of_rows) in enumerate(found):
            scores[number, : len(rows)] = of_rows
            ids.append([self.ids[row] for row in rows])
        if self.info.similarity == "meanmaxsim":
            scores /= np.array([max(1, len(query)) for query in queries], np.float32)[:, None]
        return scores, ids

    def _of_candidates(self, queries: Queries, k: int, count: int) -> list[Best]:
        """Returns the best rows of each query and their scores, among `count` candidates."""

        def best(query: np.ndarray) -> Best:
            of_centroids = self._codes.centroids @ query.T
            rows = self._lists.candidates(of_centroids, self.info.count, count)
            return first_of(rows, self._scores(query, rows, of_centroids), k, self._rank)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(best, queries))

    def _scores(self, query: np.ndarray, rows: np.ndarray, of_centroids: np.ndarray) -> np.ndarray:
        """Returns the MaxSim [n] of a query [Lq, D] with passages that have tokens."""
        found = np.empty(len(rows), np.float32)
        for at in range(0, len(rows), _AT_ONCE):
            some = rows[at : at + _AT_ONCE]
            lengths = self._lengths[some]
            starts = np.cumsum(lengths) - lengths
            tokens = np.arange(lengths.sum()) + np.repeat(self._ends[some] - starts, lengths)
            products = self._codes.products(tokens, query, of_centroids)
            found[at : at + _AT_ONCE] = np.maximum.reduceat(products, starts, axis=0).sum(1)
        return found

    def _of_all(self, queries: Queries, k: int) -> list[Best]:
        """Compares every passage that has tokens with every query, on all devices of this process."""

        def vectors_of(row: int) -> np.ndarray:
            return self._codes.decode(slice(self._ends[row], self._ends[row + 1]))

        return best_of_all(queries, self._lengths, vectors_of, k, rank=self._rank)

    def _save_engine(self, directory: Path) -> None:
        self._codes.save(directory)
        arrays = {"lengths": self._lengths, "passages": self._lists.passages, "ends": self._lists.ends}
        for name, array in arrays.items():
            with (directory / f"{name}.npy").open("wb") as file:
                write_npy(file, [array])

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> MaxSimIndex:
        lengths = np.array(read_npy(directory / "lengths.npy", np.int32, (info.count,)))
        codes = TokenCodes.load(
            directory,
            bits=_BITS[info.settings["token_storage"]],
            tokens=int(lengths.sum()),
            dimension=info.dimension,
        )
        ends = np.array(read_npy(directory / "ends.npy", np.int64, (len(codes.centroids) + 1,)))
        lists = TokenLists(read_npy(directory / "passages.npy", np.int32, (int(ends[-1]),)), ends)
        return cls(info, ids, documents, codes, lengths, lists)

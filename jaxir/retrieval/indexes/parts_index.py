"""An index in parts, which are built separately and searched together."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings
from jaxir.retrieval.encoding.unfinished import start_or_resume, unfinished_of
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, load_index, not_changed
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.index_info import IndexInfo, describe
from jaxir.retrieval.indexes.tuning import Recall
from jaxir.runtime.distributed import wait_for_all
from jaxir.storage import checksums
from jaxir.storage.files import local_path
from jaxir.storage.json_files import read_json

PARTS = "parts"  # a directory of index directories
QUERIES = 256  # queries whose results are merged at a time
# Fields of `EmbeddingsInfo` that the vectors depend on. They must be equal when a build resumes.
OF_EMBEDDINGS = (
    *("input_sha256", "count", "fingerprint", "tower", "dtype", "max_length", "prompt", "text"),
    *("expansion", "views", "expansions_hash"),
)
CALLED = {"input_sha256": "input", "fingerprint": "model", "expansions_hash": "set of generated queries"}


class PartsIndex(VectorIndex):
    """N vectors, split over P indexes; a query gets the best results of all indexes.

    If the parts are exact, so are the merged results, ties included. Approximate parts each search as far as
    if they were the only one, so together they compare more candidates than one index of all vectors.
    """

    engine = "parts"
    growing = (PARTS,)  # each part has its own checksums

    def __init__(
        self, info: IndexInfo, ids: list[str], documents: Documents | None, parts: Sequence[Path]
    ) -> None:
        super().__init__(info, ids, documents)
        self.parts = list(parts)
        self._share: tuple[int, int] = (0, 1)

    def shared(self) -> PartsIndex:
        """Returns the same index with its parts divided over processes, which must search equal queries."""
        other = copy.copy(self)
        other._share = jax.process_index(), jax.process_count()
        other.__dict__.pop("_opened", None)
        return other

    @functools.cached_property
    def _opened(self) -> list[VectorIndex]:
        first, step = self._share
        return [load_index(part) for part in self.parts[first::step]]

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, list[list[str]]]:
        answers = [part._search(queries, min(k, part.info.count)) for part in self._opened]
        scores, ids = merge(answers, len(queries), k)
        if self._share[1] > 1:
            scores, ids = merge(_of_all_processes(scores, ids), len(queries), k)
        return scores, ids

    @classmethod
    def build(cls, embeddings: Embeddings, ids: Sequence[str], **facts: Any) -> PartsIndex:
        raise UserError("an index in parts is built on disk: call build_in_parts")

    def _save_engine(self, directory: Path) -> None:
        raise not_changed(self)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> PartsIndex:
        return cls(info, ids, documents, _places(directory, info.settings["parts"]))

    def close(self) -> None:
        for part in self.__dict__.get("_opened", []):
            part.close()


def merge(
    answers: Sequence[tuple[np.ndarray, list[list[str]]]], count: int, k: int
) -> tuple[np.ndarray, list[list[str]]]:
    """Returns the k best of the parts' results, each (scores [Q, K], ids), ordered like `Index.search`'s."""
    scores = np.full((count, k), -np.inf, np.float32)
    ids: list[list[str]] = []
    for start in range(0, count, QUERIES):
        rows = slice(start, min(start + QUERIES, count))
        values = np.concatenate([found[rows] for found, _ in answers] or [scores[rows]], axis=1)
        names = np.full(values.shape, "", object)
        at = 0
        for found, of_part in answers:
            for row, some in enumerate(of_part[rows]):
                names[row, at : at + len(some)] = some
            at += found.shape[1]
        # Sort in descending order of score, then of id.
        order = np.lexsort((names.astype(str), values))[:, ::-1][:, :k]
        values, names = (np.take_along_axis(x, order, axis=1) for x in (values, names))
        scores[rows, : values.shape[1]] = values
        real = np.isfinite(values).sum(axis=1)
        ids += [some[:number] for some, number in zip(names.tolist(), real.tolist(), strict=True)]
    return scores, ids


def _of_all_processes(scores: np.ndarray, ids: list[list[str]]) -> list[tuple[np.ndarray, list[list[str]]]]:
    """Returns the results [Q, K] of each process of the run."""
    encoded = [[doc_id.encode() for doc_id in some] for some in ids]
    longest = max((len(doc_id) for some in encoded for doc_id in some), default=0)
    with jax.transfer_guard("allow"):
        width = 1 + int(np.max(multihost_utils.process_allgather(np.array(longest))))
        names = np.zeros(scores.shape, f"S{width}")
        for row, some in enumerate(encoded):
            names[row, : len(some)] = some
        sent = names.view(np.uint8).reshape(*scores.shape, width)
        of_all = multihost_utils.process_allgather(scores), multihost_utils.process_allgather(sent)
    answers = []
    for values, letters in zip(*map(np.asarray, of_all), strict=True):
        rows = np.ascontiguousarray(letters).view(f"S{width}")[..., 0].tolist()
        counts = np.isfinite(values).sum(axis=1).tolist()
        found = [[x.decode() for x in row[:n]] for row, n in zip(rows, counts, strict=True)]
        answers.append((values, found))
    return answers


def build_in_parts(
    stored: StoredEmbeddings,
    output: str | Path,
    parts: int,
    build: Callable[[StoredEmbeddings], tuple[VectorIndex, Recall | None]],
    *,
    how: dict[str, Any],
    corpus: str | Path | None = None,
) -> None:
    """Builds an index of jaxir.encode's vectors in parts; the directory only appears when it is complete.

    After an interruption the same call builds the missing parts. The processes of one run share the parts and
    need a common file system. A process holds one part at a time in memory.

    Args:
      parts: number of parts, which get equally many passages, in the order of the input.
      build: makes the index of a part, and may measure its recall.
      how: settings that the parts depend on, by name; they must be equal when a build resumes.
      corpus: a corpus file; its titles and texts are stored, to be shown with search results.
    """
    output = Path(os.path.realpath(local_path(output, "written to")))  # keep `output` if it is a link
    info, unfinished = stored.info, unfinished_of(output)
    if info.expansion == "corpus":
        raise UserError("--parts cannot index embeddings made with --expansion=corpus: leave out --parts")
    if not 1 <= parts <= info.count:
        raise UserError(f"--parts must be from 1 to the number of passages, {info.count}, not {parts}")
    if len(set(stored.ids)) != info.count:
        raise UserError("some ids of the embeddings occur twice: encode a corpus with distinct ids")
    first, places = jax.process_index() == 0, _places(unfinished, parts)
    if first:
        made = {name: getattr(info, name) for name in OF_EMBEDDINGS} | {"parts": parts, **how}
        start_or_resume(output, made, f"{PARTS}/*", called=CALLED)
        (unfinished / PARTS).mkdir(exist_ok=True)
    wait_for_all("parts are begun")
    own = range(jax.process_index(), parts, jax.process_count())
    for n in progress(own, what="building parts", unit="parts"):
        if not places[n].exists():
            index, recall = build(_rows(stored, info.count * n // parts, info.count * (n + 1) // parts))
            index.save(places[n])
            index.close()
            if recall is not None:
                print(f"part {n + 1} of {parts}: {recall}")
    wait_for_all("parts are built")
    if first:
        description = read_json(places[0] / "index.json", dict[str, Any])
        settings = {"parts": parts, "backend": description["engine"]}
        del description["format"]
        description |= {
            "engine": PartsIndex.engine,
            "count": info.count,
            "cut": info.cut,
            "settings": settings,
        }
        if corpus is not None:
            Documents.write(unfinished, corpus, stored.ids)
        describe(unfinished, IndexInfo(**description), stored.ids)
        checksums.write_all(unfinished, without=PartsIndex.growing)
        unfinished.rename(output)
    wait_for_all("the index is complete")


def _places(directory: Path, parts: int) -> list[Path]:
    return [directory / PARTS / f"{number:05d}" for number in range(parts)]


def _rows(stored: StoredEmbeddings, start: int, stop: int) -> StoredEmbeddings:
    shards, at = [], 0
    for shard in stored.shards:
        if at < stop and at + len(shard) > start:
            shards.append(shard[max(0, start - at) : stop - at])
        at += len(shard)
    info = dataclasses.replace(stored.info, count=stop - start, cut=None)
    return StoredEmbeddings(info, stored.ids[start:stop], shards)

"""A corpus in parts, each with an index of its own: built one after another or by many, searched together."""

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
from jaxir.retrieval.encoding.unfinished import take_up, unfinished_of
from jaxir.retrieval.indexes.base_index import Embeddings, VectorIndex, load_index, not_changed
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.index_info import IndexInfo, describe
from jaxir.retrieval.indexes.tuning import Recall
from jaxir.runtime.distributed import wait_for_all
from jaxir.storage import checksums
from jaxir.storage.files import local_path
from jaxir.storage.json_files import read_json

PARTS = "parts"  # a directory of index directories
QUERIES = 256  # whose answers are merged at once
# What the vectors depend on: parts made of others are not taken up again.
OF_EMBEDDINGS = (
    *("input_sha256", "count", "fingerprint", "tower", "dtype", "max_length", "prompt", "text"),
    *("expansion", "views", "expansions_hash"),
)
CALLED = {"input_sha256": "input", "fingerprint": "model", "expansions_hash": "set of generated queries"}


class PartsIndex(VectorIndex):
    """N vectors, each in one of P indexes; of a query's answers by all of them the best count.

    Where the parts are exact so is the whole, ties included. Where they are not, each looks as far as it
    would alone: together at more candidates than one index of all vectors would.

    Attributes:
      parts: the directories of all of them.
    """

    engine = "parts"
    growing = (PARTS,)  # each has checksums of its own

    def __init__(
        self, info: IndexInfo, ids: list[str], documents: Documents | None, parts: Sequence[Path]
    ) -> None:
        super().__init__(info, ids, documents)
        self.parts = list(parts)
        self._share: tuple[int, int] = (0, 1)

    def shared(self) -> PartsIndex:
        """Returns the same index, each of whose parts is opened and searched by one process of the run only.

        All of them call `search` with the same queries, and have the same answers.
        """
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
        """Raises a UserError: parts lie on disk from the beginning; see `build_in_parts`."""
        raise UserError("an index in parts is built on disk: build_in_parts")

    def _save_engine(self, directory: Path) -> None:
        raise not_changed(self)

    @classmethod
    def _load_engine(
        cls, directory: Path, info: IndexInfo, ids: list[str], documents: Documents | None
    ) -> PartsIndex:
        return cls(info, ids, documents, _places(directory, info.settings["parts"]))

    def close(self) -> None:
        """Lets go of what the parts hold; see `Index.close`."""
        for part in self.__dict__.get("_opened", []):
            part.close()


def merge(
    answers: Sequence[tuple[np.ndarray, list[list[str]]]], count: int, k: int
) -> tuple[np.ndarray, list[list[str]]]:
    """Merges answers to the same queries as `VectorIndex.search` orders them.

    Args:
      answers: of each part: scores [Q, K], -inf where there are fewer answers, and the ids.
      count: Q.
      k: answers that are kept.

    Returns:
      The best ones: (float32 scores [Q, k], for each query at most k ids).
    """
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
        # In descending order of score, then of id.
        order = np.lexsort((names.astype(str), values))[:, ::-1][:, :k]
        values, names = (np.take_along_axis(x, order, axis=1) for x in (values, names))
        scores[rows, : values.shape[1]] = values
        real = np.isfinite(values).sum(axis=1)
        ids += [some[:number] for some, number in zip(names.tolist(), real.tolist(), strict=True)]
    return scores, ids


def _of_all_processes(scores: np.ndarray, ids: list[list[str]]) -> list[tuple[np.ndarray, list[list[str]]]]:
    """Returns the answers [Q, K] of each process of the run."""
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
    """Builds an index of what `encode` wrote in parts; the directory appears only when all are there.

    Run again after an interruption it builds those that are missing. Several processes of one run, which see
    the same files, each build some. A process has one part at a time in memory.

    Args:
      parts: how many, of as many passages each as can be, in the order of the input.
      build: makes the index of a part, and measures it or not.
      how: what else the parts depend on, by name, so that no others are taken up again.
      corpus: a corpus file whose titles and texts are stored for display.

    Raises:
      UserError: more parts than passages, ids that are not distinct, several vectors of a document, or what
        was begun there is something else.
    """
    output = Path(os.path.realpath(local_path(output, "written to")))  # a link stays one
    info, unfinished = stored.info, unfinished_of(output)
    if info.expansion == "corpus":
        raise UserError("several vectors of a document are not indexed in parts: leave --parts out")
    if not 1 <= parts <= info.count:
        raise UserError(f"{info.count} passages cannot be indexed in {parts} parts")
    if len(set(stored.ids)) != info.count:
        raise UserError("some ids come twice")
    first, places = jax.process_index() == 0, _places(unfinished, parts)
    if first:
        made = {name: getattr(info, name) for name in OF_EMBEDDINGS} | {"parts": parts, **how}
        take_up(output, made, f"{PARTS}/*", called=CALLED)
        (unfinished / PARTS).mkdir(exist_ok=True)
    wait_for_all("parts are begun")
    own = range(jax.process_index(), parts, jax.process_count())
    for n in progress(own, what="building parts", unit="parts"):
        if not places[n].exists():
            index, recall = build(_rows(stored, _range_of(n, parts, info.count)))
            index.save(places[n])
            index.close()
            if recall is not None:
                print(f"part {n + 1} of {parts}: {recall}")
    wait_for_all("parts are built")
    if first:
        of_part = read_json(places[0] / "index.json", dict[str, Any])
        whole = IndexInfo(
            engine=PartsIndex.engine,
            similarity=info.similarity,
            dimension=info.dimension,
            count=info.count,
            fingerprint=info.fingerprint,
            model=of_part["model"],
            read_with=info.read_with,
            tower=info.tower,
            max_length=info.max_length,
            cut=info.cut,
            step=of_part.get("step"),
            settings={"parts": parts, "backend": of_part["engine"]},
        )
        if corpus is not None:
            Documents.write(unfinished, corpus, stored.ids)
        describe(unfinished, whole, stored.ids)
        checksums.write_all(unfinished, without=PartsIndex.growing)
        unfinished.rename(output)
    wait_for_all("the index is complete")


def _places(directory: Path, parts: int) -> list[Path]:
    return [directory / PARTS / f"{number:05d}" for number in range(parts)]


def _range_of(n: int, parts: int, count: int) -> slice:
    """Returns which of all passages are in part `n`."""
    return slice(count * n // parts, count * (n + 1) // parts)


def _rows(stored: StoredEmbeddings, rows: slice) -> StoredEmbeddings:
    """Returns some of the passages; their vectors stay where they are."""
    start, stop = rows.start, rows.stop
    shards, at = [], 0
    for shard in stored.shards:
        if at < stop and at + len(shard) > start:
            shards.append(shard[max(0, start - at) : stop - at])
        at += len(shard)
    info = dataclasses.replace(stored.info, count=stop - start, cut=None)
    return StoredEmbeddings(info, stored.ids[rows], shards)

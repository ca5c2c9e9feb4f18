"""Indexes that are open, and what can be asked of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxir.data.sources import Document
from jaxir.errors import UserError
from jaxir.retrieval.indexes.index import Index, load_index
from jaxir.retrieval.ranking.fusion import reciprocal_rank_fusion
from jaxir.retrieval.searcher import Searcher
from jaxir.serving.batcher import Batcher
from jaxir.serving.engines import Answer, DenseEngine, Found, Question, SparseEngine
from jaxir.serving.examples import examples
from jaxir.serving.few_shapes import FewShapes, Tower
from jaxir.serving.limits import Limits

HYBRID = "hybrid"
TOWERS: tuple[Tower, ...] = ("query", "passage")
MAX_BATCH = 64


class Ranking(NamedTuple):
    """The documents that a system found, best first, and the milliseconds that it took.

    `ms` names the parts "encode", "search" and "fuse" (of the batch that a query was in), and "total", which
    also has the time that the query waited.
    """

    ids: list[str]
    scores: list[float]
    ms: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Opened:
    """An index that is served.

    Attributes:
      name: what requests and answers call it.
      searcher: the index and its model.
    """

    name: str
    searcher: Searcher

    @property
    def index(self) -> Index:
        return self.searcher.index

    @property
    def kind(self) -> Literal["dense", "sparse"]:
        return "sparse" if self.searcher.encoder is None else "dense"


class Service:
    """One or more indexes behind batchers. `Service.open` it, then use it as an async context.

    Attributes:
      opened: the indexes, in the order that they were named.
      engines: what answers, by the name of the index.
      systems: what can be searched: their names and, where there are two or more, "hybrid".
      limits: as given; this class itself holds only those on what waits and on depth.
    """

    def __init__(self, opened: Sequence[Opened], limits: Limits):
        self.opened, self.limits = list(opened), limits
        names = [o.name for o in self.opened]
        self.systems = [*names, HYBRID] if len(names) > 1 else names
        self.engines: dict[str, DenseEngine | SparseEngine] = {}
        for group in _by_model(self.opened):
            encoder = group[0].searcher.encoder
            if encoder is None:
                engine = SparseEngine(group[0].name, group[0].searcher, k=limits.k)
            else:
                engine = DenseEngine(FewShapes(encoder), {o.name: o.index for o in group}, k=limits.k)
            self.engines |= {o.name: engine for o in group}
        self._batchers: dict[tuple[int, Tower], Batcher[Question, Answer]] = {}
        self._stack = contextlib.AsyncExitStack()

    @classmethod
    def open(
        cls,
        indexes: Sequence[str],
        *,
        model: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        limits: Limits | None = None,
    ) -> Service:
        """Reads indexes and models, and compiles and starts what answers.

        Args:
          indexes: index directories, each as DIR (its name is the last part of the path) or NAME=DIR.
          model: the model that encodes queries; None takes the one recorded in each index.
          dtype: type of the models' matrix products.
          limits: None takes the defaults.

        Raises:
          UserError: there is none, two have one name or no document in common, or one cannot be searched.
        """
        limits = limits or Limits()
        if not indexes:
            raise UserError("give at least one index: --index=DIR")
        opened: list[Opened] = []
        for spec in indexes:
            name, directory = _named(spec)
            if name in [HYBRID, *(o.name for o in opened)]:
                raise UserError(
                    f"the name {name!r} is taken: give {directory} another one, --index=NAME={directory}"
                )
            opened.append(Opened(name, _searcher(directory, opened, model, dtype)))
            first, other = opened[0], opened[-1]
            if set(first.index.ids).isdisjoint(other.index.ids):
                raise UserError(
                    f"the indexes {first.name} and {other.name} have no document in common:"
                    " they cannot be searched side by side"
                )
        service = cls(opened, limits)
        for engine in service._engines():
            engine.warm_up(MAX_BATCH)
        return service

    async def __aenter__(self) -> Service:
        for number, engine in enumerate(self._engines()):
            for tower in TOWERS[:1] if isinstance(engine, SparseEngine) else TOWERS:
                batcher = Batcher(
                    engine.answer,
                    max_batch=MAX_BATCH,
                    max_waiting=self.limits.waiting,
                    name=f"engine-{number}-{tower}",
                )
                self._batchers[id(engine), tower] = await self._stack.enter_async_context(batcher)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def search(
        self, queries: Sequence[str], k: int, systems: Sequence[str]
    ) -> list[dict[str, Ranking]]:
        """Returns, for each query, what each system found.

        Args:
          queries: texts.
          k: documents of each.
          systems: some of `self.systems`.

        Raises:
          Busy: too many queries wait.
          UserError: an engine cannot answer.
        """
        started = time.perf_counter()
        wanted = [o.name for o in self.opened if HYBRID in systems or o.name in systems]
        engines = list(dict.fromkeys(self.engines[name] for name in wanted))
        elapsed: dict[str, float] = {}

        async def ask(engine: DenseEngine | SparseEngine) -> list[Answer]:
            names = frozenset(name for name in wanted if self.engines[name] is engine)
            answers = await self._batchers[id(engine), "query"].results([Question(q, names) for q in queries])
            elapsed.update(dict.fromkeys(names, 1000 * (time.perf_counter() - started)))
            return answers

        answers = await asyncio.gather(*map(ask, engines))

        def rank() -> list[dict[str, Ranking]]:
            rankings = []
            for of_query in zip(*answers, strict=True):
                found = {name: each for answer in of_query for name, each in answer.found.items()}
                rankings.append({s: _ranking(s, found, elapsed, wanted, k) for s in systems})
            return rankings

        return await asyncio.to_thread(rank)

    async def encode(
        self, texts: Sequence[str], tower: Tower, index: str | None
    ) -> tuple[Opened, np.ndarray]:
        """Returns the vectors float32 [N, D] of N texts, and the index whose model made them.

        Args:
          texts: N texts.
          tower: "query" or "passage".
          index: its name; None takes the first that has a model.

        Raises:
          KeyError: there is no such index, or it has no model; its argument is a sentence.
          Busy: too many texts wait.
        """
        dense = {o.name: o for o in self.opened if o.kind == "dense"}
        opened = dense.get(index) if index is not None else next(iter(dense.values()), None)
        if opened is None:
            raise KeyError(f"no index {index!r} here has a model" if index else "no index here has a model")
        batcher = self._batchers[id(self.engines[opened.name]), tower]
        answers = await batcher.results([Question(text, tower=tower) for text in texts])
        return opened, np.stack([answer.vector for answer in answers])

    def document(self, doc_id: str, index: str | None = None) -> tuple[Opened, Document] | None:
        """Returns a document and the index that has it stored, None where none has.

        Args:
          doc_id: its id.
          index: the name of an index; None takes the first that has it.
        """
        for opened in self.opened:
            if opened.index.documents is not None and index in (None, opened.name):
                with contextlib.suppress(KeyError):
                    return opened, opened.index.documents[doc_id]
        return None

    def examples(self, count: int) -> list[str]:
        """Returns phrases out of documents, other ones each time; none where no documents are stored."""
        for opened in self.opened:
            if opened.index.documents is not None:
                found = examples(opened.index, count, random.Random())
                return [phrase[: self.limits.query_characters] for phrase in found]
        return []

    def batchers(self) -> dict[tuple[str, Tower], Batcher[Question, Answer]]:
        """Returns what does the work, by the names of its indexes and by tower; empty before it is begun."""
        return {
            (self._names(engine), tower): self._batchers[id(engine), tower]
            for engine, tower in itertools.product(self._engines(), TOWERS)
            if (id(engine), tower) in self._batchers
        }

    def compiled_shapes(self) -> dict[tuple[str, Tower], int]:
        """Returns the number of compiled programs by the names of their indexes and by tower."""
        dense = [engine for engine in self._engines() if isinstance(engine, DenseEngine)]
        return {(self._names(e), tower): e.compiled_shapes(tower) for e in dense for tower in TOWERS}

    def _engines(self) -> list[DenseEngine | SparseEngine]:
        return list(dict.fromkeys(self.engines.values()))

    def _names(self, engine: DenseEngine | SparseEngine) -> str:
        return ",".join(name for name, each in self.engines.items() if each is engine)


def _ranking(
    system: str, found: dict[str, Found], elapsed: dict[str, float], wanted: Sequence[str], k: int
) -> Ranking:
    if system != HYBRID:
        one = found[system]
        ms = {"encode": one.encode_ms, "search": one.search_ms, "total": elapsed[system]}
        return Ranking(one.ids[:k], one.scores[:k], ms)
    started = time.perf_counter()
    runs = [{"q": dict(zip(found[name].ids, found[name].scores, strict=True))} for name in wanted]
    fused = reciprocal_rank_fusion(runs, depth=k)["q"]
    fuse_ms = 1000 * (time.perf_counter() - started)
    ms = {"fuse": fuse_ms, "total": fuse_ms + max(elapsed[name] for name in wanted)}
    return Ranking(list(fused), list(fused.values()), ms)


def _named(spec: str) -> tuple[str, str]:
    """Takes NAME=DIR or DIR apart."""
    name, equals, directory = spec.partition("=")
    if not equals or "/" in name:
        name, directory = Path(spec).resolve().name, spec
    return name, directory


def _searcher(
    directory: str, opened: Sequence[Opened], model: str | None, dtype: Literal["float32", "bfloat16"]
) -> Searcher:
    """Opens an index, with a model that another one has opened where it is the same."""
    index = load_index(directory)
    if index.query_kind != "vectors":
        return Searcher(index)
    for other in opened:
        if other.kind == "dense" and (model is not None or other.index.info.model == index.info.model):
            index.require_model(other.searcher.encoder.fingerprint, model or index.info.model)
            return Searcher(index, other.searcher.encoder)
    return Searcher.open(index, model=model, dtype=dtype)


def _by_model(opened: Sequence[Opened]) -> list[list[Opened]]:
    """Groups dense indexes by their encoder; each sparse one is a group of its own."""
    groups: dict[int, list[Opened]] = {}
    for each in opened:
        groups.setdefault(id(each.searcher.encoder or each), []).append(each)
    return list(groups.values())

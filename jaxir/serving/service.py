"""Opens indexes and models, and searches them for many clients at once: the HTTP service without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.formats.sources import Document
from jaxir.data.text.truncation import Truncation, truncation_note
from jaxir.retrieval.encoding.text_encoder import Tower
from jaxir.retrieval.indexes.base_index import Index, load_index
from jaxir.retrieval.ranking.fusion import reciprocal_rank_fusion
from jaxir.retrieval.searcher import Searcher
from jaxir.serving.batcher import Batcher
from jaxir.serving.engines import Answer, DenseEngine, Found, Question, SparseEngine
from jaxir.serving.examples import examples
from jaxir.serving.limits import Limits
from jaxir.serving.reranker import Reranker

HYBRID, RERANKED = "hybrid", "reranked"
MAX_BATCH = 64  # maximum number of texts in an engine's batch


class Ranking(NamedTuple):
    """One system's documents for one query, best first.

    `ms` has milliseconds: "encode", "search" and "fuse" of the query's batch, "rerank" of the request, and
    "total" including waiting. `cut_at` is the number of characters of the query that the models read, None
    if all.
    """

    ids: list[str]
    scores: list[float]
    ms: dict[str, float]
    cut_at: int | None = None


@dataclasses.dataclass(frozen=True)
class Opened:
    """A served index with its model, and its name in requests and answers."""

    name: str
    searcher: Searcher

    @property
    def index(self) -> Index:
        return self.searcher.index

    @property
    def kind(self) -> Literal["dense", "sparse"]:
        return "sparse" if self.searcher.encoder is None else "dense"


class Service:
    """Searches indexes for many clients. Create it with `open`, then use it as an async context manager.

    Indexes of the same model share an engine. `systems` names each index, "hybrid" (all indexes fused, if
    there are several) and "reranked" (the hybrid or the only index, reranked). Keys of `batchers` are
    (engine name, tower), and ("reranked", "pair") for the reranker.
    """

    def __init__(self, opened: Sequence[Opened], limits: Limits, reranker: Reranker | None = None):
        self.opened, self.limits, self.reranker = list(opened), limits, reranker
        names = [o.name for o in self.opened]
        self.systems = [*names, HYBRID] if len(names) > 1 else names
        self._reranked_system = self.systems[-1]
        if reranker is not None:
            self.systems = [*self.systems, RERANKED]
        self.engines: dict[str, DenseEngine | SparseEngine] = {}
        for first in self.opened:
            if (encoder := first.searcher.encoder) is None:
                self.engines[first.name] = SparseEngine(first.name, first.searcher, k=limits.k)
            elif first.name not in self.engines:
                alike = {o.name: o.index for o in self.opened if o.searcher.encoder is encoder}
                self.engines |= dict.fromkeys(alike, DenseEngine(encoder, alike, k=limits.k))
        self.batchers: dict[tuple[str, str], Batcher] = {}
        self._stack = contextlib.AsyncExitStack()

    @classmethod
    def open(
        cls,
        indexes: Sequence[str],
        *,
        model: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        limits: Limits | None = None,
        reranker: str | None = None,
        rerank_depth: int = 50,
    ) -> Service:
        """Opens indexes (DIR, or NAME=DIR) and models, and compiles the programs of their engines.

        `model` encodes queries; if None, the model recorded in each index does. `reranker` is a cross-encoder
        that reranks the first `rerank_depth` documents of each query.
        """
        limits = limits or Limits()
        if not indexes:
            raise UserError("give at least one index: --index=DIR")
        if reranker is not None and rerank_depth > limits.k:
            raise UserError(f"--rerank_depth={rerank_depth} must be at most {limits.k}, the limit k")
        opened: list[Opened] = []
        for spec in indexes:
            name, directory = _named(spec)
            if name in [HYBRID, RERANKED, *(o.name for o in opened)]:
                raise UserError(
                    f"the name {name!r} is taken: give {directory} another name by --index=NAME={directory}"
                )
            opened.append(Opened(name, _searcher(directory, opened, model, dtype)))
            first, other = opened[0], opened[-1]
            if set(first.index.ids).isdisjoint(other.index.ids):
                raise UserError(
                    f"the indexes {first.name} and {other.name} have no document in common: serve indexes of"
                    " one corpus"
                )
        if model is not None and all(o.searcher.encoder is None for o in opened):
            raise UserError(f"no index has vectors, so no model is needed: remove --model={model}")
        stage = None
        if reranker is not None:
            _check_texts(opened)
            stage = Reranker(reranker, depth=rerank_depth)
        service = cls(opened, limits, stage)
        for engine in service._engines():
            engine.warm_up(MAX_BATCH)
        if stage is not None:
            stage.warm_up()
        return service

    def truncated(self) -> list[str]:
        """Returns a line for each index that recorded how many of its documents were truncated."""
        lines = []
        for opened in self.opened:
            info = opened.index.info
            if info.cut is not None and info.max_length is not None:
                count = Truncation(info.max_length, info.count, info.cut)
                change = "jaxir.encode --max_length sets this"
                lines.append(f"{opened.name}: {truncation_note({'documents': count}, change)}")
        return lines

    async def __aenter__(self) -> Service:
        for engine in self._engines():
            for tower in engine.towers:
                batcher = Batcher(
                    engine.answer,
                    max_batch=MAX_BATCH,
                    max_waiting=self.limits.waiting,
                    name=f"{engine.name}-{tower}",
                )
                self.batchers[engine.name, tower] = await self._stack.enter_async_context(batcher)
        if self.reranker is not None:
            batcher = self.reranker.new_batcher(self.limits.waiting)
            self.batchers[RERANKED, "pair"] = await self._stack.enter_async_context(batcher)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def search(
        self, queries: Sequence[str], k: int, systems: Sequence[str]
    ) -> list[dict[str, Ranking]]:
        """Returns, for each query, the first k documents of each of `systems`. Raises `Busy` if too many
        queries are waiting.
        """
        if RERANKED in systems:
            return await self._reranked(queries, k, systems)
        started = time.perf_counter()
        wanted = [o.name for o in self.opened if HYBRID in systems or o.name in systems]
        engines = list(dict.fromkeys(self.engines[name] for name in wanted))
        elapsed: dict[str, float] = {}

        async def ask(engine: DenseEngine | SparseEngine) -> list[Answer]:
            names = frozenset(name for name in wanted if self.engines[name] is engine)
            answers = await self.batchers[engine.name, "query"].results([Question(q, names) for q in queries])
            elapsed.update(dict.fromkeys(names, 1000 * (time.perf_counter() - started)))
            return answers

        answers = await asyncio.gather(*map(ask, engines))

        def rank() -> list[dict[str, Ranking]]:
            rankings = []
            for of_query in zip(*answers, strict=True):
                found = {name: each for answer in of_query for name, each in answer.found.items()}
                cuts = {name: answer.cut_at for answer in of_query for name in answer.found}
                rankings.append({s: _ranking(s, found, cuts, elapsed, wanted, k) for s in systems})
            return rankings

        return await asyncio.to_thread(rank)

    async def _reranked(
        self, queries: Sequence[str], k: int, systems: Sequence[str]
    ) -> list[dict[str, Ranking]]:
        """Like `search`, with reranking: scores the documents of the hybrid, or of the only index, again."""
        before = self._reranked_system
        others = list(dict.fromkeys([*(s for s in systems if s != RERANKED), before]))
        found = await self.search(queries, max(k, self.reranker.depth), others)
        ids = [rankings[before].ids for rankings in found]
        scored, rerank_ms = await self.reranker.rerank(queries, ids, self._text_of)
        answers = []
        for rankings, scores in zip(found, scored, strict=True):
            ms = rankings[before].ms
            ms = ms | {"rerank": rerank_ms, "total": ms["total"] + rerank_ms}
            last = Ranking(list(scores)[:k], list(scores.values())[:k], ms, rankings[before].cut_at)
            cut = {name: r._replace(ids=r.ids[:k], scores=r.scores[:k]) for name, r in rankings.items()}
            answers.append({s: last if s == RERANKED else cut[s] for s in systems})
        return answers

    def _text_of(self, doc_id: str) -> str:
        found = self.document(doc_id)
        return "" if found is None else found[1].contents

    async def encode(
        self, texts: Sequence[str], tower: Tower, index: str | None
    ) -> tuple[Opened, np.ndarray, list[int | None]]:
        """Encodes N texts with the model of the named index, or of the first dense index.

        Returns the index, vectors (float32 [N, D]), and for each text the number of characters that the
        model read, None if all. Raises `KeyError` with a sentence if there is no such index or model, and
        `Busy`.
        """
        dense = {o.name: o for o in self.opened if o.kind == "dense"}
        opened = dense.get(index) if index is not None else next(iter(dense.values()), None)
        if opened is None:
            which = "no index here" if index is None else f"no index {index!r} here"
            raise KeyError(f"{which} has a model; see /healthz for the indexes")
        batcher = self.batchers[self.engines[opened.name].name, tower]
        answers = await batcher.results([Question(text, tower=tower) for text in texts])
        return opened, np.stack([a.vector for a in answers]), [a.cut_at for a in answers]

    def document(self, doc_id: str, index: str | None = None) -> tuple[Opened, Document] | None:
        """Returns a document and the first index, or the named one, that stores it; None if no index does."""
        for opened in self.opened:
            if opened.index.documents is not None and index in (None, opened.name):
                with contextlib.suppress(KeyError):
                    return opened, opened.index.documents[doc_id]
        return None

    def examples(self, count: int) -> list[str]:
        """Returns phrases from random documents; an empty list if no index stores documents."""
        for opened in self.opened:
            if opened.index.documents is not None:
                found = examples(opened.index, count, random.Random())
                return [phrase[: self.limits.query_characters] for phrase in found]
        return []

    def compiled_shapes(self) -> dict[tuple[str, str], int]:
        """Returns the number of compiled programs by engine and tower."""
        of_texts = {(e.name, t): e.compiled_shapes(t) for e in self._dense_engines() for t in e.towers}
        of_pairs = {(RERANKED, "pair"): len(self.reranker.shapes.compiled)} if self.reranker else {}
        return of_texts | of_pairs

    def texts_cut(self) -> dict[tuple[str, str], int]:
        """Returns the number of texts that a model truncated, by engine and tower."""
        return {(e.name, t): count for e in self._dense_engines() for t, count in e.texts_cut.items()}

    def _engines(self) -> list[DenseEngine | SparseEngine]:
        return list(dict.fromkeys(self.engines.values()))

    def _dense_engines(self) -> list[DenseEngine]:
        return [engine for engine in self._engines() if isinstance(engine, DenseEngine)]


def _ranking(
    system: str,
    found: dict[str, Found],
    cuts: dict[str, int | None],
    elapsed: dict[str, float],
    wanted: Sequence[str],
    k: int,
) -> Ranking:
    if system != HYBRID:
        one = found[system]
        ms = {"encode": one.encode_ms, "search": one.search_ms, "total": elapsed[system]}
        return Ranking(one.ids[:k], one.scores[:k], ms, cuts[system])
    started = time.perf_counter()
    runs = [{"q": dict(zip(found[name].ids, found[name].scores, strict=True))} for name in wanted]
    fused = reciprocal_rank_fusion(runs, depth=k)["q"]
    fuse_ms = 1000 * (time.perf_counter() - started)
    ms = {"fuse": fuse_ms, "total": fuse_ms + max(elapsed[name] for name in wanted)}
    cut_at = min((cut for name in wanted if (cut := cuts[name]) is not None), default=None)
    return Ranking(list(fused), list(fused.values()), ms, cut_at)


def _named(spec: str) -> tuple[str, str]:
    """Splits NAME=DIR into (NAME, DIR). A DIR without a name is named after its last part."""
    name, equals, directory = spec.partition("=")
    if not equals or "/" in name:
        name, directory = Path(os.path.realpath(spec)).name, spec  # Path.resolve fails on link loops
    if not name or not directory:
        raise UserError(f"--index={spec!r} lacks a {'directory' if name else 'name'}; write --index=NAME=DIR")
    return name, directory


def _searcher(
    directory: str, opened: Sequence[Opened], model: str | None, dtype: Literal["float32", "bfloat16"]
) -> Searcher:
    """Opens an index. If an index that is already open has the same model, reuses the model."""
    index = load_index(directory)
    if index.query_kind != "vectors":
        return Searcher(index)
    for other in opened:
        if other.kind == "dense" and (model is not None or other.index.info.model == index.info.model):
            encoder = other.searcher.encoder
            index.require_model(encoder.fingerprint, *encoder.made_by)
            return Searcher(index, other.searcher.encoder)
    return Searcher.open(index, model=model, dtype=dtype)


def _check_texts(opened: Sequence[Opened]) -> None:
    """Raises a UserError if a document's text is not stored: the reranker would read an empty text."""
    stored = [o for o in opened if o.index.documents is not None]
    if not stored:
        raise UserError(f"{RERANKED}: no index stores texts; build one with jaxir.index --corpus")
    without = [o for o in opened if o.index.documents is None]
    read = set().union(*(o.index.ids for o in stored)) if without else set()
    for each in without:
        lacking = [doc_id for doc_id in each.index.ids if doc_id not in read]
        if lacking:
            raise UserError(
                f"{RERANKED}: no index stores the text of {len(lacking):,} of the documents of the index"
                f" {each.name} (such as {lacking[0]!r}); build it with jaxir.index --corpus"
            )

"""Opens indexes and models, and searches them for many clients at once; knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxir.core.errors import UserError
from jaxir.data.formats.sources import Document
from jaxir.data.text.truncation import Truncation, truncation_note
from jaxir.models.quantized import Scheme
from jaxir.retrieval.encoding.any_encoder import load_served
from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder
from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder
from jaxir.retrieval.encoding.text_encoder import DualEncoder, Tower
from jaxir.runtime.cpu import Dtype, release_memory
from jaxir.serving.batcher import Batcher
from jaxir.serving.embedder import Embedder, served_name
from jaxir.serving.engines import Answer, DenseEngine, Question, SparseEngine
from jaxir.serving.examples import examples
from jaxir.serving.filters import Filter, matches
from jaxir.serving.limits import Limits
from jaxir.serving.opened import Opened, check_texts, named, searcher_of
from jaxir.serving.rankings import HYBRID, RERANKED, Ranking, filtered, ranking_of
from jaxir.serving.reranker import HybridReranker, Reranker, reranker_of
from jaxir.serving.token_engine import TokenEngine

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.any_encoder import AnyEncoder

MAX_BATCH = 64  # maximum number of texts in an engine's batch


class Service:
    """Searches indexes for many clients. Create it with `open`, then use it as an async context manager.

    Indexes of the same model share an engine. `embedders` are the models, for the endpoints that embed texts
    without an index; the first is the default. `systems` names each index, "hybrid" (all indexes fused, if
    there are several) and "reranked" (the hybrid or the only index, reranked). Keys of `batchers` are
    (engine name, tower), and ("reranked", "pair") for the reranker.
    """

    def __init__(
        self,
        opened: Sequence[Opened],
        limits: Limits,
        reranker: Reranker | None = None,
        model: AnyEncoder | HybridEncoder | None = None,
    ):
        self.opened, self.limits, self.reranker = list(opened), limits, reranker
        names = [o.name for o in self.opened]
        self.systems = [*names, HYBRID] if len(names) > 1 else names
        self._reranked_system = self.systems[-1] if names else None
        if reranker is not None and names:
            self.systems = [*self.systems, RERANKED]
        self.engines: dict[str, DenseEngine | SparseEngine] = {}
        for first in self.opened:
            if (encoder := first.searcher.encoder) is None:
                self.engines[first.name] = SparseEngine(first.name, first.searcher, k=limits.k)
            elif first.name not in self.engines:
                alike = {o.name: o.index for o in self.opened if o.searcher.encoder is encoder}
                self.engines |= dict.fromkeys(alike, DenseEngine(encoder, alike, k=limits.k))
        # The engines of a model without an index; the first answers /encode.
        self._model_engines: list[DenseEngine | TokenEngine] = []
        if model is not None:
            name = served_name(model.spec or "model")
            if not isinstance(model, DualEncoder):
                self._model_engines.append(TokenEngine(model, name=name))
            if isinstance(model, HybridEncoder):
                model, name = model.with_one_vector(), f"{name}/dense"
            if isinstance(model, DualEncoder):
                self._model_engines.append(DenseEngine(model, {}, k=limits.k, name=name))
        # An index of token vectors or weights is searched by text, so a separate engine encodes texts.
        self._token_engines: dict[str, TokenEngine] = {}
        for o in self.opened:
            if o.searcher.encoder is None and (encoder := o.searcher.any_encoder) is not None:
                self._token_engines[o.name] = TokenEngine(encoder, name=f"{o.name}/encode")
        self.embedders: list[Embedder] = []
        for engine in self._dense_engines():
            name = served_name(engine.encoder.spec or engine.name)
            taken = any(other.name == name for other in self.embedders)
            self.embedders.append(
                Embedder(f"{name}-{engine.encoder.fingerprint[:8]}" if taken else name, engine)
            )
        self.batchers: dict[tuple[str, str], Batcher] = {}
        self._stack = contextlib.AsyncExitStack()

    @classmethod
    def open(
        cls,
        indexes: Sequence[str],
        *,
        model: str | None = None,
        dtype: Dtype = "float32",
        weights: Scheme | None = None,
        limits: Limits | None = None,
        reranker: str | None = None,
        rerank_depth: int = 50,
    ) -> Service:
        """Opens indexes (DIR, or NAME=DIR) and models, and compiles what the first request needs.

        `model` encodes queries, and texts without an index; None: each index uses the model that it records.
        `weights` is how the model is quantised; None: as it was for the documents of the index. `reranker` is
        a cross-encoder or a hybrid encoder that reranks the first `rerank_depth` documents of each query.
        Without a reranker, a hybrid encoder given as `model` also reranks.
        """
        limits = limits or Limits()
        if not indexes and model is None and reranker is None:
            raise UserError("there is nothing to serve: give --index=DIR, --model=MODEL or --reranker=MODEL")
        if reranker is not None and rerank_depth > limits.k:
            raise UserError(f"--rerank_depth={rerank_depth} must be at most {limits.k}, the limit k")
        opened: list[Opened] = []
        for spec in indexes:
            name, directory = named(spec)
            if name in [HYBRID, RERANKED, *(o.name for o in opened)]:
                raise UserError(
                    f"the name {name!r} is taken: give {directory} another name by --index=NAME={directory}"
                )
            opened.append(Opened(name, searcher_of(directory, opened, model, dtype, weights)))
            first, other = opened[0], opened[-1]
            if set(first.index.ids).isdisjoint(other.index.ids):
                raise UserError(
                    f"the indexes {first.name} and {other.name} have no document in common: serve indexes of"
                    " one corpus"
                )
        encoder = None
        if model is not None and all(o.searcher.any_encoder is None for o in opened):
            encoder = load_served(model, dtype=dtype, weights=weights)
        stage = None
        if reranker is not None:
            if opened:
                check_texts(opened)
            stage = reranker_of(reranker, depth=rerank_depth)
        elif isinstance(encoder, HybridEncoder):
            stage = HybridReranker(encoder, depth=rerank_depth)
        service = cls(opened, limits, stage, encoder)
        for engine in service._engines():
            engine.prepare(MAX_BATCH)
        if stage is not None:
            stage.prepare()
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
            how = {}
            if isinstance(engine, DenseEngine):
                how = {"read": engine.read, "choose": engine.chosen, "threads": engine.threads}
            for tower in engine.towers:
                batcher = Batcher(
                    engine.answer,
                    max_batch=MAX_BATCH,
                    max_waiting=self.limits.waiting,
                    name=f"{engine.name}-{tower}",
                    **how,
                )
                self.batchers[engine.name, tower] = await self._stack.enter_async_context(batcher)
        if self.reranker is not None:
            batcher = self.reranker.new_batcher(self.limits.waiting)
            self.batchers[RERANKED, "pair"] = await self._stack.enter_async_context(batcher)
        for embedder in self.embedders:
            towers = embedder.engine.towers
            embedder.batchers = {tower: self.batchers[embedder.engine.name, tower] for tower in towers}
        self._stop = threading.Event()
        self._compiling = asyncio.create_task(asyncio.to_thread(self._compile_rest))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._compiling
        await self._stack.aclose()

    def _compile_rest(self) -> None:
        """Compiles the remaining programs, also those for new prompts, while requests are answered."""
        known = 0
        while not self._stop.is_set():
            for each in (*self._engines(), *filter(None, [self.reranker])):
                each.compile_rest(self._stop)
            if (count := sum(self.compiled_shapes().values())) > known:
                known = count
                release_memory()
            self._stop.wait(1.0)

    async def search(
        self, queries: Sequence[str], k: int, systems: Sequence[str], wanted: Filter | None = None
    ) -> list[dict[str, Ranking]]:
        """Returns, for each query, the first k documents of each of `systems` that match `wanted`.

        Raises `Busy` if too many queries are waiting.
        """
        if RERANKED in systems:
            return await self._reranked(queries, k, systems, wanted)
        started = time.perf_counter()
        names = [o.name for o in self.opened if HYBRID in systems or o.name in systems]
        engines = list(dict.fromkeys(self.engines[name] for name in names))
        elapsed: dict[str, float] = {}

        async def ask(engine: DenseEngine | SparseEngine) -> list[Answer]:
            of_engine = frozenset(name for name in names if self.engines[name] is engine)
            answers = await self._matching(engine, queries, of_engine, k, wanted)
            elapsed.update(dict.fromkeys(of_engine, 1000 * (time.perf_counter() - started)))
            return answers

        answers = await asyncio.gather(*map(ask, engines))

        def rank() -> list[dict[str, Ranking]]:
            rankings = []
            for of_query in zip(*answers, strict=True):
                found = {name: each for answer in of_query for name, each in answer.found.items()}
                cuts = {name: answer.cut_at for answer in of_query for name in answer.found}
                rankings.append({s: ranking_of(s, found, cuts, elapsed, names, k) for s in systems})
            return rankings

        return await asyncio.to_thread(rank)

    async def _matching(
        self,
        engine: DenseEngine | SparseEngine,
        queries: Sequence[str],
        names: frozenset[str],
        k: int,
        wanted: Filter | None,
    ) -> list[Answer]:
        """Returns the engine's answers with only the documents that match `wanted`.

        Searches deeper until k documents of each index match, up to the limit `filter_depth`.
        """
        batcher, depth = self.batchers[engine.name, "query"], self.limits.k
        if wanted is None:
            return await batcher.results([Question(q, names) for q in queries])
        most = min(self.limits.filter_depth, max(o.index.info.count for o in self.opened if o.name in names))
        known: dict[str, bool] = {}

        def fits(doc_id: str) -> bool:
            if doc_id not in known:
                found = self.document(doc_id)
                known[doc_id] = found is not None and matches(found[1], wanted)
            return known[doc_id]

        while True:
            answers = await batcher.results([Question(q, names, depth=depth) for q in queries])
            kept = await asyncio.to_thread(filtered, answers, fits)
            fewest = min(len(found.ids) for answer in kept for found in answer.found.values())
            if fewest >= k or depth >= most:
                return kept
            depth = min(8 * depth, max(most, self.limits.k))

    async def _reranked(
        self, queries: Sequence[str], k: int, systems: Sequence[str], wanted: Filter | None
    ) -> list[dict[str, Ranking]]:
        """Like `search`, with reranking: scores the documents of the hybrid, or of the only index, again."""
        before = self._reranked_system
        others = list(dict.fromkeys([*(s for s in systems if s != RERANKED), before]))
        found = await self.search(queries, max(k, self.reranker.depth), others, wanted)
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
    ) -> tuple[Opened | None, AnyEncoder | FixedDimensionEncoder, list[Answer]]:
        """Encodes N texts with the model of the named index, or with the first model.

        Returns the index (None without an index), its model, and an answer for each text. Raises `KeyError`
        with a sentence if there is no such index or model, and `Busy`.
        """
        engines = {name: e for name, e in self.engines.items() if isinstance(e, DenseEngine)}
        engines |= self._token_engines
        having = {o.name: o for o in self.opened if o.name in engines}
        opened = having.get(index) if index is not None else next(iter(having.values()), None)
        engine = engines[opened.name] if opened is not None else next(iter(self._model_engines), None)
        if engine is None or (opened is None and index is not None):
            which = "no index here" if index is None else f"no index {index!r} here"
            raise KeyError(f"{which} has a model; /healthz lists the indexes")
        return opened, engine.encoder, await self.of_engine(engine, texts, tower)

    async def of_engine(
        self, engine: DenseEngine | TokenEngine, texts: Sequence[str], tower: Tower
    ) -> list[Answer]:
        """Returns the engine's encoding of texts; raises `Busy`."""
        questions = [Question(text, tower=tower) for text in texts]
        return await self.batchers[engine.name, tower].results(questions)

    @property
    def token_engines(self) -> list[TokenEngine]:
        """The engines of multi-vector and sparse encoders."""
        return [engine for engine in self._engines() if isinstance(engine, TokenEngine)]

    def document(self, doc_id: str, index: str | None = None) -> tuple[Opened, Document] | None:
        """Returns a document and the first index, or the named one, that stores it; None if no index does."""
        for opened in self.opened:
            if opened.index.documents is not None and index in (None, opened.name):
                with contextlib.suppress(KeyError):
                    return opened, opened.index.documents[doc_id]
        return None

    @property
    def has_documents(self) -> bool:
        """Whether an index stores documents."""
        return any(opened.index.documents is not None for opened in self.opened)

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
        of_pairs = {(RERANKED, "pair"): self.reranker.compiled_shapes} if self.reranker else {}
        return of_texts | of_pairs

    def texts_cut(self) -> dict[tuple[str, str], int]:
        """Returns the number of texts that a model truncated, by engine and tower."""
        return {(e.name, t): count for e in self._dense_engines() for t, count in e.texts_cut.items()}

    def _engines(self) -> list[DenseEngine | SparseEngine | TokenEngine]:
        engines = dict.fromkeys([*self.engines.values(), *self._token_engines.values()])
        return [*self._model_engines, *engines]

    def _dense_engines(self) -> list[DenseEngine]:
        return [engine for engine in self._engines() if isinstance(engine, DenseEngine)]

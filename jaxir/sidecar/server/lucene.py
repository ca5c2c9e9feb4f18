"""Indexes and searches with Lucene, by Anserini's Java classes."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import java
from .protocol import Channel, identity_of

KEPT_SEARCHERS = 8  # maximum number of open searchers; a searcher is for one index and one set of parameters
MAX_CLAUSES = 1 << 20  # maximum number of distinct words per query; Lucene's default is 1,024


class Refused(Exception):
    """A request is invalid or has failed, for the reason in the message, which the user sees."""


class Lucene:
    """Answers requests: each public method takes the fields of a request, and is thread-safe."""

    def __init__(self) -> None:
        java.java_class("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(MAX_CLAUSES)
        self._class = java.java_class("java.lang.Class")
        self._json = java.java_class("com.fasterxml.jackson.databind.ObjectMapper")()
        ascii_only = java.java_class("com.fasterxml.jackson.core.JsonGenerator$Feature").ESCAPE_NON_ASCII
        self._json.configure(ascii_only, True)
        ignore = java.java_class("com.fasterxml.jackson.annotation.JsonIgnoreProperties$Value")
        fields = self._java(["lucene_document", "lucene_docid"], "java.util.HashSet")
        scored = self._class.forName("io.anserini.search.ScoredDoc")
        self._json.configOverride(scored).setIgnorals(ignore.forIgnoredProperties(fields))
        self._searchers = _Searchers()

    def search(
        self,
        index: str,
        queries: list[str],
        k: int,
        k1: float,
        b: float,
        fields: dict[str, float],
        feedback: dict[str, Any] | None,
        opened: list[int] | None,
    ) -> bytes:
        """Searches with BM25, ranked as in Pyserini; returns JSON: {index of a query: its hits}."""

        def open_searcher() -> Any:
            searcher = java.java_class("io.anserini.search.SimpleSearcher")(index)
            searcher.set_bm25(float(k1), float(b))
            if feedback is not None:
                _set_feedback(searcher, feedback)
            return searcher

        texts, numbers = self._java(queries), self._java([str(n) for n in range(len(queries))])
        with self._searchers.use(index, opened, [k1, b, feedback], open_searcher) as searcher:
            if fields:
                weights = java.java_class("java.util.HashMap")()
                for name, weight in fields.items():
                    weights.put(name, java.java_class("java.lang.Float")(float(weight)))
                hits = searcher.batch_search_fields(texts, numbers, k, _threads(), weights)
            else:
                hits = searcher.batch_search(texts, numbers, k, _threads())
            return self._json.writeValueAsString(hits).encode("ascii")

    def search_impact(
        self, index: str, queries: list[dict[str, int]], k: int, opened: list[int] | None
    ) -> bytes:
        """Like `search`, but for an impact index and sparse queries: by the inner product of weights."""
        weights, numbers = self._java(queries), self._java([str(n) for n in range(len(queries))])
        open_searcher = java.java_class("io.anserini.search.SimpleImpactSearcher")
        with self._searchers.use(index, opened, "impact", lambda: open_searcher(index)) as searcher:
            hits = searcher.batch_search(weights, numbers, k, _threads())
            return self._json.writeValueAsString(hits).encode("ascii")

    def index(self, channel: Channel, index: str, fields: list[str], impact: bool) -> bytes:
        """Indexes batches from `channel`; reports the number of documents after each, and returns it."""
        arguments = ["-input", "", "-index", index, "-collection", "JsonCollection"]
        arguments += ["-threads", str(_threads())]
        arguments += ["-fields", *fields] if fields else []
        arguments += ["-impact", "-pretokenized"] if impact else ["-storeDocvectors"]
        # Anserini's private Lucene writer is needed to detect a full disk and to limit the writer's memory.
        indexer = java.java_class("io.anserini.index.SimpleIndexer", include_private=True)(arguments)
        writer = indexer.writer
        heap = java.java_class("java.lang.Runtime").getRuntime().maxMemory() / 1e6
        writer.getConfig().setRAMBufferSizeMB(min(1024.0, heap / 4))
        count = given = 0
        try:
            while batch := channel.receive().get("documents"):
                given += len(batch)
                count += indexer.addRawDocuments(batch)
                if count < given:
                    raise Refused(f"Lucene did not index {given - count} of {given} documents{_why(writer)}")
                channel.send({"progress": count})
            writer.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                writer.rollback()
            raise
        indexer.close()
        return json.dumps(count).encode("ascii")

    def _java(self, value: list[Any], kind: str = "java.util.ArrayList") -> Any:
        """Converts a Python list to a Java collection by JSON, which is faster than a Java call per item."""
        return self._json.readValue(json.dumps(value), self._class.forName(kind))


class _Searchers:
    """A cache of recently used searchers; an evicted searcher is closed after its last request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._users: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def use(
        self, index: str, opened: list[int] | None, how: Any, open_searcher: Callable[[], Any]
    ) -> Iterator[Any]:
        """Yields the searcher of an index, from the cache if possible.

        An open searcher works even after its index was removed or replaced. `opened` is what `identity_of`
        returned when the caller opened the index, or None for the current index. `how` holds the searcher's
        parameters, which are part of the cache's key.
        """
        now = identity_of(index)
        key = json.dumps([index, opened or now, how], sort_keys=True)
        with self._lock:
            searcher = self._open.get(key)
            if searcher is None:
                if opened not in (None, now):
                    raise Refused(
                        f"{index} was replaced while it was in use; open it again (repeat the command)"
                    )
                if now is None or not list(Path(index).glob("segments_*")):
                    raise Refused(f"{index} is not a Lucene index; build it with jaxir.index")
                searcher = self._open[key] = open_searcher()
            self._open.move_to_end(key)
            self._users[id(searcher)] += 1
            dropped = [self._open.popitem(last=False)[1] for _ in range(len(self._open) - KEPT_SEARCHERS)]
            for other in dropped:
                if not self._users[id(other)]:
                    other.close()
        try:
            yield searcher
        finally:
            with self._lock:
                self._users[id(searcher)] -= 1
                if not self._users[id(searcher)] and all(searcher is not s for s in self._open.values()):
                    searcher.close()


def _set_feedback(searcher: Any, feedback: dict[str, Any]) -> None:
    settings = dict(feedback)
    method = settings.pop("method")
    if method == "rm3":
        searcher.set_rm3(
            None, settings["terms"], settings["documents"], float(settings["original_weight"]), False, True
        )
    else:
        terms, documents = settings["terms"], settings["documents"]
        weights = float(settings["alpha"]), float(settings["beta"]), 0.0
        searcher.set_rocchio(None, terms, documents, terms, documents, *weights, False, False)


def _threads() -> int:
    return os.cpu_count() or 1


def _why(writer: Any) -> str:
    error = writer.getTragicException()
    return f" ({error.getMessage()})" if error is not None else ""

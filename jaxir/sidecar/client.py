"""The client of the sidecar (the Lucene process): sends requests, and starts and restarts the process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.sidecar import child
from jaxir.sidecar.lucene_settings import PYSERINI_BM25, Bm25, Hits, LuceneDocument, Rm3, Rocchio
from jaxir.sidecar.server.protocol import Channel, Closed

BATCH_DOCUMENTS = 512  # maximum number of documents per message
BATCH_CHARACTERS = 4_000_000  # a message is sent when its documents have more characters
BATCH_QUERIES = 256  # maximum number of queries per message
ABANDON_SECONDS = 60  # maximum wait for the sidecar to stop writing an index after an error


class _Unusable(Exception):
    """Java or Lucene in the sidecar's environment does not work, for the reason in the message."""


class Sidecar:
    """A client of the Pyserini sidecar, a process that runs Lucene.

    The sidecar starts with the first request. It ends with this object or this process. Requests may come
    from several threads at once. If the sidecar ends during a request (Java crashed, or was killed for lack
    of memory), a new sidecar repeats the request once.

    Args:
      python: the path of the Python that runs the sidecar, or a function that returns this path when it is
        first needed (`environment.require`).
    """

    def __init__(self, python: Path | Callable[[], Path]):
        self._python = python
        self._lock = threading.Lock()
        self._process: child.Process | None = None
        self._finalizer: weakref.finalize | None = None

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id of the sidecar, or None if it does not run."""
        return self._process.popen.pid if self._process is not None else None

    def close(self) -> None:
        """Ends the sidecar; a later request starts a new one."""
        with self._lock:
            if self._process is not None:
                self._end()

    def ping(self) -> None:
        """Waits until the sidecar answers; does not start Java."""
        self._ask({"do": "ping"})

    def versions(self) -> dict[str, str]:
        """Returns the versions of Java and Anserini in the sidecar, as {"java": ..., "anserini": ...}."""
        return self._ask({"do": "versions"})

    def index(
        self,
        directory: str | Path,
        documents: Callable[[], Iterable[LuceneDocument]],
        *,
        fields: Sequence[str] = (),
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Builds a BM25 index (Porter stemming, Lucene's English stop words); returns its document count.

        Document vectors are stored for RM3 and Rocchio. An index in `directory` is replaced.

        Args:
          directory: the directory of the index.
          documents: a function that returns all documents each time it is called; each needs contents.
          fields: names of fields to index in addition to the contents.
          on_progress: called with the number of documents indexed so far.
        """
        return self._ask(
            {"do": "index", "index": _absolute(directory), "fields": list(fields), "impact": False},
            lambda: _batches({"id": d.id, "contents": d.contents, **d.fields} for d in documents()),
            on_progress,
        )

    def index_impact(
        self,
        directory: str | Path,
        vectors: Callable[[], Iterable[tuple[str, Mapping[str, int]]]],
        *,
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Like `index`, but builds an impact index of learned sparse vectors (such as SPLADE's).

        `vectors` returns pairs (id, {token: weight}). Weights are whole numbers above 0; tokens contain no
        white space.
        """
        return self._ask(
            {"do": "index", "index": _absolute(directory), "fields": [], "impact": True},
            # Lucene's impact is a term's frequency, so the text repeats each token `weight` times.
            lambda: _batches(
                {"id": identifier, "contents": " ".join(" ".join([t] * w) for t, w in vector.items())}
                for identifier, vector in vectors()
            ),
            on_progress,
        )

    def search(
        self,
        directory: str | Path,
        queries: Sequence[str],
        k: int,
        *,
        bm25: Bm25 = PYSERINI_BM25,
        feedback: Rm3 | Rocchio | None = None,
        fields: Mapping[str, float] | None = None,
        opened: list[int] | None = None,
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> list[Hits]:
        """Searches with BM25, ranked as in Pyserini; returns (id, score) pairs of each query, best first.

        Args:
          directory: the directory of an index built by `index` or by Pyserini.
          queries: texts, which are read as bags of words, without query syntax.
          k: the maximum number of documents per query.
          bm25: BM25's parameters.
          feedback: pseudo-relevance feedback that expands the query; None: no feedback.
          fields: the fields to search and their weights; None searches the contents.
          opened: what `identity_of` returned when the caller opened the index; a UserError is raised if the
            index was replaced since then. None searches the current index.
          on_progress: called with the number of queries answered so far.
        """
        request: dict[str, Any] = {"do": "search", "index": _absolute(directory), "k": k, "opened": opened}
        request |= dataclasses.asdict(bm25) | {"feedback": None, "fields": dict(fields or {})}
        if feedback is not None:
            request["feedback"] = {"method": type(feedback).__name__.lower(), **dataclasses.asdict(feedback)}
        return self._search(request, list(queries), on_progress)

    def search_impact(
        self,
        directory: str | Path,
        queries: Sequence[Mapping[str, int]],
        k: int,
        *,
        opened: list[int] | None = None,
    ) -> list[Hits]:
        """Like `search`, but for an impact index and sparse queries {token: weight}: by inner product."""
        request = {"do": "search_impact", "index": _absolute(directory), "k": k, "opened": opened}
        return self._search(request, [dict(q) for q in queries], lambda count: None)

    def _search(
        self, request: dict[str, Any], queries: list[Any], on_progress: Callable[[int], None]
    ) -> list[Hits]:
        hits: list[Hits] = []
        for at in range(0, len(queries), BATCH_QUERIES):
            part = queries[at : at + BATCH_QUERIES]
            found = self._ask(request | {"queries": part})
            hits += [[(h["docid"], h["score"]) for h in found[str(n)]] for n in range(len(part))]
            on_progress(len(hits))
        return hits

    def _ask(
        self,
        request: dict[str, Any],
        batches: Callable[[], Iterator[list[str]]] | None = None,
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> Any:
        for attempt in (1, 2):
            process = self._running()
            try:
                return self._converse(process, request, batches() if batches else iter(()), on_progress)
            except _Unusable as error:
                hint = child.repair_hint(self._python)
                raise UserError(f"the Pyserini sidecar cannot be used: {error}; {hint}") from None
            except Closed:
                why = self._lost(process)
                if attempt == 1:
                    print(f"the Pyserini sidecar ended ({why}); starting it again", file=sys.stderr)
        options = os.environ.get("JAVA_TOOL_OPTIONS")
        raise UserError(
            f"the Pyserini sidecar (Java) ended twice during a request ({why}); if it ran out of memory, set"
            " the environment variable JAVA_TOOL_OPTIONS=-Xmx8g or more"
            + (f" (it is set to {options!r})" if options is not None else "")
        )

    def _converse(
        self,
        process: child.Process,
        request: dict[str, Any],
        batches: Iterator[list[str]],
        on_progress: Callable[[int], None],
    ) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(process.directory / "socket"))
            except OSError as error:
                raise Closed(str(error)) from None
            with contextlib.closing(Channel(connection)) as channel:
                try:
                    channel.send(request)
                    if request["do"] == "index":
                        _feed(channel, batches, on_progress)
                except Closed:
                    _raise_last_error(channel)
                    raise
                except BaseException:
                    # Reading the documents failed, or the user interrupted. The caller will remove the
                    # directory of the index, so wait until the sidecar has stopped writing there.
                    channel.abandon(ABANDON_SECONDS)
                    raise
                return _unwrapped(channel.receive(), "result")

    def _running(self) -> child.Process:
        with self._lock:
            if self._process is None:
                if not isinstance(self._python, Path):
                    self._python = self._python()
                self._process = child.start(self._python)
                self._finalizer = weakref.finalize(self, child.end, self._process)
            return self._process

    def _lost(self, process: child.Process) -> str:
        """Ends a sidecar that does not answer, and returns why it ended."""
        with self._lock:
            if self._process is process:
                return self._end()
            return "another thread has printed the reason"

    def _end(self) -> str:
        process, self._process = self._process, None
        self._finalizer.detach()
        return child.end(process)


def _feed(channel: Channel, batches: Iterator[list[str]], on_progress: Callable[[int], None]) -> None:
    """Sends batches of documents; reads the next batch of the corpus while the sidecar indexes a batch."""
    waiting = 0
    for batch in batches:
        channel.send({"documents": batch})
        waiting += 1
        if waiting == 2:
            on_progress(_unwrapped(channel.receive(), "progress"))
            waiting = 1
    if waiting:
        on_progress(_unwrapped(channel.receive(), "progress"))
    channel.send({"documents": []})


def _raise_last_error(channel: Channel) -> None:
    """Raises the error that the sidecar sent before it closed the connection, if any."""
    with contextlib.suppress(Closed):
        while True:
            message = channel.receive()
            if "error" in message:
                _unwrapped(message, "result")


def _unwrapped(message: dict[str, Any], wanted: str) -> Any:
    if wanted in message:
        return message[wanted]
    kind, text = message["error"]["kind"], message["error"]["message"]
    if kind == "unusable":
        raise _Unusable(text)
    raise UserError(text if kind == "refused" else f"the Pyserini sidecar (Lucene) failed: {text}")


def _absolute(directory: str | Path) -> str:
    return str(Path(directory).absolute())


def _batches(records: Iterator[dict[str, str]]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for line in map(json.dumps, records):
        batch.append(line)
        size += len(line)
        if len(batch) == BATCH_DOCUMENTS or size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

"""The sidecar's client: typed requests, and a process that is started and restarted as needed."""

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

BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 4_000_000
BATCH_QUERIES = 256
ABANDON_SECONDS = 60


class _Unusable(Exception):
    """The environment of the process does not work."""


class Sidecar:
    """The Pyserini process, which starts with the first request and ends with this object or this process.

    Requests may come from several threads at once. If the process ends during a request (Java crashed, or was
    killed for lack of memory), the request is repeated once by a new process.

    Args:
      python: the Python that runs the process, or a function that returns it when first needed
        (`environment.require`).
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
        """The id of the running process, or None."""
        return self._process.popen.pid if self._process is not None else None

    def close(self) -> None:
        """Ends the process; a later request starts another."""
        with self._lock:
            if self._process is not None:
                self._end()

    def ping(self) -> None:
        """Waits until the process answers; does not start Java."""
        self._ask({"do": "ping"})

    def versions(self) -> dict[str, str]:
        """Returns the versions of "java" and "anserini"."""
        return self._ask({"do": "versions"})

    def index(
        self,
        directory: str | Path,
        documents: Callable[[], Iterable[LuceneDocument]],
        *,
        fields: Sequence[str] = (),
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Builds a BM25 index (Porter stemming, Lucene's English stop words) and returns its document count.

        Document vectors are stored for RM3 and Rocchio. An index in `directory` is replaced.

        Args:
          directory: of the index.
          documents: returns the documents, from the start at each call; each needs contents.
          fields: names of further fields to index.
          on_progress: called with the count so far.
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
        """Builds an impact index of learned sparse vectors and returns its document count; see `index`.

        `vectors` returns (id, {token: weight}) with whole weights above 0 and tokens without white space.
        """
        return self._ask(
            {"do": "index", "index": _absolute(directory), "fields": [], "impact": True},
            # Lucene's impact is a term's frequency, so each token is repeated weight times in a text.
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
        """Returns for each query its (id, score) pairs, best first, as Pyserini ranks them.

        Args:
          directory: of an index by `index`, or by Pyserini itself.
          queries: texts as bags of words; no character is special.
          k: the most documents for each query.
          bm25: the parameters.
          feedback: expands the query; None searches once.
          fields: the fields to search and their weights; None searches the contents.
          opened: the result of `identity_of` when the caller opened the index, which must still be there;
            None searches the current index.
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
        """Returns for each {token: weight} the (id, score) pairs by inner product; see `search`."""
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
            f"the Pyserini sidecar ended twice during a request ({why}); if it ran out of memory, set"
            " JAVA_TOOL_OPTIONS=-Xmx8g or more"
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
                    # An error from the documents, or an interrupt. The caller then removes the directory, so
                    # wait until the sidecar has stopped writing there.
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
        """Removes a process that does not answer, and returns why it ended."""
        with self._lock:
            if self._process is process:
                return self._end()
            return "another thread noticed it"

    def _end(self) -> str:
        process, self._process = self._process, None
        self._finalizer.detach()
        return child.end(process)


def _feed(channel: Channel, batches: Iterator[list[str]], on_progress: Callable[[int], None]) -> None:
    """Sends batches of documents; the next is read from the corpus while the sidecar indexes one."""
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
    """Raises the error that the server sent before it closed the connection, if any."""
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
    raise UserError(text if kind == "refused" else f"the Pyserini sidecar failed: {text}")


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

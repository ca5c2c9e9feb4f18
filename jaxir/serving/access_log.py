"""An account of every request: a line of the access log, and the metrics."""

from __future__ import annotations

import contextlib
import datetime
import logging
import logging.handlers
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Match

from jaxir.core.errors import UserError
from jaxir.serving.metrics import Metrics
from jaxir.storage.files import local_path
from jaxir.storage.outputs import check_named

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
LONGEST_PATH = 200
_LINE = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.+]+ ")  # how one begins


class AccessLog:
    """A line for each request: time (UTC), client, method, path, status, milliseconds.

    What stands behind a `?` in an address and what a request's body holds are questions of people, and are
    not written. A file that is moved away is begun anew, as logrotate wants it. A full disk costs the lines
    and one sentence, never an answer.

    Args:
      path: a file, which is appended to; None is standard error.

    Raises:
      UserError: the file cannot be written, or is no access log: lines would be added to what is dear to
        someone.
    """

    def __init__(self, path: str | None):
        if path is not None:
            check_named("--access_log", path)
            local_path(path, "written to")
        try:
            if path is not None and Path(path).is_file():
                with Path(path).open("rb") as file:
                    first = file.readline(1000)
                if first and not _LINE.match(first):
                    raise UserError(f"{path} is there already and is no access log: give another file")
            self._handler: logging.Handler = _Stream(sys.stderr) if path is None else _File(path)
        except OSError as error:
            raise UserError(f"cannot write the access log {path}: {error.strerror.lower()}") from None

    def write(self, client: str, method: str, path: str, status: int, seconds: float) -> None:
        """Writes a line."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = f"{now} {client} {method[:20]} {path[:LONGEST_PATH]} {status} {1000 * seconds:.1f}ms"
        self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Closes the file. That its last lines are lost on a full disk has been told."""
        with contextlib.suppress(OSError):
            self._handler.close()


class _TellsOnce(logging.Handler):
    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            print(f"the access log cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


class _Stream(_TellsOnce, logging.StreamHandler):
    pass


class _File(_TellsOnce, logging.handlers.WatchedFileHandler):
    pass


class Account:
    """Notes every request once it is answered.

    Args:
      routes: of the application; a request is counted under the path of the one that it takes.
      metrics: what counts.
      log: what writes.
    """

    def __init__(self, routes: Sequence[BaseRoute], metrics: Metrics, log: AccessLog):
        self._routes, self._metrics, self._log = routes, metrics, log

    def around(self, app: Any) -> Any:
        """Returns an ASGI application that does what `app` does, and notes it."""

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            started, status = time.perf_counter(), 500  # what uvicorn answers where nothing is sent

            async def send_noted(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                with self._metrics.in_progress.track_inprogress():
                    await app(scope, receive, send_noted)
            finally:
                seconds = time.perf_counter() - started
                method, path = scope["method"], scope["raw_path"].decode("latin-1")
                self.note(scope["client"], method, path, self._endpoint(scope), status, seconds)

        return noted

    def note(
        self,
        client: tuple[str, int] | None,
        method: str,
        path: str,
        endpoint: str,
        status: int,
        seconds: float,
    ) -> None:
        """Notes a request that was answered.

        Args:
          client: its address and port.
          method: as the client names it.
          path: as it was sent, without what stands behind a `?`.
          endpoint: a name for it, of few.
          status: of the answer.
          seconds: that it took.
        """
        self._metrics.count(endpoint, method if method in METHODS else "other", status, seconds)
        self._log.write(client[0] if client else "-", method, path, status, seconds)

    def _endpoint(self, scope: Any) -> str:
        for route in self._routes:
            if route.matches(scope)[0] != Match.NONE:
                return getattr(route, "path_format", "other")
        return "other"

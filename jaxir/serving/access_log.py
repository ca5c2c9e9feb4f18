"""Logs and counts every request."""

from __future__ import annotations

import contextlib
import datetime
import logging
import logging.handlers
import re
import sys
import time
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.serving.metrics import Metrics
from jaxir.storage.files import local_path
from jaxir.storage.outputs import check_named

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
LONGEST_PATH = 200  # maximum characters of a URL path in the log
_LINE = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.+]+ ")  # the time at the start of each line of an access log


class AccessLog:
    """A line for each request: time (UTC), client, method, path, status, milliseconds.

    Query strings and bodies are not logged, because they contain questions. The file is reopened if it is
    moved away (logrotate). A write error is reported once and never fails a request. If `path` is None,
    lines go to standard error.
    """

    def __init__(self, path: str | None):
        self._handler: logging.Handler
        if path is None:
            self._handler = logging.StreamHandler(sys.stderr)
        else:
            check_named("--access_log", path)
            try:
                if Path(path).is_file():
                    with Path(path).open("rb") as file:
                        first = file.readline(1000)
                    if first and not _LINE.match(first):
                        raise UserError(f"--access_log={path} is not an access log; give another file")
                self._handler = logging.handlers.WatchedFileHandler(local_path(path, "written to"))
            except OSError as error:
                raise UserError(f"cannot write --access_log={path}: {error.strerror.lower()}") from None
        self._has_failed = False
        self._handler.handleError = self._report

    def write(self, client: str, method: str, path: str, status: int, seconds: float) -> None:
        """Writes the line of a request that was answered in `seconds`."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = f"{now} {client} {method[:20]} {path[:LONGEST_PATH]} {status} {1000 * seconds:.1f}ms"
        self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Closes the file; lost lines have already been reported."""
        with contextlib.suppress(OSError):
            self._handler.close()

    def _report(self, _: logging.LogRecord) -> None:
        if not self._has_failed:
            self._has_failed = True
            print(f"cannot write the access log, lines are lost: {sys.exc_info()[1]}", file=sys.stderr)


class RequestLog:
    """ASGI middleware that logs and counts every request after it was answered."""

    def __init__(self, app: Any, metrics: Metrics, log: AccessLog):
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500  # uvicorn answers with status 500 if the application fails

        async def send_and_record(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with self._metrics.in_progress.track_inprogress():
                await self._app(scope, receive, send_and_record)
        finally:
            seconds, method = time.perf_counter() - started, scope["method"]
            known = method if method in METHODS else "other"
            endpoint = getattr(scope.get("route"), "path_format", "other")
            self._metrics.count(endpoint, known, status, seconds)
            path = scope["raw_path"].decode("latin-1")
            self._log.write(scope["client"][0], method, path, status, seconds)

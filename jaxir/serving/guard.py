"""What stands before the application: clients that send too much, too slowly, or from another site's page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from jaxir.serving.hosts import Hosts
from jaxir.serving.limits import Limits

DRAIN_SECONDS = 2.0
MOST_PARAMETERS = 50  # in an address; no request has more than 2, and thousands take the event loop 20 ms
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class _Refused(Exception):
    def __init__(self, status: int, detail: str):
        self.status, self.detail = status, detail


class Guard:
    """An ASGI application around another one.

    It reads a request's body whole before the application sees it, within the limits on size and time, bounds
    the time of the answer, and adds headers to every answer. A request it refuses gets one sentence.

    Args:
      app: the application.
      limits: the limits.
      connections: says how many are open.
      hosts: decides which Host headers are accepted; None accepts addresses and localhost.
    """

    def __init__(
        self,
        app: Any,
        *,
        limits: Limits,
        connections: Callable[[], int],
        hosts: Hosts | None = None,
    ):
        self._app, self._limits, self._connections, self._hosts = app, limits, connections, hosts or Hosts()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_marked(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                body = await self._body(scope, receive)
                await self._app(scope, _Replay(body, receive), send_marked)
        except _Refused as refused:
            await _refuse(refused, receive, send_marked)
        except TimeoutError:
            if started:  # uvicorn notices that the answer is not whole, and closes the connection
                return
            sentence = f"there was no answer within {self._limits.answer_seconds:g} s: the service is busy"
            await _refuse(_Refused(503, sentence), receive, send_marked)
        except asyncio.CancelledError:  # by uvicorn, which waits no longer for answers under way
            if started:
                raise
            await _refuse(_Refused(503, "the service ends"), receive, send_marked)
        except Exception:
            if not started:
                await _refuse(_Refused(500, "a fault of the service"), receive, send_marked)
            raise  # uvicorn prints it

    async def _body(self, scope: Any, receive: Any) -> bytes:
        if self._connections() > self._limits.connections:
            raise _Refused(503, f"{self._limits.connections:,} connections are open already")
        headers = dict(scope["headers"])
        refusal = self._hosts.refusal(headers.get(b"host", b"").decode("latin-1"))
        if refusal is not None:
            raise _Refused(400, refusal)
        if scope.get("query_string", b"").count(b"&") >= MOST_PARAMETERS:
            raise _Refused(400, f"the address has more than {MOST_PARAMETERS} parameters")
        too_large = _Refused(413, f"a request's body may have {self._limits.body_bytes:,} bytes")
        length = headers.get(b"content-length", b"0")
        if len(length) > 18 or int(length) > self._limits.body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Refused(400, "the client left before its request was whole")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._limits.body_bytes:
                        raise too_large
        except TimeoutError:
            limit = f"{self._limits.body_seconds:g} s"
            raise _Refused(408, f"the request's body did not arrive within {limit}") from None
        return bytes(body)


class _Replay:
    """Gives the body that has been read, then what else the connection says."""

    def __init__(self, body: bytes, receive: Any):
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _refuse(refused: _Refused, receive: Any, send: Any) -> None:
    """Answers and closes the connection, after a while in which the client may end what it is sending.

    A client that is cut off while it sends may never read the answer.
    """
    body = json.dumps({"detail": refused.detail}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refused.status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if refused.status == 413:
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                more = True
                while more:
                    message = await receive()
                    more = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})

"""ASGI middleware that checks the Host header, the API key, the size of a body and the time of an answer."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.responses import JSONResponse

from jaxir.core.errors import UserError
from jaxir.serving.limits import Limits
from jaxir.serving.problems import problem_body

PROBE = "/health"  # answered even under too many requests, so that a busy server is not restarted
# Paths that can be read without an API key: the probe, and pages without data. The page asks for a key.
OPEN_PATHS = (PROBE, "/", "/docs")
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class _Refused(Exception):
    def __init__(self, status: int, detail: str, **headers: str):
        self.status, self.detail, self.headers = status, detail, headers


class Guard:
    """Limits concurrent requests, the size of a body and the time of an answer, and adds headers.

    It reads the complete body before it calls the application. A refused request is answered with one
    sentence. `hosts` decides which Host headers are accepted; None accepts IP addresses and localhost. If
    there are API `keys`, every path but `OPEN_PATHS` needs one of them.
    """

    def __init__(self, app: Any, *, limits: Limits, hosts: Hosts | None = None, keys: Sequence[str] = ()):
        self._app, self._limits, self._hosts = app, limits, hosts or Hosts()
        self._keys = [_digest(key.encode()) for key in keys]
        self._under_way: collections.Counter[tuple[str, int]] = collections.Counter()  # requests by client
        self._held_bytes = 0  # bytes of the bodies of all requests under way

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False
        body: bytes | None = None

        async def send_with_headers(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        async def refuse(status: int, detail: str, **headers: str) -> None:
            headers |= {"retry-after": "1"} if status in (429, 503) else {}
            content = problem_body(scope["path"], status, detail)
            await JSONResponse(content, status, headers)(scope, receive, send_with_headers)

        key = self._key_of(scope)
        client = ((scope.get("client") or ("",))[0], key)
        self._under_way[client] += 1
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                self._check(scope, client)
                body = await self._body(receive)
                # The application knows only GET. uvicorn drops the body of the answer if the request was
                # HEAD.
                shown = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
                await self._app(shown, _replaying(body, receive), send_with_headers)
        except _Refused as refused:
            await refuse(refused.status, refused.detail, **refused.headers)
        except TimeoutError:
            seconds = f"{self._limits.answer_seconds:g} s"
            if body is None:
                await refuse(408, f"the request's body did not arrive within {seconds}; send it again")
            elif not started:  # if the answer has started, uvicorn closes the connection instead
                await refuse(503, f"there was no answer within {seconds}: the service is busy")
        except asyncio.CancelledError:  # uvicorn cancels requests at shutdown
            if started:
                raise
            await refuse(503, "the service is shutting down")
        finally:
            self._held_bytes -= len(body or b"")
            self._under_way[client] -= 1
            if not self._under_way[client]:
                del self._under_way[client]

    def _key_of(self, scope: Any) -> int:
        """Returns the position of a request's API key among the known keys, or -1."""
        sent = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = sent.partition(b" ")
        digest = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        # Compares all keys, so that the time does not depend on which one matches, or where.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return matches.index(True) if True in matches else -1

    def _check(self, scope: Any, client: tuple[str, int]) -> None:
        limits, is_probe = self._limits, scope["path"] == PROBE
        if self._under_way.total() > limits.requests and not is_probe:
            raise _Refused(503, f"busy: {limits.requests:,} requests are already in progress")
        header = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if (refusal := self._hosts.refusal(header)) is not None:
            raise _Refused(400, refusal)
        is_open = scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN_PATHS
        if self._keys and client[1] < 0 and not is_open:
            sentence = "this service needs an API key: send the header Authorization: Bearer KEY"
            raise _Refused(401, sentence, **{"www-authenticate": "Bearer"})
        most = limits.client_requests
        if most is not None and self._under_way[client] > most and not is_probe:
            raise _Refused(429, f"this client already has {most:,} requests in progress")

    async def _body(self, receive: Any) -> bytes:
        """Returns the complete body. A body that is too large is also read to its end, because a client
        reads the answer only after it has sent the body.
        """
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Refused(400, "the client disconnected before its request was complete")
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= self._limits.body_bytes:
                body += part
        if size > self._limits.body_bytes:
            raise _Refused(413, f"a request's body may have at most {self._limits.body_bytes:,} bytes")
        if self._held_bytes + size > self._limits.held_bytes:
            raise _Refused(503, "busy: the bodies of other requests fill the memory that they may take")
        self._held_bytes += size
        return bytes(body)


def _digest(key: bytes) -> bytes:
    """Returns a hash of a key, so that a comparison does not depend on the key's length."""
    return hashlib.sha256(key).digest()


def _replaying(body: bytes, receive: Any) -> Any:
    """Returns an ASGI `receive` function that first returns `body`, then calls the given `receive`."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(messages, None) or await receive()

    return replay


class Hosts:
    """Decides whether a request's Host header names this service.

    IP addresses, `localhost`, `listening` and requests without the header are accepted. Other names must
    be in `allowed`; `*.DOMAIN` accepts all names below a domain, `*` every name. This prevents DNS
    rebinding, where another site's page resolves its own name to this service and browsers send that name.
    """

    def __init__(self, allowed: Iterable[str] = (), listening: str = "localhost"):
        self._names = {"localhost", listening.lower(), *map(_checked, allowed)}

    def refusal(self, header: str) -> str | None:
        """Returns why a Host header NAME or NAME:PORT is refused; None if it is accepted."""
        name = re.sub(r":\d*$", "", header.strip().lower()).removesuffix(".")
        if not name or _is_address(name):
            return None
        parents = name.split(".")[1:]
        above = {f"*.{'.'.join(parents[i:])}" for i in range(len(parents))}
        if self._names & {"*", name, *above}:
            return None
        flag = f"--allowed_hosts={name}" if _NAME.fullmatch(name) else "--allowed_hosts"
        return (
            f"this service does not accept the name {name!r:.80}: start it with {flag}, or use its IP address"
        )


def _checked(entry: str) -> str:
    if entry == "*":
        return entry
    star, domain = ("*.", entry[2:]) if entry.startswith("*.") else ("", entry)
    try:
        name = domain.lower().removesuffix(".").encode("idna").decode()  # the form that browsers send
    except UnicodeError:
        name = ""
    if not _NAME.fullmatch(name) and not _is_address(name) and not _is_address(f"[{name}]"):
        raise UserError(
            f"--allowed_hosts={entry!r}: give host names without scheme, port and path, such as"
            " search.example.org, *.example.org for all names below it, or * for every name"
        )
    return star + name


def _is_address(name: str) -> bool:
    """Returns whether a host is an IPv4 address, or an IPv6 address in brackets."""
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return (ipaddress.ip_address(bare).version == 6) == (bare != name)
    except ValueError:
        return False

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxir.core.errors import UserError
from jaxir.serving.guard import Guard, Hosts
from jaxir.serving.limits import Limits


def answered(app: Callable, limits: Limits, *, is_silent: bool = False) -> tuple[int, str]:
    """Returns status and detail of an answer; a silent client never sends its body."""
    sent: list[Any] = []

    async def receive() -> Any:
        if is_silent:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/search", "headers": []}
    asyncio.run(Guard(app, limits=limits)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["detail"]


async def never(*_: object) -> None:
    await asyncio.Event().wait()


def test_slow_clients_and_slow_answers_time_out():
    limits = Limits(answer_seconds=0.2)
    status, detail = answered(never, limits, is_silent=True)
    assert (status, detail) == (408, "the request's body did not arrive within 0.2 s; send it again")
    assert answered(never, limits) == (503, "there was no answer within 0.2 s: the service is busy")


def test_a_busy_server_answers_probes():
    """If a liveness probe fails, Kubernetes restarts the pod, which ends all its requests."""
    answered: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/health":
            await never()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answered.append(message.get("status"))

    async def ask(guard: Guard) -> None:
        def request(path: str) -> Awaitable[None]:
            scope = {"type": "http", "method": "GET", "path": path, "headers": []}
            return guard(scope, receive, send)

        first = asyncio.create_task(request("/"))
        await asyncio.sleep(0)
        await request("/health")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    for limits in (Limits(requests=1), Limits(client_requests=1)):
        answered.clear()
        asyncio.run(ask(Guard(app, limits=limits)))
        assert answered[0] == 200, limits


def test_too_many_concurrent_requests_are_refused():
    refused: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        refused.append(message)

    async def two(guard: Guard) -> None:
        def request() -> Awaitable[None]:
            return guard({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)

        first = asyncio.create_task(request())
        await asyncio.sleep(0)
        await request()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(two(Guard(never, limits=Limits(requests=1))))
    details = [json.loads(m["body"])["detail"] for m in refused if m["type"] == "http.response.body"]
    assert details == ["busy: 1 requests are already in progress", "the service is shutting down"]
    assert [m["status"] for m in refused if "status" in m] == [503, 503]
    assert (b"retry-after", b"1") in refused[0]["headers"]


# Kubernetes probes send the pod's address; HTTP/1.0, which no browser speaks, sends no header.
ACCEPTED = ["localhost:8080", "LOCALHOST.", "10.244.1.7:8080", "[fd00::7]:8080", "", "jaxir:8080"]
ACCEPTED += ["Search.Example.ORG", "xn--bcher-kva.example", "a.b.example.net"]
REFUSED = ["example.net", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example"]
REFUSED += ["[evil]", "fd00::7"]


@pytest.mark.parametrize("header", [*ACCEPTED, *REFUSED])
def test_only_addresses_and_listed_names_are_accepted(header):
    is_accepted = header in ACCEPTED
    listed = ["jaxir", "search.example.org", "bücher.example", "*.example.net", "10.0.0.1", "::1"]
    assert (Hosts(listed, "0.0.0.0").refusal(header) is None) == is_accepted
    assert Hosts(["*"]).refusal(header) is None
    if not is_accepted:
        assert "--allowed_hosts" in Hosts().refusal(header)


def test_allowed_hosts_takes_names_and_host_is_allowed():
    assert Hosts([], "search.lan").refusal("search.lan:80") is None
    for entry in ("http://a.example", "a.example:80", "", "*.", "*example"):
        with pytest.raises(UserError, match=re.escape(f"--allowed_hosts={entry!r}: give host names")):
            Hosts([entry])


def test_one_client_may_not_take_all_requests():
    """A second client is answered while the first has as many requests as it may have."""
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    async def three(guard: Guard) -> None:
        def request(client: str) -> Awaitable[None]:
            scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": (client, 1)}
            return guard(scope, receive, send)

        first = asyncio.create_task(request("10.0.0.1"))
        await asyncio.sleep(0)
        await request("10.0.0.1")
        other = asyncio.create_task(request("10.0.0.2"))
        await asyncio.sleep(0.01)
        assert statuses == [429] and not other.done()
        first.cancel()
        other.cancel()
        await asyncio.gather(first, other, return_exceptions=True)

    guard = Guard(never, limits=Limits(client_requests=1))
    asyncio.run(three(guard))
    assert not guard._under_way and guard._held_bytes == 0


def test_bodies_of_all_requests_share_a_limit():
    limits = Limits(body_bytes=1, held_bytes=1)
    status, detail = answered(never, limits)
    assert (status, detail) == (413, "a request's body may have at most 1 bytes")
    with pytest.raises(UserError, match="held_bytes is 1, but one body may have 2 bytes"):
        Limits(body_bytes=2, held_bytes=1)

"""The guard: Host headers, sizes and times."""

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
    assert answered(never, limits, is_silent=True) == (
        408,
        "the request's body did not arrive within 0.2 s; send it again",
    )
    assert answered(never, limits) == (503, "there was no answer within 0.2 s: the service is busy")


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


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [
        ("localhost:8080", True),
        ("LOCALHOST.", True),
        ("10.244.1.7:8080", True),  # a Kubernetes probe: the pod's address
        ("[fd00::7]:8080", True),
        ("", True),  # HTTP/1.0 without the header: no browser sends it
        ("jaxir:8080", True),
        ("Search.Example.ORG", True),
        ("xn--bcher-kva.example", True),
        ("a.b.example.net", True),
        ("example.net", False),
        ("evil.example:80", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[evil]", False),
        ("fd00::7", False),
    ],
)
def test_only_addresses_and_listed_names_are_accepted(header, is_accepted):
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

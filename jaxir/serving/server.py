"""The process: a socket, uvicorn on it, and an end in good order."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxir.core.errors import UserError
from jaxir.serving.access_log import Account
from jaxir.serving.guard import Guard
from jaxir.serving.hosts import Hosts
from jaxir.serving.limits import Limits

KEEP_ALIVE_SECONDS = 75
END_SECONDS = 15  # for answers under way when the process is told to end


def listen(host: str, port: int) -> socket.socket:
    """Takes an address, so that nobody loads a model for one that cannot be had. Port 0 takes a free one.

    Raises:
      UserError: it is in use, may not be taken, or does not belong to this machine.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # of two sockets that are only bound so neither is refused
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # of names that cannot be a host's
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot serve on {host}, port {port}: {reason.lower()} (--host, --port)") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the address that a browser takes."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def run(
    app: Any,
    listener: socket.socket,
    limits: Limits,
    account: Account,
    hosts: Hosts,
    on_ready: Callable[[], None],
) -> None:
    """Serves `app` until SIGTERM or SIGINT, then ends what is under way and returns.

    Args:
      app: the ASGI application.
      listener: from `listen`.
      limits: what clients may do.
      account: what notes every request.
      hosts: decides which Host headers are accepted.
      on_ready: called when the first client may come.
    """
    guard = Guard(app, limits=limits, hosts=hosts, connections=lambda: len(server.server_state.connections))
    config = uvicorn.Config(
        account.around(guard),
        http=_protocol(limits, account),
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="error",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=END_SECONDS,
    )
    server = _Server(config, on_ready)
    # Having ended in good order, uvicorn raises the signal again for whoever handled it before.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]):
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def _protocol(limits: Limits, account: Account) -> type[H11Protocol]:
    """Returns uvicorn's protocol with bounds on how slowly a client may send a head and read an answer.

    What is no HTTP is answered and noted as every other bad request.
    """

    class Protocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; the kernel holds what is sent and not read
                milliseconds = max(1, int(1000 * limits.read_seconds))
                connection = transport.get_extra_info("socket")
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def send_400_response(self, msg: str) -> None:
            body = json.dumps({"detail": "this is no HTTP request"}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
            self.transport.close()
            account.note(self.client, "-", "-", "other", 400, 0.0)

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.head_seconds, self.timeout_keep_alive_handler)

        def _stop(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Protocol

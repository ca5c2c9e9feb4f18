"""The server process: a socket, uvicorn, and an orderly shutdown."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from jaxir.core.errors import UserError

KEEP_ALIVE_SECONDS = 75  # an idle connection is closed after this time
END_SECONDS = 15  # at shutdown, answers in progress may take this time


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address. Port 0 picks a free port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # without this a second process could bind the address too
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot serve on --host={host} --port={port}: {reason.lower()}; change one"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Returns whether only this machine can reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def run(app: Any, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves an ASGI app until SIGTERM or SIGINT, then finishes requests; calls `on_ready` once ready."""
    config = uvicorn.Config(
        app,
        http="h11",  # h11 limits the size of a request's headers
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
    # After an orderly shutdown uvicorn raises SIGTERM again. This handler, which was set before, receives it.
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

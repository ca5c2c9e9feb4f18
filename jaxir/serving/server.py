"""The process: a socket, uvicorn on it, and an end in good order."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from jaxir.core.errors import UserError

KEEP_ALIVE_SECONDS = 75
END_SECONDS = 15  # for answers under way when the process is told to end


def listen(host: str, port: int) -> socket.socket:
    """Takes an address, so that nobody loads a model for one that cannot be had. Port 0 takes a free one.

    Raises:
      UserError: it is in use, may not be taken, or does not belong to this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # a second process can bind an address that nobody listens to
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


def run(app: Any, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves `app` until SIGTERM or SIGINT, then ends what is under way and returns.

    Args:
      app: the ASGI application.
      listener: from `listen`.
      on_ready: called when the first client may come.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # bounds the size of a request's head
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

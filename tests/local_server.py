"""An HTTP server on this machine, for the duration of a test."""

import contextlib
import http.server
import sys
import threading
from collections.abc import Iterator


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet a response; otherwise it waits 40 ms until its headers are acknowledged


class Server(http.server.ThreadingHTTPServer):
    """Ignores clients that close their connection early."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serve(handler: type[Handler]) -> Iterator[str]:
    """Serves with `handler` on a free port; yields the address."""
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""The Host header: which names the service answers to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from jaxir.core.errors import UserError

_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
LONGEST_SHOWN = 80  # characters of a client's Host header that an answer repeats


class Hosts:
    """Decides whether a request's Host header names this service, whatever address it listens to.

    IP addresses, `localhost` and requests without a Host header are always accepted. Other names must be
    listed. A page of another site can let its own name resolve to this service's address (DNS rebinding), and
    the browser then sends that name. No site has an IP address of another machine as its name.

    Args:
      allowed: names; `*.DOMAIN` accepts every name below a domain, and `*` every name.
      listening: the value of `--host`; a name there is accepted.

    Raises:
      UserError: an entry of `allowed` is no name of a host.
    """

    def __init__(self, allowed: Iterable[str] = (), listening: str = "localhost"):
        self._names = {"localhost", listening.lower(), *map(_checked, allowed)}

    def refusal(self, header: str) -> str | None:
        """Returns the sentence that refuses a Host header, NAME or NAME:PORT; None if it is accepted."""
        name = _without_port(header.strip().lower()).removesuffix(".")
        if not name or "*" in self._names or name in self._names or _is_address(name):
            return None
        parents = name.split(".")[1:]
        if any(f"*.{'.'.join(parents[i:])}" in self._names for i in range(len(parents))):
            return None
        shown = name[:LONGEST_SHOWN]
        flag = f"--allowed_hosts={shown}" if shown == name and _NAME.fullmatch(name) else "--allowed_hosts"
        return f"this service is not called {shown!r}: start it with {flag}, or use its IP address"


def _checked(entry: str) -> str:
    if entry == "*":
        return entry
    star, domain = ("*.", entry[2:]) if entry.startswith("*.") else ("", entry)
    try:
        name = domain.lower().removesuffix(".").encode("idna").decode()  # as browsers send it
    except UnicodeError:
        name = ""
    if not _NAME.fullmatch(name) and not _is_address(name) and not _is_address(f"[{name}]"):
        raise UserError(
            f"--allowed_hosts has {entry!r}: give names of hosts without scheme, port and path, such as"
            " search.example.org, *.example.org for all names below it, or * for every name"
        )
    return star + name


def _is_address(name: str) -> bool:
    """Whether a host is an IPv4 address, or an IPv6 address in brackets."""
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return (ipaddress.ip_address(bare).version == 6) == (bare != name)
    except ValueError:
        return False


def _without_port(host: str) -> str:
    """Removes the port of NAME:PORT or [ADDRESS]:PORT."""
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) else host

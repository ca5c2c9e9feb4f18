"""The command `python -m jaxir.index`: vectors or texts in, a searchable index out."""

from __future__ import annotations

from typing import Literal

from jaxir import cli
from jaxir.errors import UserError


def index(
    output: str,
    embeddings: str | None = None,
    backend: Literal["scann", "exact", "lucene"] = "scann",
    corpus: str | None = None,
    model: str | None = None,
    storage: Literal["float32", "bfloat16", "int8"] | None = None,
    target_recall: float | None = None,
    queries: str | None = None,
    fields: Literal["flat", "multifield"] | None = None,
    on_bad_input: Literal["stop", "skip"] = "stop",
) -> None:
    """Build an index over encoded passages, or over the words of a corpus.

    scann and exact take --embeddings; lucene takes --corpus and no model (BM25, in a process of its own that
    is installed on first use).

    Args:
      output: the index directory.
      embeddings: what jaxir.encode wrote.
      backend: scann (approximate, fast, exact up to some thousands of passages), exact, or lucene (BM25).
      corpus: the corpus; its titles and texts are stored, for jaxir.search to show. With --embeddings, the
        one that was encoded.
      model: the model that jaxir.search should load for queries (default: the one that encoded the
        passages).
      storage: for scann, of the vectors that decide the order of answers (default: float32); a smaller one
        costs recall, which is measured and told.
      target_recall: for scann, search no further than this recall@10 needs, tuned and measured against exact
        search; without it 200 candidates of an eighth of the leaves are compared.
      queries: queries.jsonl[.gz] for --target_recall, half to tune on and half to measure on (default:
        passages are taken for queries).
      fields: for lucene, whether title and text are one field (flat, the default) or two of equal weight.
      on_bad_input: for lucene, stop at the first malformed line of --corpus, or skip and count them.
    """
    scann_only = {"storage": storage, "target_recall": target_recall, "queries": queries}
    if backend != "scann" and (
        given := [f"--{name}" for name, value in scann_only.items() if value is not None]
    ):
        raise UserError(f"{' and '.join(given)}: for --backend=scann only")
    if queries is not None and target_recall is None:
        raise UserError("--queries are what --target_recall is tuned on")
    recall = None
    if backend == "lucene":
        from jaxir.retrieval.lucene import build_lucene_index

        if embeddings is not None or model is not None:
            raise UserError("--backend=lucene indexes words: it takes --corpus, not --embeddings or --model")
        if corpus is None:
            raise UserError("--backend=lucene needs --corpus")
        built = build_lucene_index(corpus, output, fields=fields or "flat", on_bad_input=on_bad_input)
    else:
        from jaxir.retrieval.embeddings import open_embeddings
        from jaxir.retrieval.index import build_index

        if embeddings is None:
            raise UserError(f"--backend={backend} needs --embeddings")
        if fields is not None:
            raise UserError("--fields is for --backend=lucene")
        stored = open_embeddings(embeddings)
        if storage is not None or target_recall is not None:
            from jaxir.retrieval.tuning import build_tuned

            built, recall = build_tuned(
                stored, storage=storage or "float32", target=target_recall, queries=queries, model=model
            )
        else:
            built = build_index(stored, backend=backend, model=model)
        built.save(output, corpus=corpus)
    print(f"{output}: {backend} index of {built.info.count:,} passages" + (f"; {recall}" if recall else ""))


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.index:index",
            example="python -m jaxir.index --embeddings=embeddings --corpus=corpus.jsonl --output=index",
        )
    )

"""Command: searches an index."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

from jaxir import cli
from jaxir.core.choices import check_idle
from jaxir.core.errors import UserError
from jaxir.core.values import Count, NotNegative, Share
from jaxir.storage.outputs import alone, writes

if TYPE_CHECKING:
    from jaxir.retrieval.indexes.base_index import Index
    from jaxir.retrieval.searcher import Searcher, WeightsSearcher


@writes(output="shared run file")
def search(
    index: str,
    model: str | None = None,
    query: str | None = None,
    queries: str | None = None,
    output: str | None = None,
    k: Count | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "float32",
    weights: Literal["int8", "nf4"] | None = None,
    on_bad_input: Literal["stop", "skip"] = "stop",
    k1: NotNegative | None = None,
    b: Share | None = None,
    feedback: Literal["rm3", "rocchio"] | None = None,
) -> None:
    """Searches an index: for a file of queries, one question, or questions on standard input.

    Without --query and --queries each line of standard input is a question. For an index of --vectors without
    a model, queries are token weights: {"token": 12, ...} instead of a question, "vector" instead of "text"
    in --queries. Several machines can search an exact index, or an index in parts, together: start the same
    command with --queries once on each. TPU pods are detected; other machines need JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID. Process 0 writes the run (docs/indexes.md).

    Args:
      index: the index directory.
      model: the model that encodes queries (default: the one recorded in the index; BM25 indexes need
        none).
      query: one question.
      queries: queries.jsonl[.gz] (_id, text; for an index of --vectors _id, vector); needs --output.
        Documents in a query's excluded_ids (a list, optional) are left out of its results.
      output: the run file to write for --queries.
      k: documents retrieved per query (default: 100 with --queries, else 5).
      dtype: type of the model's matrix products; auto: bfloat16 on a CPU that multiplies it natively.
      weights: keep the model's weights in int8 or nf4 (default: as for the index's documents).
      on_bad_input: stop at the first malformed line of --queries, or skip and count them.
      k1: for a lucene index, BM25's k1: how much repeated words raise a score (default: 0.9).
      b: for a lucene index, BM25's b: how much a document's length lowers its score, 0 to 1 (default: 0.4).
      feedback: for a lucene index, expand queries by words of the first 10 documents that are found.
    """
    from jaxir.data.formats.lines import has_text
    from jaxir.retrieval.console import answer, converse
    from jaxir.retrieval.indexes.base_index import load_index
    from jaxir.runtime import distributed
    from jaxir.runtime.partitioning import MeshConfig

    if (queries is None) != (output is None):
        raise UserError("give --queries and --output together: the output is the run file of the queries")
    if queries is not None and query is not None:
        raise UserError("give --query or --queries, not both")
    if query is not None and not has_text(query):
        raise UserError("--query is empty")
    if queries is None:
        check_idle(search, "--queries", on_bad_input=on_bad_input)
    k = k if k is not None else 100 if queries is not None else 5
    loaded = load_index(index)
    if loaded.query_kind not in ("vectors", "sparse", "token_vectors"):
        check_idle(search, "an index with a model", dtype=dtype, weights=weights)
    if (k1, b, feedback) != (None, None, None):
        loaded = _ranked(loaded, k1, b, feedback)
    opening = {"model": model, "dtype": dtype, "weights": weights}
    if loaded.engine in ("exact", "parts") and (processes := _processes())[1] > 1:
        with distributed.together():
            if queries is None:
                raise UserError(
                    "several processes only search a file of queries: give --queries and --output"
                )
            everywhere = loaded.shared() if loaded.engine == "parts" else loaded.on(MeshConfig().build())
            first = processes[0] == 0
            with alone(output) if first else contextlib.nullcontext():
                _search_file(everywhere, queries, on_bad_input, k, output, writes=first, **opening)
    elif queries is not None:
        with alone(output):
            _search_file(loaded, queries, on_bad_input, k, output, **opening)
    elif query is not None:
        print(answer(_searcher(loaded, **opening), query, k))
    else:
        converse(_searcher(loaded, **opening), k)


def _searcher(index: Index, *, model: str | None, **opening: Any) -> Searcher | WeightsSearcher:
    from jaxir.retrieval.searcher import Searcher, WeightsSearcher

    if index.query_kind != "weights":
        return Searcher.open(index, model=model, **opening)
    if model is not None:
        raise UserError("an impact index is searched with token weights: leave out --model")
    return WeightsSearcher(index)


def _processes() -> tuple[int, int]:
    """Connects the processes that run this command; returns this process's number and their count."""
    import jax

    from jaxir.runtime import distributed

    distributed.maybe_initialize_distributed()
    return jax.process_index(), jax.process_count()


def _search_file(
    index: Index,
    queries: str,
    on_bad_input: Literal["stop", "skip"],
    k: Count,
    output: str,
    *,
    writes: bool = True,
    **opening: Any,
) -> None:
    """Searches for a file of queries; `writes` is True only in the process that writes the run."""
    from jaxir.data.formats.sources import read_excluded, read_queries
    from jaxir.data.formats.sparse_vectors import read_sparse_vectors
    from jaxir.retrieval.ranking.exclusions import most_excluded, without_excluded
    from jaxir.retrieval.ranking.runs import write_run
    from jaxir.retrieval.searcher import WeightsSearcher

    searcher = _searcher(index, **opening)
    if isinstance(searcher, WeightsSearcher):
        asked, excluded = list(read_sparse_vectors(queries, on_bad_input)), {}
        scores, ids = index.search([q.weights for q in asked], k)
    else:
        asked = list(read_queries(queries, on_bad_input))
        excluded = read_excluded(queries)
        wanted = k + most_excluded(excluded)
        scores, ids = searcher.search([q.text for q in asked], wanted, show_progress=True)
    if writes:
        run = {q.id: dict(zip(ids[i], scores[i], strict=False)) for i, q in enumerate(asked)}
        run = without_excluded(run, excluded, k)
        write_run(output, run)
        print(f"{output}: {len(run):,} queries, {sum(map(len, run.values())):,} answers")


def _ranked(
    index: Index, k1: float | None, b: float | None, feedback: Literal["rm3", "rocchio"] | None
) -> Index:
    """Returns the lucene index with the ranking that --k1, --b and --feedback choose."""
    from jaxir.retrieval.indexes.lucene_index import LuceneIndex
    from jaxir.sidecar.lucene_settings import Bm25, Rm3, Rocchio

    if index.engine == "bm25s" and feedback is not None:
        raise UserError("--feedback needs a lucene index: build one with jaxir.index --backend=lucene")
    if index.engine == "bm25s":
        now = index.info.settings
        raise UserError(
            f"a bm25s index keeps the k1 ({now['k1']}) and b ({now['b']}) that it was built with: build one"
            f" with jaxir.index --corpus=CORPUS --k1={now['k1'] if k1 is None else k1}"
            f" --b={now['b'] if b is None else b}"
        )
    if not isinstance(index, LuceneIndex):
        engine = index.info.engine
        raise UserError(
            f"--k1, --b and --feedback only apply to a lucene index, not to {engine}: leave them out"
        )
    given = {name: value for name, value in (("k1", k1), ("b", b)) if value is not None}
    methods = {"rm3": Rm3(), "rocchio": Rocchio(), None: None}
    return index.ranked_by(Bm25(**given), methods[feedback])


if __name__ == "__main__":
    cli.start("jaxir.search:search", '--index=index --query="how do I join two arrays?"')

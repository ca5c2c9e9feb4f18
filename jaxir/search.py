"""The command `python -m jaxir.search`: questions in, documents out."""

from __future__ import annotations

from typing import Literal

from jaxir import cli
from jaxir.errors import UserError


def search(
    index: str,
    model: str | None = None,
    query: str | None = None,
    queries: str | None = None,
    output: str | None = None,
    k: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    on_bad_input: Literal["stop", "skip"] = "stop",
) -> None:
    """Search an index: a file of queries into a TREC run, one question, or questions typed at it.

    Without --query and --queries each line of standard input is a question.

    Args:
      index: the index directory.
      model: the model that encodes queries (default: the one recorded in the index).
      query: one question.
      queries: queries.jsonl[.gz] (_id, text); needs --output.
      output: the run file of --queries.
      k: how many documents for each query (default: 100 with --queries, else 5).
      dtype: type of the model's matrix products.
      on_bad_input: stop at the first malformed line of --queries, or skip and count them.
    """
    from jaxir.data.sources import read_queries
    from jaxir.retrieval.console import answer, converse
    from jaxir.retrieval.dual_encoder import DualEncoder
    from jaxir.retrieval.index import load_index
    from jaxir.retrieval.runs import write_run

    if (queries is None) != (output is None):
        raise UserError("--queries and --output go together: a file of queries gives a run file")
    if queries is not None and query is not None:
        raise UserError("give --query or --queries, not both")
    k = k if k is not None else 100 if queries is not None else 5
    if k < 1:
        raise UserError(f"--k must be at least 1, not {k}")
    asked = list(read_queries(queries, on_bad_input)) if queries is not None else []
    loaded = load_index(index)
    model = model or loaded.info.model
    if model is None:
        raise UserError(f"{index} does not say which model made it: give --model")
    encoder = DualEncoder.load(model, dtype=dtype)
    loaded.require_model(encoder.fingerprint, model)
    if queries is not None:
        scores, ids = loaded.search(encoder.encode_queries([q.text for q in asked]), k)
        run = {q.id: list(zip(ids[i], scores[i], strict=False)) for i, q in enumerate(asked)}
        write_run(output, run)
        print(f"{output}: {len(run):,} queries, {sum(map(len, ids)):,} answers")
    elif query is not None:
        print(answer(loaded, encoder, query, k))
    else:
        converse(loaded, encoder, k)


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.search:search",
            example='python -m jaxir.search --index=index --query="how do I join two arrays?"',
        )
    )

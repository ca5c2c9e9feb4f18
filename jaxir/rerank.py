"""Command: reranks a run with a cross-encoder, a multi-vector encoder or a hybrid encoder."""

from __future__ import annotations

from typing import Literal

from jaxir import cli
from jaxir.core.choices import Rules
from jaxir.core.errors import UserError
from jaxir.core.values import Count
from jaxir.storage.outputs import writes


@Rules(also_called={"depth": "k"})
@writes(output="run file")
def rerank(
    *,
    model: str,
    run: str,
    dataset: str,
    output: str,
    depth: Count = 100,
    keep_rest: bool = False,
    weights: Literal["int8", "nf4"] | None = None,
) -> None:
    """Reranks the best documents of each query of a run with a model.

    Writes a run with a cross-encoder's scores (logits), a multi-vector encoder's (MaxSim), or a hybrid
    encoder's (the sum of its heads' scores: 1 dense + 0.3 sparse + 1 MaxSim). Documents below rank --depth
    are left out, or follow in the run's order with --keep_rest.

    Args:
      model: the reranker: a jaxir run or model directory, or hf: or st: and a directory or hub name.
      run: TREC run file, of any retriever.
      dataset: beir:DIR, with queries and documents.
      output: the run file to write.
      depth: documents reranked per query.
      keep_rest: append the documents below rank --depth, with scores that decrease by one.
      weights: keep the cross-encoder's weights in int8, or in 4 bits (nf4) (docs/big_corpora.md).
    """
    from jaxir.data.formats.beir_folder import BeirFolder
    from jaxir.evaluation.datasets import parse_dataset
    from jaxir.retrieval.encoding.any_encoder import kind_of
    from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
    from jaxir.retrieval.encoding.pair_scorer import CrossEncoder
    from jaxir.retrieval.ranking import run_reranking, token_reranking
    from jaxir.retrieval.ranking.runs import read_run, write_run

    _, directory = parse_dataset(dataset, "beir")
    found = read_run(run)
    candidates = run_reranking.read_candidates(found, BeirFolder(directory), depth=depth)
    encoders = {"multi_vector_encoder": MultiVectorEncoder, "hybrid_encoder": HybridEncoder}
    if (encoder := encoders.get(kind_of(model))) is not None:
        if weights is not None:
            raise UserError("--weights only applies to a cross-encoder: leave it out")
        scored = token_reranking.rerank(candidates, encoder.load(model))
    else:
        scored = run_reranking.rerank(candidates, CrossEncoder.load(model, weights=weights))
    if keep_rest:
        scored = run_reranking.with_rest(scored, found)
    write_run(output, scored)
    print(f"{output}: {len(scored):,} queries, {sum(map(len, scored.values())):,} answers, by {model}")


if __name__ == "__main__":
    cli.start("jaxir.rerank:rerank", "--model=MODEL --run=a.trec --dataset=beir:DIR --output=b.trec")

"""Command: mines hard negatives from a run."""

from __future__ import annotations

from typing import Literal

from jaxir import cli
from jaxir.core.values import Count, NotNegative, Rate, Seed, check_idle
from jaxir.storage.outputs import writes


@writes(output="directory")
def mine(
    *,
    run: str,
    dataset: str,
    output: str,
    split: str = "train",
    negatives: Count = 7,
    first: Count = 1,
    last: Count = 200,
    sampling: Literal["random", "top"] = "random",
    margin: NotNegative | None = None,
    cross_encoder: str | None = None,
    max_relevance: Rate | None = None,
    relevance_margin: Rate | None = None,
    teacher: str | None = None,
    strict: bool = False,
    seed: Seed = 0,
) -> None:
    """Mines hard negatives for the queries of a split from what a retriever found for them.

    Writes OUTPUT/train.jsonl, which TevatronPairs(path=...) of jaxir.data.sets.pair_sources trains on with
    num_negatives, and OUTPUT/mining.json with the settings. Documents that any split judges relevant to the
    query or to another of the same text, and documents of the same text as one of those or as the query, are
    never its negatives.

    Args:
      run: TREC run file over the split's queries (jaxir.search --queries writes one), of any retriever.
      dataset: beir:DIR, where queries, documents and judgements are.
      output: directory to write; it must not exist.
      split: the judgements whose queries are mined for.
      negatives: of a query, at most; queries without any are left out and counted.
      first: rank from which on answers are candidates.
      last: the last such rank.
      sampling: take random candidates, or the best ones.
      margin: take only documents that score at least this much less than the query's lowest positive; queries
        without a positive in the run are left out and counted.
      cross_encoder: hf: or st: and a directory or hub name of a cross-encoder that reads each candidate with
        its query, so that unjudged relevant documents are dropped; needs one of the next two or both.
      max_relevance: drop candidates that it finds more relevant than this probability, such as 0.1.
      relevance_margin: drop candidates that it does not find at least this much less relevant, as a
        probability, than the query's least relevant positive.
      teacher: hf: or st: and a directory or hub name of a cross-encoder whose score of each passage is
        written beside it, to distil (gin/objectives/margin_mse.gin); may be the one that filters.
      strict: refuse judgements of documents or queries that are not there, repeated lines and grades such as
        1.0. By default they are counted, and judgements of what is not there are left out.
      seed: of random sampling.

    Raises:
      UserError: flags that do not go together, files that do not, or no negative at all.
    """
    from jaxir.data.formats.sources import BeirFolder
    from jaxir.evaluation.datasets import parse_dataset
    from jaxir.retrieval.mining import hard_negatives
    from jaxir.retrieval.mining.judging import RelevanceSettings

    if sampling != "random":
        check_idle(mine, "--sampling=random", seed=seed)
    _, directory = parse_dataset(dataset, "beir")
    settings = hard_negatives.MiningSettings(
        negatives=negatives, first=first, last=last, sampling=sampling, margin=margin, seed=seed
    )
    relevance = RelevanceSettings.of_flags(cross_encoder, max_relevance, relevance_margin)
    models = {}
    for spec in {cross_encoder, teacher} - {None}:
        from jaxir.retrieval.encoding.pair_scorer import CrossEncoder

        models[spec] = CrossEncoder.load(spec)
    report = hard_negatives.mine(
        run,
        BeirFolder(directory),
        output,
        split=split,
        settings=settings,
        judge=models.get(cross_encoder),
        relevance=relevance,
        teacher=models.get(teacher),
        strict=strict,
    )
    print(f"{output}: {hard_negatives.describe(report)}")


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.mine:mine",
            example="python -m jaxir.mine --run=train.trec --dataset=beir:DIR --last=100 --output=NEGATIVES",
        )
    )

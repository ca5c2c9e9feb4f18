"""Command: mines hard negatives from a run."""

from __future__ import annotations

from typing import Any

from jaxir import cli
from jaxir.core.choices import with_flags_of
from jaxir.core.values import check_idle
from jaxir.retrieval.mining.mining_settings import MiningSettings, RelevanceSettings
from jaxir.storage.outputs import writes


@writes(output="directory")
@with_flags_of(MiningSettings, RelevanceSettings)
def mine(
    *,
    run: str,
    dataset: str,
    output: str,
    split: str = "train",
    cross_encoder: str | None = None,
    teacher: str | None = None,
    strict: bool = False,
    **given: Any,
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
      cross_encoder: hf: or st: and a directory or hub name of a cross-encoder that reads each candidate with
        its query, so that unjudged relevant documents are dropped; needs --max_relevance, --relevance_margin
        or both.
      teacher: hf: or st: and a directory or hub name of a cross-encoder whose score of each passage is
        written beside it, to distil (gin/objectives/margin_mse.gin); may be the one that filters.
      strict: refuse judgements of documents or queries that are not there, repeated lines and grades such as
        1.0. By default they are counted, and judgements of what is not there are left out.
    """
    from jaxir.data.formats.sources import BeirFolder
    from jaxir.evaluation.datasets import parse_dataset
    from jaxir.retrieval.mining import hard_negatives

    _, directory = parse_dataset(dataset, "beir")
    limits = [given.pop(name, None) for name in ("max_relevance", "relevance_margin")]
    settings = MiningSettings(**given)
    if settings.sampling != "random":
        check_idle(MiningSettings, "--sampling=random", seed=settings.seed)
    relevance = RelevanceSettings.of_flags(cross_encoder, *limits)
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

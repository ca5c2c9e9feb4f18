"""Command: mines hard negatives from a run."""

from __future__ import annotations

from typing import Any

from jaxir import cli
from jaxir.core.choices import check_idle, with_flags_of
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
    """Mines hard negatives for the queries of a split from a retriever's run.

    Writes OUTPUT/train.jsonl, on which TevatronPairs(path=...) of jaxir.data.sets.pair_sources trains with
    num_negatives, and OUTPUT/mining.json with the settings. Documents that any split judges relevant to the
    query, or to another query of the same text, are never negatives. Nor are documents whose text equals
    the text of such a document, or the query.

    Args:
      run: TREC run file over the split's queries, of any retriever (jaxir.search --queries writes one).
      dataset: beir:DIR, with queries, documents and judgements.
      output: directory to write; it must not exist.
      split: the split for whose queries negatives are mined.
      cross_encoder: hf: or st: and a directory or hub name of a cross-encoder that scores each candidate, so
        that unjudged relevant documents are dropped; needs --max_relevance, --relevance_margin or both.
      teacher: hf: or st: and a directory or hub name of a cross-encoder whose scores of passages are written
        for distillation (gin/objectives/margin_mse.gin); may be the same model.
      strict: refuse judgements of missing documents or queries, repeated lines and grades such as 1.0. By
        default these are counted, and judgements of missing documents or queries are left out.
    """
    from jaxir.data.formats.beir_folder import BeirFolder
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
    cli.start("jaxir.mine:mine", "--run=train.trec --dataset=beir:DIR --last=100 --output=NEGATIVES")

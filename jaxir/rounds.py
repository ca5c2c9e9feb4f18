"""Command: rounds of training on hard negatives that the model of the round before finds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jaxir import cli
from jaxir.core.values import Count, Natural, NotNegative, Rate, Seed
from jaxir.storage.outputs import writes


@cli.also_called(output_dir="output")
@writes(output_dir="rounds directory")
def rounds(
    *,
    recipe: list[str],
    dataset: str,
    output_dir: str,
    steps: Count,
    rounds: Natural = 1,
    start: Literal["previous", "pretrained"] = "previous",
    first_run: str | None = None,
    negatives: Count = 7,
    first: Count = 1,
    last: Count = 200,
    margin: NotNegative | None = None,
    cross_encoder: str | None = None,
    max_relevance: Rate | None = None,
    relevance_margin: Rate | None = None,
    backend: Literal["scann", "exact"] = "scann",
    metrics: str = "nDCG@10 RR@10 P@1 R@100",
    split: str = "test",
    bindings: list[str] | None = None,
    seed: Seed = 0,
) -> int:
    """Trains, mines hard negatives with the trained model, and trains on them, several times over.

    Every step is a command of its own (train, encode, index, search, mine, evaluate); what it says is in
    OUTPUT/roundN/log.txt. Run the same command again to go on where it was interrupted. At the end a table
    compares the rounds.

    Args:
      recipe: gin files of every training run: a model, an objective, a run of gin/runs.
      dataset: beir:DIR with a split train.
      output_dir: directory of the rounds, new or to be taken up again.
      steps: optimizer steps of each round.
      rounds: rounds with mined negatives, after round 0 without.
      start: whether a round goes on from the previous model or starts from the pretrained one.
      first_run: TREC run over the training queries, BM25's say, to mine negatives for round 0 from.
      negatives: mined for each query, of which a batch has NEGATIVES for each pair (mined.gin).
      first: rank from which on answers are candidates.
      last: the last such rank.
      margin: as in jaxir.mine.
      cross_encoder: as in jaxir.mine, with one of the next two or both.
      max_relevance: as in jaxir.mine.
      relevance_margin: as in jaxir.mine.
      backend: the engine that searches the corpus.
      metrics: separated by spaces, as ir_measures spells them.
      split: the split to test on.
      bindings: gin bindings of every training run, NAME=VALUE.
      seed: of training and mining.
    """
    from jaxir.evaluation.datasets import parse_dataset
    from jaxir.evaluation.retrieval_metrics import parse_metrics
    from jaxir.experiments import cell_runner, table
    from jaxir.experiments import mining_rounds as room
    from jaxir.experiments.rehearsal import rehearse
    from jaxir.interop import model_dir
    from jaxir.retrieval.mining.mining_settings import MiningSettings, RelevanceSettings
    from jaxir.retrieval.ranking.runs import read_run

    parse_metrics(metrics)
    _, directory = parse_dataset(dataset, "beir")
    # What mining would refuse is refused now, not after a round of training.
    RelevanceSettings.of_flags(cross_encoder, max_relevance, relevance_margin)
    MiningSettings(negatives=negatives, first=first, last=last, margin=margin)
    mining = {
        "negatives": negatives,
        "first": first,
        "last": last,
        "seed": seed,
        "margin": margin,
        "cross_encoder": cross_encoder,
        "max_relevance": max_relevance,
        "relevance_margin": relevance_margin,
    }
    settings = room.RoundSettings(
        recipe=recipe,
        dataset=directory,
        rounds=rounds,
        steps=steps,
        start=start,
        first_run=first_run,
        mining=[f"--{name}={value}" for name, value in mining.items() if value is not None],
        backend=backend,
        depth=last,
        bindings=bindings or (),
        metrics=metrics,
        split=split,
        seed=seed,
    )
    out = Path(output_dir)
    if left := [
        step for _, steps in room.steps_of(settings, out) for step in steps if not step.done.exists()
    ]:
        if first_run is not None:
            read_run(first_run)
        if cross_encoder is not None:
            model_dir.read(cross_encoder, kind="cross_encoder")
        rehearse((step.arguments for step in left if step.arguments[1] == "jaxir.train"), out)
    try:
        results = room.run_rounds(settings, out, say=lambda text: print(text, file=sys.stderr, flush=True))
    except cell_runner.Interrupted as stop:
        number = stop.args[0]
        print(f"{out}: stopped by {number.name}; run the same command again to go on", file=sys.stderr)
        return 128 + number
    print(table.rounds_table(results))
    return 0


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.rounds:rounds",
            example="python -m jaxir.rounds --gin_file=gin/experiments/minilm_rounds.gin --dataset=beir:DIR"
            " --output_dir=ROUNDS",
        )
    )

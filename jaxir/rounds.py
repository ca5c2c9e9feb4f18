"""Command: trains in rounds, each on hard negatives that the previous round's model finds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.choices import Rules, with_flags_of
from jaxir.experiments.experiment_settings import RoundSettings
from jaxir.storage.outputs import writes


@Rules(also_called={"output_dir": "output"})
@writes(output_dir="rounds directory")
@with_flags_of(RoundSettings)
def rounds(*, output_dir: str, **given: Any) -> int:
    """Trains, mines hard negatives with the trained model, trains on them, and repeats this several times.

    Every step is a separate command (train, encode, index, search, mine, evaluate), whose output is in
    OUTPUT/roundN/log.txt. Run the same command again to continue after an interruption. At the end a table
    compares the rounds.

    Args:
      output_dir: directory of the rounds, new or to be continued.
    """
    from jaxir.evaluation.retrieval_metrics import parse_metrics
    from jaxir.experiments import cell_runner, mining_rounds, table
    from jaxir.experiments.rehearsal import rehearse
    from jaxir.interop import model_dir
    from jaxir.retrieval.ranking.runs import read_run

    settings = RoundSettings(**given)
    parse_metrics(settings.metrics)
    check_mining(settings)
    out = Path(output_dir)
    planned = mining_rounds.steps_of(settings, out)
    if left := [step for _, steps in planned for step in steps if not step.done.exists()]:
        if settings.first_run is not None:
            read_run(settings.first_run)
        if "cross_encoder" in settings.mining:
            model_dir.read(settings.mining["cross_encoder"], kind="cross_encoder")
        rehearse((step.arguments for step in left if step.arguments[1] == "jaxir.train"), out)
    try:
        results = mining_rounds.run_rounds(
            settings, out, report=lambda text: print(text, file=sys.stderr, flush=True)
        )
    except cell_runner.Interrupted as stop:
        return stop.report(out)
    print(table.rounds_table(results))
    return 0


def check_mining(settings: RoundSettings) -> None:
    """Raises a UserError now for flags of --mine that jaxir.mine would refuse after a round of training."""
    from jaxir.core.errors import UserError, suggest
    from jaxir.core.values import hints_of, parse
    from jaxir.mine import mine
    from jaxir.retrieval.mining.judging import RelevanceSettings
    from jaxir.retrieval.mining.mining_settings import MiningSettings

    own = {"run": "--first_run", "dataset": "--dataset", "output": "--output_dir"}
    own |= {"split": "jaxir.rounds, to train,", "negatives": "--negatives", "seed": "--seed"}
    hints, given = hints_of(mine), {}
    for flag in settings.mine:
        name, _, value = flag.partition("=")
        if name in own:
            raise UserError(f"--mine cannot set {name}: {own[name]} sets it")
        if name not in hints or name == "return" or not value:
            raise UserError(f"--mine={flag}: write NAME=VALUE, a flag of jaxir.mine{suggest(name, hints)}")
        try:
            given[name] = parse(value, hints[name])
        except UserError as error:
            raise UserError(f"--mine: {name} {error}") from error
    relevance = [given.pop(name, None) for name in ("cross_encoder", "max_relevance", "relevance_margin")]
    RelevanceSettings.of_flags(*relevance)
    given = {name: value for name, value in given.items() if name in hints_of(MiningSettings)}
    MiningSettings(negatives=settings.negatives, **given)


if __name__ == "__main__":
    cli.start(
        "jaxir.rounds:rounds",
        "--gin_file=gin/experiments/minilm_rounds.gin --dataset=beir:DIR --output_dir=ROUNDS",
    )

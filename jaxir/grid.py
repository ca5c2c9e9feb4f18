"""Command: trains and tests a grid of dual encoders, and prints a paper's table of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.values import Count
from jaxir.storage.outputs import writes


@cli.also_called(output_dir="output")
@writes(output_dir="grid", unless="dry_run")
def grid(
    *,
    recipe: list[str],
    datasets: list[str],
    steps: Count,
    output_dir: str,
    models: list[str],
    sharing: list[str] | None = None,
    objectives: list[str] | None = None,
    seeds: list[str | int] | None = None,
    untrained: list[str] | None = None,
    judges: list[str] | None = None,
    runs: list[str] | None = None,
    variants: Any = None,
    metrics: str = "P@1 RR",
    split: str = "test",
    bindings: list[str] | None = None,
    dry_run: bool = False,
) -> int:
    """Trains and tests every cell of a grid, and prints the paper's table of it: SamToNe's Table 1, say.

    A cell is one model: a data set, a pretrained encoder, a way of sharing between the towers, an objective
    and a seed. It is trained by `python -m jaxir.train` and tested by `python -m jaxir.evaluate`, in
    processes and a directory of its own. Run the same command again to go on where it was interrupted, or
    with more seeds, objectives or data sets: finished cells are left alone. When one fails, the others go on.

    Writes table.md, results.json and cells/NAME/{stage1,model,test.json,judge_NAME.json,log.txt} into the
    output directory.
    Numbers are means over seeds with their standard deviation; differences have bootstrap intervals over the
    test queries.

    Args:
      recipe: gin files of every training run, such as gin/runs/samtone_paper.gin.
      datasets: NAME=DIR or DIR, BEIR folders with the splits that the recipe trains on; one column each.
      steps: optimizer steps of a cell. A method in two stages (PAIR) has half of them in each.
      output_dir: the grid's directory, new or to be taken up again.
      models: pretrained encoders: files of gin/models without .gin, such as t5_1_1/base, or other gin files.
      sharing: of the towers; ade,ade_spl,sde by default.
      objectives: standard, samtone, samtone_both, pair; of texts alone simcse, simcse_nt_xent, simcse_bce,
        consert_1, consert_2, clm_autoencoder, mlm_autoencoder, multi_task, multi_task_mlm, tsdae, diffcse,
        diffcse_tanh, cpdae, cpdae_r, seed, prop, ict; or NAME=FILE.gin with + between the files of stages;
        standard,samtone,pair by default. The first is what the others are compared with.
      seeds: whole numbers, of the order of the data, of dropout and of new parameters; 0 by default.
      untrained: NAME=MODEL, models that are tested as they are, each in a row of its own.
      judges: NAME=sts:PATH, rated pairs by which every model is judged too, by Spearman's correlation, or
        NAME=senteval:DIR, transfer tasks, by their mean accuracy.
      runs: NAME=FILE, run files over the one data set (BM25's, a hybrid's), each in a row of its own.
      variants: Variant(...)s of jaxir.experiments.grid_cells, one more axis; gin only.
      metrics: separated by spaces, as ir_measures spells them.
      split: the split to test on.
      bindings: gin bindings of every training run, NAME=VALUE.
      dry_run: print the commands that would be run, and do nothing.

    Raises:
      UserError: settings that make no sense, a file that is not there, or cells begun with other settings.
    """
    from jaxir.core.errors import UserError
    from jaxir.evaluation.retrieval_metrics import parse_metrics
    from jaxir.experiments import cell_runner, grid_cells, table
    from jaxir.experiments.rehearsal import check_typed, rehearse
    from jaxir.storage.files import atomic_file
    from jaxir.storage.locks import locked

    parse_metrics(metrics)
    seeds = ["0"] if seeds is None else [str(seed) for seed in seeds]
    if wrong := [seed for seed in seeds if not (seed.isascii() and seed.isdecimal())]:
        raise UserError(f"seeds must be whole numbers, not {wrong[0]!r}")
    axes = grid_cells.Axes(
        models=models,
        sharing=["ade", "ade_spl", "sde"] if sharing is None else sharing,
        objectives=["standard", "samtone", "pair"] if objectives is None else objectives,
        variants=(grid_cells.PLAIN,) if variants is None else variants,
        datasets=datasets,
        seeds=[int(seed) for seed in seeds],
        untrained=untrained or (),
        judges=judges or (),
        runs=runs or (),
    )
    out = Path(output_dir)
    cells = grid_cells.plan_cells(
        axes,
        recipe=recipe,
        steps=steps,
        bindings=bindings or (),
        metrics=metrics,
        split=split,
        output_dir=out,
    )
    if dry_run:
        print("\n\n".join("\n".join(cell.commands.lines()) for cell in cells))
        return 0

    rehearse(
        (arguments for cell in cells if not cell.finished for _, arguments in cell.commands.training),
        out,
    )
    check_typed(cell_runner.typed_runs(cells))

    def write_tables(*, finished: bool = False) -> str:
        results = table.collect(cells)
        differences = table.compare_rows(results) if finished else []
        text = table.scores_table(results)
        if differences:
            text += "\n\n" + table.differences_table(results, differences)
        if results.missing:
            text += f"\n\n{len(results.missing)} of {len(cells)} cells are missing."
        with atomic_file(out / "table.md") as file:
            file.write(text + "\n")
        with atomic_file(out / "results.json") as file:
            json.dump(table.to_json(results, differences, cells), file, indent=2, ensure_ascii=False)
            file.write("\n")
        return text

    try:
        with locked(out, f"another process works in {out}"):
            failures = cell_runner.run_cells(cells, steps=steps, on_result=write_tables)
            print(write_tables(finished=True))
    except cell_runner.Interrupted as stop:
        number = stop.args[0]
        print(f"{out}: stopped by {number.name}; run the same command again to go on", file=sys.stderr)
        return 128 + number
    for failure in failures:
        print(f"failed: {failure.cell.name}: {failure.reason} (see {failure.log})", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.grid:grid",
            example="python -m jaxir.grid --gin_file=gin/experiments/table1.gin --datasets=msmarco=DIR"
            " --output_dir=GRID",
        )
    )

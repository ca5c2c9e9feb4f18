"""Command: trains and tests a grid of dual encoders, and prints their table as a paper shows it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.choices import Rules, with_flags_of
from jaxir.experiments.experiment_settings import GridSettings
from jaxir.storage.outputs import writes


@Rules(also_called={"output_dir": "output"})
@writes(output_dir="grid", unless="dry_run")
@with_flags_of(GridSettings)
def grid(*, output_dir: str, dry_run: bool = False, **axes: Any) -> int:
    """Trains and tests every cell of a grid, and prints a paper's table, such as SamToNe's Table 1.

    A cell is one model: a data set, a pretrained encoder, a way of sharing between the towers, an objective
    and a seed. Each cell is trained by `python -m jaxir.train` and tested by `python -m jaxir.evaluate`, in
    its own processes and directory. Run the same command again to continue after an interruption, or with
    more seeds, objectives or data sets: finished cells are kept. If a cell fails, the others continue.

    Writes table.md, results.json and cells/NAME/{stage1,model,test.json,judge_NAME.json,log.txt} into the
    output directory. Numbers are means over seeds with their standard deviation; differences have bootstrap
    intervals over the test queries.

    Args:
      output_dir: the grid's directory, new or to be continued.
      dry_run: only print the commands that would be run.
    """
    from jaxir.evaluation.retrieval_metrics import parse_metrics
    from jaxir.experiments import cell_runner, grid_cells, table
    from jaxir.experiments.rehearsal import check_manual_runs, rehearse
    from jaxir.storage.locks import locked

    settings = GridSettings(**axes)
    parse_metrics(settings.metrics)
    out = Path(output_dir)
    cells = grid_cells.plan_cells(settings, out)
    if dry_run:
        print("\n\n".join("\n".join(cell.commands.lines()) for cell in cells))
        return 0
    unfinished = [cell for cell in cells if not cell.finished]
    rehearse((arguments for cell in unfinished for _, arguments in cell.commands.training), out)
    check_manual_runs(cell_runner.manual_runs(cells))
    try:
        with locked(out, f"another process works in {out}"):
            failures = cell_runner.run_cells(
                cells, steps=settings.steps, on_result=lambda: table.write_tables(cells, out)
            )
            print(table.write_tables(cells, out, finished=True))
    except cell_runner.Interrupted as stop:
        return stop.report(out)
    for cell, reason in failures:
        print(f"failed: {cell.name}: {reason} (see {cell.log})", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    cli.start(
        "jaxir.grid:grid", "--gin_file=gin/experiments/table1.gin --datasets=msmarco=DIR --output_dir=OUT"
    )

"""`python -m jaxir.train`: trains a dual encoder, or resumes where an earlier run stopped."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any, Literal

from jaxir import cli
from jaxir.errors import UserError
from jaxir.huge_pages import restart_with_huge_pages
from jaxir.outputs import writes
from jaxir.simple_types import Count, Natural, Positive, PositiveNumber, Seed


@cli.one_of("steps", "epochs")
@cli.also_called(output_dir="output")
@writes(output_dir="run", unless="plan")
def train(
    *,
    model: Any,
    objective: Any,
    data: Any,
    output_dir: str,
    steps: Count | None = None,
    epochs: Positive | None = None,
    min_steps: Count = 1,
    batch_size: Count,
    dev: Any = None,
    evaluators: Any = None,
    optimizer: Any = None,
    mesh: Any = None,
    num_negatives: Natural = 0,
    frozen: list[str] | None = None,
    auxiliary_from: str | None = None,
    seed: Seed = 0,
    log_every: Count = 10,
    eval_every: PositiveNumber = 100,
    checkpoint_every: PositiveNumber = 500,
    keep_last: Count = 2,
    dev_metric: str = "nDCG@10",
    dev_distractors: Natural = 0,
    on_bad_input: Literal["stop", "skip"] = "stop",
    plan: str | None = None,
) -> int:
    """Trains a dual encoder, or resumes the run in the output directory.

    The model, the objective and the data come from a gin file (see gin/); everything below can be a flag,
    which overrides the file (and its macro: --steps=30 is --gin.STEPS=30). RUN/config.gin is what ran:
    --gin_file=RUN/config.gin repeats it.
    The output directory is a model that every other command takes: its best checkpoint by the dev metric,
    else its latest. Run the same command again to resume a run that was interrupted; it ends with the
    parameters it would have had. SIGTERM and Ctrl-C save a checkpoint first; the exit status is then 143 or
    130. On several machines start it once on each: TPU pods are known by themselves, elsewhere
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say who is who (docs/sharding.md).

    Args:
      model: Pretrained(...) or FromScratch(...) of jaxir.interop.build.
      objective: the training method, such as Contrastive(loss=...) of jaxir.objectives.contrastive.
      data: training pairs, such as BeirPairs(...) of jaxir.data.pair_sources.
      output_dir: directory of the run, new or to be resumed; local or gs://BUCKET/PATH.
      steps: optimizer steps in all; or else
      epochs: how often to go through the training pairs.
      min_steps: the fewest steps of a run that is told in epochs.
      batch_size: pairs in one step, over all devices.
      dev: pairs to evaluate on while training (nDCG@10, RR@10, accuracy, loss); none by default.
      evaluators: what else is evaluated, a list such as [STS(...)] of jaxir.evaluators.
      optimizer: AdamW(...) or Adafactor(...) of jaxir.training.optimizers; AdamW() by default.
      mesh: MeshConfig(...) of jaxir.partitioning; by default all devices split the batch.
      num_negatives: hard negatives of each pair; the data must have them.
      frozen: patterns of names of parameters that are not trained, such as "encoder.embedding.*".
      auxiliary_from: a run; what its objective learnt beside the model (heads, decoders, temperatures) is
        what this run's starts from, as the model itself does with MODEL=RUN.
      seed: of new parameters, the order of the data and dropout.
      log_every: steps between log lines.
      eval_every: steps between evaluations on the dev pairs; below 1, a share of all steps.
      checkpoint_every: steps between checkpoints; below 1, a share of all steps.
      keep_last: newest checkpoints to keep, besides the best.
      dev_metric: what tells the best checkpoint, of all metrics of the evaluators.
      dev_distractors: training passages that join the dev passages in the corpus that is searched.
      on_bad_input: stop at the first malformed record, or skip and count them.
      plan: train nothing, but compile the step for these chips (v5p:4x4x4, or gpu:8xh100 by arithmetic),
        print what it needs of them, and exit with 1 if they lack the memory. Needs neither data nor weights
        nor an output directory; see docs/planning.md.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks are not for users
    from jaxir.training.length import check_length, in_steps, steps_of

    check_length(steps, epochs, min_steps)
    if plan is not None:
        from jaxir.planning import plan as planning

        if steps is None:
            raise UserError(f"a plan reads no data: how many steps are {epochs} epochs? give --steps")
        return planning.run(
            plan,
            model=model,
            objective=objective,
            optimizer=optimizer,
            mesh=mesh,
            steps=steps,
            batch_size=batch_size,
            num_negatives=num_negatives,
            frozen=frozen or (),
            seed=seed,
        )
    from jaxir.distributed import maybe_initialize_distributed, say, together
    from jaxir.interop import model_dir
    from jaxir.partitioning import MeshConfig
    from jaxir.training import loop
    from jaxir.training.checkpoints import check_run_dir
    from jaxir.training.holding import held
    from jaxir.training.optimizers import AdamW
    from jaxir.training.settings import describe

    maybe_initialize_distributed()
    with together(), held(output_dir):
        # What can be checked at once is checked before anything is read.
        optimizer, partitioner = optimizer or AdamW(), (mesh or MeshConfig()).build()

        counts = {"batch_size": batch_size, "log_every": log_every, "keep_last": keep_last}
        loop.check_settings(counts, partitioner, objective)

        def settle(steps: int) -> None:
            for name, every in (("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
                counts[name] = in_steps(name, every, steps)
            counts["steps"] = steps
            loop.check_settings(counts, partitioner, objective)
            optimizer.build(steps)

        if steps is not None:
            settle(steps)
        check_run_dir(output_dir)

        loaded = model.build(seed=seed, partitioner=partitioner)
        features = objective.features(loaded.settings.text_format(num_negatives))
        pairs = data.build(loaded.tokenizer, features, on_bad_input=on_bad_input)
        if steps is None:
            steps = steps_of(epochs, pairs=pairs.num_examples, batch_size=batch_size, min_steps=min_steps)
            settle(steps)

        def describe_run(run_dir: Path) -> None:
            model_dir.write_description(run_dir, loaded.model.config, loaded.tokenizer, loaded.settings)
            _write_gin(run_dir)

        result = loop.train(
            model=loaded.model,
            objective=objective,
            objective_description=describe(objective, _gin_bindings),
            data=pairs,
            dev=dev,
            evaluators=evaluators or (),
            tokenizer=loaded.tokenizer,
            form=loaded.settings.text_format(num_negatives),
            on_bad_input=on_bad_input,
            output_dir=output_dir,
            optimizer=optimizer,
            partitioner=partitioner,
            seed=seed,
            frozen=frozen or (),
            auxiliary_from=auxiliary_from,
            dev_metric=dev_metric,
            dev_distractors=dev_distractors,
            on_start=describe_run,
            **counts,
        )
        best = (
            ""
            if result.best_step is None
            else f"; best {dev_metric} {result.best_value:.4f} at step {result.best_step}"
        )
        if result.stopped_by is None:
            done = "was already complete" if result.started_at == steps else "is complete"
            say(f"{output_dir} {done}: {result.step} steps{best}")
            return 0
        say(
            f"{output_dir}: stopped by {result.stopped_by.name}; step {result.step} of {steps} is saved"
            f"{best}; run the same command again to resume"
        )
        return 128 + result.stopped_by


def _write_gin(run_dir: Path) -> None:
    """Writes the bindings of the run, where there are any, so that it can be repeated."""
    if "gin" not in sys.modules:
        return
    from jaxir import gin_config
    from jaxir.files import atomic_file

    config = gin_config.operative_config()
    if config is not None:
        with atomic_file(run_dir / "config.gin") as file:
            file.write(config)


def _gin_bindings(function: Any) -> dict[str, Any]:
    """Returns what gin binds of `function`, so that a run with other bindings is known to be another run."""
    gin = sys.modules.get("gin")
    if gin is None or not hasattr(function, "__wrapped__"):
        return {}
    try:
        return gin.get_bindings(function)
    except ValueError:  # no configurable of gin's: something else has wrapped it
        return {}


def _arguments(given: list[str]) -> list[str]:
    """Returns the command line, for a plan with all that only training needs filled in."""
    if not any(argument.split("=")[0] == "--plan" for argument in given):
        return given
    from jaxir import gin_config

    apart = [part for a in given for part in (a.split("=", 1) if a.startswith("--") else (a,))]
    files = [value for flag, value in itertools.pairwise(apart) if flag == "--gin_file"]
    flags = {part.removeprefix("--") for part in apart if part.startswith("--")}
    bound = {a.removeprefix("--gin.").split("=")[0] for a in given if a.startswith("--gin.")}
    names = [n for n in gin_config.open_macros(train, files, flags) if n not in bound]
    output = [] if flags & {"output_dir", "output"} else ["--output_dir=none"]
    return [*given, *output, *(f"--gin.{name}=none" for name in names)]


if __name__ == "__main__":
    restart_with_huge_pages("jaxir.train")
    raise SystemExit(
        cli.main(
            "jaxir.train:train",
            _arguments(sys.argv[1:]),
            example="python -m jaxir.train --gin_file=gin/quickstart.gin --output_dir=run",
        )
    )

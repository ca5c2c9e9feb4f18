"""The training loop: one function that reads from top to bottom."""

import contextlib
import functools
import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.platforms import check_devices
from jaxir.data.batches.text_data import check_data, dataset_of, shortened
from jaxir.data.text.truncation import ARGUMENTS, FLAGS, told_of_dataset
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.layers import Remat
from jaxir.objectives.objective import Objective, auxiliary_of
from jaxir.runtime import compile_cache, distributed
from jaxir.runtime.partitioning import MeshConfig, Partitioner
from jaxir.storage.files import atomic_file, path_of
from jaxir.training.evaluators.evaluation_context import Bench
from jaxir.training.run import warm_start
from jaxir.training.run.checkpoints import Checkpoints
from jaxir.training.run.logs import Narrator, RunLog, timed
from jaxir.training.run.marker import check_run_dir
from jaxir.training.run.profiling import Trace, ideal_seconds, peak_memory, planned, steps_to_trace
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_files import RunFiles
from jaxir.training.run.run_fingerprint import describe
from jaxir.training.run.run_lock import held
from jaxir.training.run.run_settings import agreed_settings, check_alike, weights
from jaxir.training.step import train_state as state_lib
from jaxir.training.step.memory import device_memory, fit, scheduled_seconds
from jaxir.training.step.prefetch import prefetch
from jaxir.training.stopping import StopSignal
from jaxir.training.suite import Suite, evaluators_of

COMPLETE = "COMPLETE"
AUXILIARY = 0xA0  # folded into the seed: its parameters are not drawn as the model's
NO_NEGATIVES = (
    "no pair of the {} has a negative, so the loss is 0 whatever the model does: no hard negatives but the"
    " passages themselves, and no other pairs with another query and another passage (told by their ids)"
)
ENDED = "step {}: the data's batches ended, of a run of {} steps: `batches` must go on without end"


class Data(Protocol):
    """What the loop asks of training data; `jaxir.data.batches.array_dataset.ArrayDataset` is one.

    `fingerprint` tells it from any other data: a run is resumed on data of the same one only. Data whose
    batches follow the steps of a run have `scheduled(steps)`, which returns those of a run of so many steps.
    """

    num_examples: int
    order_depends_on_parts: bool

    @property
    def fingerprint(self) -> str: ...

    def batches(
        self, *, batch_size: int, seed: int, start_step: int, process_index: int, process_count: int
    ) -> Iterator[Mapping[str, np.ndarray]]: ...


class TrainResult(NamedTuple):
    """How a run ended.

    Attributes:
      steps: those of the whole run.
      started_at: the step it began with: 0, or that of the checkpoint it resumed from.
      step: the number of finished steps; if it is `started_at`, the run was complete already.
      stopped_by: the signal that stopped it before its last step, or None.
      best_step: the step of the checkpoint that is best by the dev metric, or None without one.
      best_value: its dev metric.
    """

    steps: int
    started_at: int
    step: int
    stopped_by: signal.Signals | None
    best_step: int | None
    best_value: float | None


def no_bindings(function: Any) -> Mapping[str, Any]:
    """Returns the arguments of a function that gin binds where there is no gin: none."""
    return {}


def train(
    recipe: Recipe,
    output_dir: str | Path,
    *,
    bindings: Callable[[Any], Mapping[str, Any]] = no_bindings,
    on_start: Callable[[Path], None] = lambda _: None,
    kept: bool = True,
) -> TrainResult:
    """Trains a recipe's model, or resumes the run in `output_dir` where it stopped.

    A resumed run sees the same batches and random numbers as one that was never interrupted, and on CPU
    ends with the same parameters bit for bit. SIGTERM or SIGINT ends the step at hand, saves a checkpoint
    and returns; a second one interrupts at once.

    Args:
      recipe: what to train; its `model` may be a `LoadedModel`, which is trained in place, its `data` a
        dataset that was built, its `mesh` a Partitioner.
      output_dir: the run's directory, local or gs://BUCKET/PATH: checkpoints/, log.jsonl, tensorboard/ and,
        after the last step, COMPLETE.
      bindings: the arguments of a function that are bound elsewhere (by gin, say); as the objective's own
        fields they must be the same when the run is resumed.
      on_start: called with `output_dir` before the first step, once that is known to be usable.
      kept: whether `output_dir` outlives the call; if not, a stopped run saves no checkpoint.

    Raises:
      UserError: settings that make no sense, an objective of another kind of model, a directory that cannot
        be resumed or in which another process trains, a first batch without any negative, or a loss or
        gradient that is not finite (no checkpoint is written after it).
    """
    # ---------------------------------------------------------------- settings
    check_devices()
    if recipe.steps is not None:
        recipe = recipe.settled()
    mesh = recipe.mesh or MeshConfig()
    partitioner = mesh if isinstance(mesh, Partitioner) else mesh.build()
    recipe.check_batch(partitioner)
    check_data("data", recipe.data)
    evaluators = evaluators_of(recipe)
    run_dir, objective = path_of(output_dir), recipe.objective
    with contextlib.ExitStack() as closing:
        hold = closing.enter_context(held(run_dir))
        check_run_dir(run_dir)

        # ------------------------------------------------------------ the model and the data
        loaded = recipe.model
        if not isinstance(loaded, LoadedModel):
            loaded = loaded.build(seed=recipe.seed, partitioner=partitioner)
        model = loaded.model
        objective.check_model(model)
        form = loaded.settings.text_format_of(loaded.tokenizer, recipe.num_negatives)
        features = objective.features(form)
        whole = dataset_of(recipe.data, loaded.tokenizer, features, on_bad_input=recipe.on_bad_input)
        cut = told_of_dataset(whole, form, ARGUMENTS if bindings is no_bindings else FLAGS)
        if cut and jax.process_index() == 0:
            print(cut, file=sys.stderr, flush=True)
        data = shortened(whole) if whole is not recipe.data else whole
        if note := recipe.lengthened(data.num_examples):
            distributed.note(note)
        recipe = recipe.settled(data.num_examples)
        steps, batch_size, seed = recipe.steps, recipe.batch_size, recipe.seed
        to_trace = steps_to_trace(recipe.profile_steps, steps)
        if hasattr(data, "scheduled"):
            data = data.scheduled(steps)
        built = recipe.optimizer.build(steps)
        part, parts = distributed.share_of_batch(partitioner)
        batches_from = functools.partial(
            data.batches, batch_size=batch_size, seed=seed, process_index=part, process_count=parts
        )
        batches_from(start_step=0)  # what cannot be is refused before anything is made
        bench = Bench(
            tokenizer=loaded.tokenizer,
            form=form,
            objective=objective,
            training_data=data,
            batch_size=batch_size,
            partitioner=partitioner,
            on_bad_input=recipe.on_bad_input,
        )
        suite = Suite(evaluators, bench, best_by=recipe.dev_metric, eval_every=recipe.eval_every, steps=steps)

        # ------------------------------------------------------------ the run's directory
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(seed), AUXILIARY))
        auxiliary = auxiliary_of(objective, model, form=form, rngs=rngs)
        objective.read_corpus(auxiliary, data)
        agreed = agreed_settings(
            recipe,
            model,
            auxiliary,
            whole,
            objective=describe(objective, bindings),
            dev=suite.told,
            parts=parts,
        )
        check_alike(agreed | {name: getattr(recipe, name) for name in ("eval_every", "checkpoint_every")})
        checkpoints = Checkpoints(
            run_dir,
            agreed | weights(model, partitioner) | warm_start.describe(recipe.auxiliary_from),
            keep_last=recipe.keep_last,
            metric=suite.best_by,
            greater_is_better=suite.greater_is_better,
            hold=hold,
        )
        closing.callback(checkpoints.close)

        # ------------------------------------------------------------ state: the newest checkpoint, or step 0
        frozen = (*objective.frozen, *(recipe.frozen or ()))
        plan = state_lib.plan_state(model, built.transform, partitioner, auxiliary=auxiliary, frozen=frozen)
        beginning = closing.enter_context(contextlib.ExitStack())
        beginning.callback(checkpoints.withdraw)
        resumed = checkpoints.open(plan.abstract)
        start = resumed.step if resumed else 0
        state = resumed.state if resumed else state_lib.initial_state(model, built.transform, plan, auxiliary)
        if recipe.auxiliary_from and not resumed:
            state = warm_start.with_auxiliary_of(
                recipe.auxiliary_from,
                state,
                plan,
                read_corpus=lambda beside: objective.read_corpus(beside, data),
            )
        if not resumed:
            checkpoints.check_begun(state)
        closing.callback(lambda: state_lib.put_into(model, state.params))

        files = RunFiles(run_dir, loaded, on_start)
        if start == steps:
            beginning.pop_all()
            files.write()  # also what was damaged or removed since
            mark_complete(run_dir, steps)
            return result(steps, start, start, None, checkpoints)

        # ------------------------------------------------------------ batches, made ahead on a thread
        batches = closing.enter_context(
            prefetch(
                batches_from(start_step=start),
                lambda batch: distributed.place_share(batch, partitioner, part, parts),
            )
        )
        first = next(batches, None)
        if first is None:
            raise UserError(ENDED.format(start, steps))

        # ------------------------------------------------------------ compilation, once
        def compile_step(remat: Remat, objective: Objective) -> Any:
            step_fn = state_lib.make_step(plan.with_remat(remat), objective, built)
            jitted = jax.jit(step_fn, donate_argnums=0, out_shardings=(plan.shardings, None))
            with partitioner():
                return compile_cache.compile_step(jitted.lower(state, first, key_data), partitioner)

        key_data = state_lib.key_data_of(seed, plan)
        fit_note, remat = None, state_lib.remat_of(model)
        with timed("compiling the step"):
            if "auto" in (remat, getattr(objective, "chunks", 1)):
                _, objective, compiled, fit_note = fit(
                    remat,
                    objective,
                    compile_step,
                    rows=batch_size // partitioner.batch_divisor(),
                    limit=device_memory(),
                    gathers=partitioner.mesh.shape["fsdp"] > 1,
                    scanned=state_lib.is_scanned(model),
                    seconds_of=functools.partial(scheduled_seconds, partitioner=partitioner),
                )
            else:
                compiled = compile_step(remat, objective)
            ideal = ideal_seconds(plan, objective, state, first, partitioner)
            expected = planned(compiled, partitioner) if jax.process_index() == 0 else {}
        if evaluators:
            bench.objective = objective  # with the chunks that were found
            with timed("compiling the evaluation"):
                suite.compile(plan)
            suite.try_out(state)

        beginning.pop_all()
        files.write()

        # ------------------------------------------------------------ the loop
        log = RunLog(run_dir, start_step=start, run=checkpoints.run, hold=hold)
        closing.callback(log.close)
        narrator = Narrator(
            steps=steps, start_step=start, batch_size=batch_size, evaluations_from=suite.count_from
        )
        closing.callback(narrator.close)
        stop = closing.enter_context(StopSignal(saves=kept))
        if fit_note:
            narrator.say(fit_note)
        if start:
            narrator.say(f"resuming {run_dir} at step {start}")
        trace = Trace(run_dir, to_trace, start_step=start)
        closing.callback(trace.close)
        if trace.begun_before:
            narrator.say(f"no trace of steps {trace.begun_before}: the run goes on after step {start}")

        def stopped(why: str) -> UserError:
            log.checkpoint(checkpoints.settle())
            return UserError(f"{why}; training stopped, {checkpoints.last_good()}")

        def check_finite(done: int, values: Mapping[str, float]) -> None:
            for name in ("loss", "grad_norm"):
                if not np.isfinite(values[name]):
                    raise stopped(f"step {done}: {name} is {values[name]}")

        def evaluated(done: int, state: state_lib.TrainState) -> dict[str, float]:
            try:
                return suite.measure(done, state)
            except UserError as error:
                raise stopped(str(error)) from error

        warned: set[tuple[str, str]] = set()

        def check_negatives(done: int, values: Mapping[str, float], what: str = "batch") -> None:
            for name, share in values.items():
                part, _, metric = name.rpartition("/")
                if metric != "rows_without_negatives" or share < 1 - 1e-6:
                    continue
                of_part = f"{part}: " if part else ""
                sentence = f"step {done}: {of_part}{NO_NEGATIVES.format(what)}"
                if done == 1 and what == "batch":
                    raise UserError(f"{sentence}; give other pairs, hard negatives or a larger batch_size")
                if (name, what) not in warned:
                    narrator.say(f"warning: {sentence}")
                    warned.add((name, what))

        def settle_metrics(done: int, metrics: state_lib.Metrics) -> None:
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            check_finite(done, values)
            check_negatives(done, values)
            narrator.step(done, values["loss"], values)
            if done % recipe.log_every == 0 or done == steps:
                own = dict(values)
                values["examples_per_second"] = narrator.lap(done)
                values["step_seconds"] = batch_size / values["examples_per_second"]
                if ideal is not None:
                    values["mfu"] = ideal / values["step_seconds"]
                values |= peak_memory(jax.local_devices()) | expected
                log.write(done, values)
                narrator.tell(done, values, own)

        done, unread = start, None
        closing.enter_context(jax.transfer_guard("disallow"))
        for batch in itertools.chain([first], batches):
            trace.before(done + 1)
            state, metrics = compiled(state, batch, key_data)
            if traced := trace.after(done + 1, metrics):
                narrator.say(traced)
            if unread:
                settle_metrics(*unread)
            done, unread = done + 1, (done + 1, metrics)

            stopping = stop.requested(done)
            evaluating = suite.due(done)
            saving = done % recipe.checkpoint_every == 0 or done == steps or (stopping and kept)
            if evaluating or saving:
                settle_metrics(*unread)
                unread, value = None, None
                with narrator.paused(evaluating=evaluating), jax.transfer_guard("allow"):
                    if evaluating:
                        scores = evaluated(done, state)
                        check_negatives(done, scores, "dev batches")
                        value = scores.get(recipe.dev_metric)
                        log.write(done, {f"dev/{k}": v for k, v in scores.items()})
                        named = {k: scores[k] for k in suite.directions if k in scores}
                        others = {k: v for k, v in scores.items() if k not in named}
                        narrator.tell_dev(done, named, others)
                    if saving or checkpoints.is_best(value):
                        log.checkpoint(checkpoints.settle())
                        log.bring()
                        checkpoints.save(done, state, value)
            else:
                log.checkpoint(checkpoints.poll())
            if stopping or done == steps:
                break
        else:
            raise stopped(ENDED.format(done, steps))

        # ------------------------------------------------------------ the end
        log.checkpoint(checkpoints.settle())
        if done == steps or kept:
            checkpoints.check_saved(done)
            files.restore()
        if done == steps:
            mark_complete(run_dir, steps)
        return result(steps, start, done, stop.received if done < steps else None, checkpoints)


def mark_complete(run_dir: Path, steps: int) -> None:
    """Writes RUN/COMPLETE, unless it is there."""
    path = run_dir / COMPLETE
    if jax.process_index() == 0 and not path.exists():
        with atomic_file(path) as file:
            file.write(f"{steps} steps\n")


def result(
    steps: int, started_at: int, step: int, stopped_by: signal.Signals | None, checkpoints: Checkpoints
) -> TrainResult:
    """Makes the result of a run that is at `step`."""
    best_step, best_value = checkpoints.best() or (None, None)
    return TrainResult(steps, started_at, step, stopped_by, best_step, best_value)

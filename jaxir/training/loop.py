"""The training loop: one function that reads from top to bottom."""

import contextlib
import functools
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxir import distributed
from jaxir.data.lines import Policy
from jaxir.errors import UserError
from jaxir.evaluators.bench import Bench
from jaxir.evaluators.evaluator import Evaluator, check_evaluators
from jaxir.evaluators.loss import Loss
from jaxir.evaluators.retrieval import Retrieval
from jaxir.features import TextFormat
from jaxir.files import atomic_file, path_of
from jaxir.models.products import as_run_on
from jaxir.objectives.objective import Objective
from jaxir.partitioning import MeshConfig, Partitioner
from jaxir.training import stages
from jaxir.training import state as state_lib
from jaxir.training.checkpoints import Checkpoints
from jaxir.training.holding import held
from jaxir.training.logs import Narrator, RunLog, timed
from jaxir.training.memory import device_memory, fit_chunks
from jaxir.training.optimizers import AdamW, Optimizer
from jaxir.training.prefetch import prefetch
from jaxir.training.settings import agreed_settings, describe
from jaxir.training.suite import Suite

COMPLETE = "COMPLETE"
AUXILIARY = 0xA0  # folded into the seed: its parameters are not drawn as the model's
NO_NEGATIVES = (
    "no pair of the {} has a negative, so the loss is 0 whatever the model does: no hard negatives but the"
    " passages themselves, and no other pairs with another query and another passage (told by their ids)"
)


class Data(Protocol):
    """What the loop asks of training data; `jaxir.data.array_dataset.ArrayDataset` is one.

    `fingerprint` tells it from any other data: a run is resumed on data of the same one only.
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
      started_at: the step it began with: 0, or that of the checkpoint it resumed from.
      step: the number of finished steps; if it is `started_at`, the run was complete already.
      stopped_by: the signal that stopped it before its last step, or None.
      best_step: the step of the checkpoint that is best by the dev metric, or None without one.
      best_value: its dev metric.
    """

    started_at: int
    step: int
    stopped_by: signal.Signals | None
    best_step: int | None
    best_value: float | None


def train(
    *,
    model: nnx.Module,
    objective: Objective,
    data: Data,
    output_dir: str | Path,
    steps: int,
    batch_size: int,
    dev: Any = None,
    evaluators: Sequence[Evaluator] = (),
    tokenizer: Any = None,
    form: TextFormat = TextFormat(1, 1),  # noqa: B008 (frozen)
    on_bad_input: Policy = "stop",
    dev_metric: str = "nDCG@10",
    dev_distractors: int = 0,
    optimizer: Optimizer = AdamW(),  # noqa: B008 (frozen)
    partitioner: Partitioner | None = None,
    seed: int = 0,
    log_every: int = 10,
    eval_every: int = 100,
    checkpoint_every: int = 500,
    keep_last: int = 2,
    frozen: Sequence[str] = (),
    auxiliary_from: str | None = None,
    objective_description: str | None = None,
    on_start: Callable[[Path], None] | None = None,
) -> TrainResult:
    """Trains `model` in place, or resumes the run in `output_dir` where it stopped.

    A resumed run sees the same batches and random numbers as one that was never interrupted, and on CPU
    ends with the same parameters bit for bit. SIGTERM or SIGINT ends the step at hand, saves a checkpoint
    and returns; a second one interrupts at once.

    Args:
      model: its parameters are trained; they lie over the mesh afterwards.
      objective: the training method; what it has beside the model is made, trained and saved here.
      data: where batches come from.
      output_dir: the run's directory, local or gs://BUCKET/PATH: checkpoints/, log.jsonl, tensorboard/ and,
        after the last step, COMPLETE.
      steps: optimizer steps in all.
      batch_size: examples of one step over all devices.
      dev: pairs to evaluate on in the loop, by `Retrieval` and `Loss`; None for nothing.
      evaluators: what else is evaluated.
      tokenizer: the model's, for what evaluators read.
      form: lengths and prompts of its texts.
      on_bad_input: what to do with malformed records of theirs.
      dev_metric: what tells the best checkpoint, of all metrics of the evaluators.
      dev_distractors: how many training passages join the dev passages in the corpus that is searched.
      optimizer: AdamW(...) or Adafactor(...).
      partitioner: the mesh; by default all devices split the batch.
      seed: of the data order and of dropout.
      log_every: steps between log lines.
      eval_every: steps between dev evaluations; there is one at the last step too.
      checkpoint_every: steps between checkpoints; the last step and each new best dev metric are saved too.
      keep_last: how many of the newest checkpoints to keep, besides the best.
      frozen: patterns of names of what is not trained, such as "encoder.embedding.*" or "auxiliary.head.*".
      auxiliary_from: a run; what its objective had beside the model is what this one's starts from.
      objective_description: what must be the same when the run is resumed; by default the names and values
        of the objective's fields.
      on_start: called with `output_dir` before the first step, once that is known to be usable; writes there
        what is needed to load the run's checkpoints as models.

    Raises:
      UserError: settings that make no sense, a directory that cannot be resumed or in which another process
        trains, a first batch without any negative, or a loss or gradient that is not finite (no checkpoint
        is written after it).
    """
    # ---------------------------------------------------------------- settings
    partitioner = MeshConfig().build() if partitioner is None else partitioner
    counts = {"steps": steps, "batch_size": batch_size, "log_every": log_every, "eval_every": eval_every}
    counts |= {"checkpoint_every": checkpoint_every, "keep_last": keep_last}
    check_settings(counts, partitioner, objective)
    evaluators = [*of_dev(dev, dev_distractors, objective), *evaluators]
    check_evaluators(evaluators, dev_metric)
    built = optimizer.build(steps)

    part, parts = distributed.share_of_batch(partitioner)
    batches_from = functools.partial(
        data.batches, batch_size=batch_size, seed=seed, process_index=part, process_count=parts
    )
    batches_from(start_step=0)  # what cannot be is refused before anything is made
    bench = Bench(
        tokenizer=tokenizer,
        form=form,
        objective=objective,
        training_data=data,
        batch_size=batch_size,
        partitioner=partitioner,
        on_bad_input=on_bad_input,
    )
    suite = Suite(evaluators, bench, best_by=dev_metric, eval_every=eval_every, steps=steps)

    # ---------------------------------------------------------------- the run's directory
    run_dir = path_of(output_dir)
    with contextlib.ExitStack() as closing:
        hold = closing.enter_context(held(run_dir))
        auxiliary = objective.auxiliary(
            model, rngs=nnx.Rngs(jax.random.fold_in(jax.random.key(seed), AUXILIARY))
        )
        checkpoints = Checkpoints(
            run_dir,
            agreed_settings(
                model,
                auxiliary,
                objective_description or describe(objective),
                data,
                optimizer,
                dev=suite.told,
                steps=steps,
                batch_size=batch_size,
                seed=seed,
                frozen=frozen,
                parts=parts,
            )
            | stages.describe(auxiliary_from),
            keep_last=keep_last,
            metric=suite.best_by,
            greater_is_better=suite.greater_is_better,
            hold=hold,
        )
        closing.callback(checkpoints.close)

        # ------------------------------------------------------------ state: the newest checkpoint, or step 0
        plan = state_lib.plan_state(
            model, built.transform, partitioner, auxiliary=auxiliary, frozen=(*objective.frozen, *frozen)
        )
        resumed = checkpoints.open(plan.abstract)
        start = resumed.step if resumed else 0
        state = resumed.state if resumed else state_lib.initial_state(model, built.transform, plan, auxiliary)
        if auxiliary_from and not resumed:
            state = stages.with_auxiliary_of(auxiliary_from, state, plan)
        closing.callback(lambda: state_lib.put_into(model, state.params))
        if start == steps:
            mark_complete(run_dir, steps)
            return result(start, start, None, checkpoints)

        # ------------------------------------------------------------ batches, made ahead on a thread
        batches = closing.enter_context(
            prefetch(
                batches_from(start_step=start),
                lambda batch: distributed.place_share(batch, partitioner, part, parts),
            )
        )
        first = next(batches)

        # ------------------------------------------------------------ compilation, once
        def compile_step(objective: Objective) -> Any:
            step_fn = state_lib.make_step(plan, objective, built, seed)
            jitted = jax.jit(step_fn, donate_argnums=0, out_shardings=(plan.shardings, None))
            with partitioner(), as_run_on(partitioner.mesh):
                return jitted.lower(state, first).compile()

        chunks_note = None
        with timed("compiling the step"):
            if getattr(objective, "chunks", 1) == "auto":
                objective, compiled, chunks_note = fit_chunks(
                    objective,
                    compile_step,
                    rows=batch_size // partitioner.batch_divisor(),
                    limit=device_memory(),
                )
            else:
                compiled = compile_step(objective)
        if evaluators:
            with timed("compiling the evaluation"):
                suite.compile(plan)

        if on_start and jax.process_index() == 0:
            on_start(run_dir)

        # ------------------------------------------------------------ the loop
        log = RunLog(run_dir, start_step=start, hold=hold)
        closing.callback(log.close)
        narrator = Narrator(steps=steps, start_step=start, batch_size=batch_size)
        closing.callback(narrator.close)
        stop = closing.enter_context(StopSignal())
        if chunks_note:
            narrator.say(chunks_note)
        if start:
            narrator.say(f"resuming {run_dir} at step {start}")

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

        warned: set[str] = set()

        def check_negatives(done: int, values: Mapping[str, float], what: str = "batch") -> None:
            if values.get("rows_without_negatives", 0.0) < 1 - 1e-6:
                return
            sentence = f"step {done}: {NO_NEGATIVES.format(what)}"
            if done == 1 and what == "batch":
                raise UserError(f"{sentence}; give other pairs, hard negatives or a larger batch_size")
            if what not in warned:
                narrator.say(f"warning: {sentence}")
                warned.add(what)

        def settle_metrics(done: int, metrics: state_lib.Metrics) -> None:
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            check_finite(done, values)
            check_negatives(done, values)
            narrator.step(done, values["loss"])
            if done % log_every == 0 or done == steps:
                values["examples_per_second"] = narrator.lap(done)
                log.write(done, values)
                narrator.tell(done, values)

        done, unread = start, None
        closing.enter_context(jax.transfer_guard("disallow"))
        for batch in itertools.chain([first], batches):
            state, metrics = compiled(state, batch)
            if unread:
                settle_metrics(*unread)
            done, unread = done + 1, (done + 1, metrics)

            stopping = stop.requested(done)
            evaluating = suite.due(done)
            saving = done % checkpoint_every == 0 or done == steps or stopping
            if evaluating or saving:
                settle_metrics(*unread)
                unread, value = None, None
                with narrator.paused(), jax.transfer_guard("allow"):
                    if evaluating:
                        scores = evaluated(done, state)
                        check_negatives(done, scores, "dev batches")
                        value = scores.get(dev_metric)
                        log.write(done, {f"dev/{k}": v for k, v in scores.items()})
                        narrator.tell_dev(done, {k: scores[k] for k in suite.directions if k in scores})
                    if saving or checkpoints.is_best(value):
                        log.checkpoint(checkpoints.settle())
                        checkpoints.save(done, state, value)
            else:
                log.checkpoint(checkpoints.poll())
            if stopping or done == steps:
                break

        # ------------------------------------------------------------ the end
        log.checkpoint(checkpoints.settle())
        if done == steps:
            mark_complete(run_dir, steps)
        return result(start, done, stop.received if done < steps else None, checkpoints)


def of_dev(dev: Any, distractors: int, objective: Objective) -> list[Evaluator]:
    """Returns the evaluators of dev pairs: retrieval and, where plain pairs have what it reads, the loss."""
    if dev is None:
        return []
    of_loss = [Loss(data=dev)] if objective.evaluated_on_pairs else []
    return [Retrieval(data=dev, distractors=distractors), *of_loss]


def check_settings(counts: Mapping[str, int], partitioner: Partitioner, objective: Any) -> None:
    """Raises a UserError for settings that no run can have.

    Args:
      counts: settings that must be positive whole numbers, among them `batch_size`.
      partitioner: the mesh.
      objective: the training method; where it cuts a batch into `chunks`, these must divide it.
    """
    for name, count in counts.items():
        if count <= 0:
            raise UserError(f"{name} must be at least 1, not {count}")
    batch_size, divisor = counts["batch_size"], partitioner.batch_divisor()
    if batch_size % divisor:
        raise UserError(
            f"batch_size must be a multiple of the {divisor} devices that share it, not {batch_size}"
        )
    chunks = getattr(objective, "chunks", 1)
    if isinstance(chunks, int) and batch_size % chunks:
        raise UserError(f"a batch of {batch_size} examples cannot be embedded in {chunks} equal chunks")


class StopSignal:
    """Notes SIGTERM and SIGINT while in force; a second SIGINT interrupts at once.

    With several processes all of them must stop after the same step: there JAX's preemption service, which
    listens for SIGTERM itself, agrees on it.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.received: signal.Signals | None = None
        self._usual: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            self._usual = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM
        return self.received is not None

    def _note(self, number: int, frame: object) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        # Not print: a signal may come in the midst of one.
        os.write(2, f"\n{self.received.name}: ends after this step, and saves it\n".encode())


def mark_complete(run_dir: Path, steps: int) -> None:
    """Writes RUN/COMPLETE, unless it is there."""
    path = run_dir / COMPLETE
    if jax.process_index() == 0 and not path.exists():
        with atomic_file(path) as file:
            file.write(f"{steps} steps\n")


def result(
    started_at: int, step: int, stopped_by: signal.Signals | None, checkpoints: Checkpoints
) -> TrainResult:
    """Makes the result of a run that is at `step`."""
    best_step, best_value = checkpoints.best() or (None, None)
    return TrainResult(started_at, step, stopped_by, best_step, best_value)

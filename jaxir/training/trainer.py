"""Training a recipe in a directory: `prepare` builds all that a run needs, and `loop.Run.train` trains it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import PromptTokens, TextFormat
from jaxir.core.platforms import check_devices
from jaxir.data.batches.text_data import check_data, dataset_of
from jaxir.data.text.truncation import ARGUMENTS, FLAGS, dataset_truncation_note
from jaxir.interop.model_dir import LoadedModel
from jaxir.objectives.objective import auxiliary_of
from jaxir.runtime import distributed
from jaxir.runtime.partitioning import MeshConfig, Partitioner
from jaxir.training.evaluators.evaluation_context import Bench
from jaxir.training.evaluators.evaluator import Evaluator
from jaxir.training.loop import Run, TrainResult
from jaxir.training.run import warm_start
from jaxir.training.run.profiling import steps_to_trace
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_directory import RunDirectory
from jaxir.training.run.run_fingerprint import describe
from jaxir.training.run.run_settings import agreed_settings, check_alike, weights
from jaxir.training.run.trackers import check_trackers
from jaxir.training.step import train_state
from jaxir.training.step.length import lengthened
from jaxir.training.suite import Suite, evaluators_of

AUXILIARY = 0xA0  # folded into the seed, so that auxiliary parameters differ from the model's


def no_bindings(function: Any) -> Mapping[str, Any]:
    """Returns {}: without gin, no argument of a function is bound."""
    return {}


def train(
    recipe: Recipe,
    output_dir: str | Path,
    *,
    bindings: Callable[[Any], Mapping[str, Any]] = no_bindings,
    on_start: Callable[[Path], None] = lambda _: None,
    kept: bool = True,
) -> TrainResult:
    """Trains a recipe's model, or resumes the run in `output_dir` from its newest checkpoint.

    A resumed run sees the same batches and random numbers as an uninterrupted one, and on CPU ends with the
    same parameters bit for bit. On SIGTERM or SIGINT, `train` finishes the current step, saves a checkpoint
    and returns; a second SIGINT interrupts at once.

    Args:
      recipe: the settings. Its `model` may also be a `LoadedModel`, which is trained in place. Its `data` may
        also be a built dataset, and its `mesh` a Partitioner.
      output_dir: the run's directory, local or gs://BUCKET/PATH (see `run_directory`).
      bindings: maps a function to its arguments that gin or other code binds. A resumed run must
        have the same bindings.
      on_start: called with `output_dir` before the first step, once the directory is known to be usable.
      kept: whether `output_dir` outlives the call; if not, a stopped run saves no checkpoint.

    Raises:
      UserError: impossible settings, an objective of another kind of model, a directory that cannot be
        resumed or in which another process trains, a first batch without any negative, or a loss or gradient
        that is not finite (no checkpoint is written after it).
    """
    with contextlib.ExitStack() as closing:
        run = prepare(recipe, output_dir, closing, bindings=bindings)
        return run.train(on_start=on_start, kept=kept)


_ALIKE = ("eval_every", "checkpoint_every", "early_stopping")  # settings that a resume may change


def prepare(
    recipe: Recipe,
    output_dir: str | Path,
    closing: contextlib.ExitStack,
    *,
    bindings: Callable[[Any], Mapping[str, Any]] = no_bindings,
) -> Run:
    """Builds the mesh, model, data, evaluators and state of a new or resumed run.

    Takes the arguments of `train`; closing `closing` releases the run's locks and other resources.
    """
    # First check the settings that can be checked without the model and the data.
    recipe, partitioner, evaluators = _checked(recipe)
    directory = closing.enter_context(RunDirectory(output_dir))

    # Build the model and read the data, whose size determines the number of steps of the epochs.
    loaded = recipe.model
    if not isinstance(loaded, LoadedModel):
        loaded = loaded.build(seed=recipe.seed, partitioner=partitioner)
    recipe.objective.check_model(loaded.model)
    form = loaded.settings.text_format_of(loaded.tokenizer, recipe.num_negatives)
    names = ARGUMENTS if bindings is no_bindings else FLAGS
    recipe, whole, data = _with_data(recipe, loaded, form, names)

    # Fix all that determines the order of the batches, and read the data of the evaluators.
    share = distributed.share_of_batch(partitioner)
    batches_from = functools.partial(
        data.batches,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        process_index=share[0],
        process_count=share[1],
    )
    batches_from(start_step=0)  # called only to raise its errors about impossible settings
    suite = _suite_of(recipe, evaluators, loaded, form, data, partitioner)

    # Build the objective's auxiliary parameters, and make or restore the state.
    rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(recipe.seed), AUXILIARY))
    auxiliary = auxiliary_of(recipe.objective, loaded.model, form=form, rngs=rngs)
    recipe.objective.read_corpus(auxiliary, data)
    described = {"objective": describe(recipe.objective, bindings), "dev": suite.fingerprint}
    agreed = agreed_settings(recipe, loaded.model, auxiliary, whole, **described, parts=share[1])
    agreed |= weights(loaded.model, partitioner) | warm_start.describe(recipe.auxiliary_from)
    check_alike(agreed | {name: getattr(recipe, name) for name in _ALIKE})
    optimizer = recipe.optimizer.build(recipe.steps)
    how = {"auxiliary": auxiliary, "frozen": (*recipe.objective.frozen, *(recipe.frozen or ()))}
    how["elsewhere"] = loaded.base and loaded.base.holds
    plan = train_state.plan_state(loaded.model, optimizer.transform, partitioner, **how)
    resumed = directory.open(
        agreed,
        plan.saved(plan.abstract),
        keep_last=recipe.keep_last,
        metric=suite.best_by,
        greater_is_better=suite.greater_is_better,
    )
    if resumed:
        state = plan.restored(resumed.state, loaded.model)
    else:
        state = train_state.initial_state(loaded.model, optimizer.transform, plan, auxiliary)
        if recipe.auxiliary_from:
            state = warm_start.with_auxiliary_of(
                recipe.auxiliary_from,
                state,
                plan,
                read_corpus=lambda beside: recipe.objective.read_corpus(beside, data),
            )
    plan, state = train_state.halve_frozen(loaded.model, plan, state)
    return Run(
        recipe=recipe,
        directory=directory,
        loaded=loaded,
        partitioner=partitioner,
        batches_from=batches_from,
        share=share,
        suite=suite,
        plan=plan,
        optimizer=optimizer,
        state=state,
        start=resumed.step if resumed else 0,
    )


def _suite_of(
    recipe: Recipe,
    evaluators: Sequence[Evaluator],
    loaded: LoadedModel,
    form: TextFormat,
    data: Any,
    partitioner: Partitioner,
) -> Suite:
    bench = Bench(
        tokenizer=loaded.tokenizer,
        form=form,
        objective=recipe.objective,
        training_data=data,
        batch_size=recipe.batch_size,
        partitioner=partitioner,
        on_bad_input=recipe.on_bad_input,
    )
    every = {"eval_every": recipe.eval_every, "steps": recipe.steps}
    return Suite(evaluators, bench, best_by=recipe.dev_metric, **every)


def _checked(recipe: Recipe) -> tuple[Recipe, Partitioner, Sequence[Evaluator]]:
    """Checks a recipe; returns it (with shares as steps, if `steps` is set), its mesh and its evaluators."""
    check_devices()
    if recipe.steps is not None:
        recipe = recipe.settled()
    mesh = recipe.mesh or MeshConfig()
    partitioner = mesh if isinstance(mesh, Partitioner) else mesh.build()
    recipe.check_batch(partitioner)
    check_data("data", recipe.data)
    check_trackers(recipe.trackers)
    return recipe, partitioner, evaluators_of(recipe)


def _with_data(
    recipe: Recipe, loaded: LoadedModel, form: TextFormat, names: tuple[str, str]
) -> tuple[Recipe, Any, Any]:
    """Returns a recipe with epochs as steps, its dataset with full padding, and the data to train on.

    Prints how many texts are truncated; `names` are the names of the two settings of maximum length.
    """
    features = recipe.objective.features(form)
    whole = dataset_of(recipe.data, loaded.tokenizer, features, on_bad_input=recipe.on_bad_input)
    cut = dataset_truncation_note(whole, form, names)
    if cut and jax.process_index() == 0:
        print(cut, file=sys.stderr, flush=True)
    counted = any(isinstance(feature, PromptTokens) for feature in features.values())
    if whole.own_prompts and form.prompt_tokens is not None and not counted:
        raise UserError(
            "the data have prompts of their own, and the model's pooling leaves out prompts, but"
            f" {type(recipe.objective).__name__} does not read how many tokens they have: leave WithPrompts"
            " out, or use Contrastive"
        )
    data = whole.shortened() if whole is not recipe.data else whole
    if recipe.steps is None:
        how = {"batch_size": recipe.batch_size, "min_steps": recipe.min_steps}
        if note := lengthened(recipe.epochs, pairs=data.num_examples, **how):
            distributed.note(note)
        recipe = recipe.settled(data.num_examples)
    steps_to_trace(recipe.profile_steps, recipe.steps)  # called only to check the range
    return recipe, whole, data.scheduled(recipe.steps)

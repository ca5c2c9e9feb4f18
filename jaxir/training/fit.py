"""`fit`: training as a library call, from pairs of texts to an encoder, a reranker or a generator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError, suggest
from jaxir.core.features import Features
from jaxir.core.values import Count, Interval, Natural, Positive, Seed, Steps
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.text_data import TextData, check_data
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.sets.own_pairs import Pairs
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.interop.build import (
    FromScratch,
    Pretrained,
    PretrainedCrossEncoder,
    PretrainedHybrid,
    PretrainedMultiVector,
    PretrainedSeq2Seq,
)
from jaxir.interop.model import stored
from jaxir.interop.model.overrides import Overrides
from jaxir.interop.model.stored import StoredModel
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.hybrid import HybridContrastive
from jaxir.objectives.late_interaction import LateInteraction
from jaxir.objectives.objective import Objective
from jaxir.objectives.query_reranking import QueryReranking
from jaxir.objectives.reranking import Reranking
from jaxir.objectives.seq2seq import Seq2Seq
from jaxir.retrieval.encoding.generator import Generator
from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder
from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
from jaxir.retrieval.encoding.pair_scorer import CrossEncoder
from jaxir.retrieval.encoding.query_reranker import QueryReranker
from jaxir.retrieval.encoding.text_encoder import DualEncoder
from jaxir.runtime.partitioning import Partitioner
from jaxir.storage.temporary_outputs import temporary_directory
from jaxir.training import trainer
from jaxir.training.loop import TrainResult
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.optimizers import AdamW, Optimizer

# `fit` has the defaults of gin/pairs.gin and gin/generator.gin; tests compare them.
WRITING = Seq2Seq(source="passage", target="query")
OBJECTIVE = Contrastive(loss=functools.partial(in_batch_softmax, temperature=0.05))
OPTIMIZER = AdamW(learning_rate=3e-5, warmup_steps=0.05)
MIN_STEPS, DROPOUT = 100, 0.0
Start = (
    str
    | DualEncoder
    | Pretrained
    | PretrainedCrossEncoder
    | PretrainedHybrid
    | PretrainedMultiVector
    | PretrainedSeq2Seq
    | FromScratch
)
_CALLED = {"data": "pairs", "mesh": "partitioner"}  # {field of `Recipe`: the argument of `fit` that sets it}


def fit(
    model: Start,
    pairs: TextData,
    *,
    steps: Steps | None = None,
    epochs: Positive | None = None,
    batch_size: Count = 32,
    objective: Objective | None = None,
    optimizer: Optimizer | None = None,
    dev: TextData | None = None,
    eval_every: Interval = 0.2,
    num_negatives: Natural | None = None,
    output_dir: str | Path | None = None,
    partitioner: Partitioner | None = None,
    seed: Seed = 0,
    **settings: Any,
) -> DualEncoder | CrossEncoder | HybridEncoder | MultiVectorEncoder | Generator:
    """Trains a dual encoder on pairs of texts.

    With a `PretrainedCrossEncoder` as model, `fit` trains a cross-encoder, by default to rank the passage of
    a query above its hard negatives. With a `PretrainedSeq2Seq`, it trains a generator, by default to write
    the query of a passage; evaluations then measure the loss on `dev`. With a `PretrainedMultiVector`, it
    trains a multi-vector encoder (late interaction), by default with the in-batch softmax of MaxSim, and with
    a `PretrainedHybrid` a hybrid encoder (BGE-M3), by self-distillation.

    The given `model` is not changed. Defaults are those of gin/pairs.gin. Ctrl-C or SIGTERM ends training
    after the current step. With `output_dir`, `fit` then saves a checkpoint and prints a warning with the
    step, and the same call resumes the run.

    The result's attribute `training` is a `jaxir.training.loop.TrainResult`: the steps of the run, the last
    finished step, the signal that stopped the run (None if it is complete) and the best checkpoint.

    Args:
      model: the model to start from: a name (`st:NAME`, `hf:NAME`, a jaxir directory) or an encoder, both
        trained without dropout, or a Pretrained(...) or FromScratch(...), which set lengths, dropout and
        towers.
      pairs: `Pairs`, or another kind of data in `jaxir.data`, such as BeirPairs(directory=...).
      steps: number of optimizer steps; give either steps or epochs.
      epochs: number of times to go through the pairs; by default once, and at least 100 steps.
      batch_size: number of pairs per step, over all devices together.
      objective: the training method; by default the in-batch softmax at temperature 0.05, Reranking(),
        LateInteraction(...) or Seq2Seq(...).
      optimizer: AdamW(...) or Adafactor(...); by default AdamW with learning rate 3e-5 and a warm-up.
      dev: pairs to evaluate on while training; the result is then the best checkpoint on `dev`, not the last.
      eval_every: number of steps between evaluations on `dev`; a value below 1 is a share of all steps.
      num_negatives: hard negatives per pair in a batch; by default 1 if all of `Pairs` have some, else 0.
      output_dir: the run's directory, new or to be resumed; every command can open it as a model. By default
        the run is not kept on disk.
      partitioner: the device mesh; by default the batch is split over all devices.
      seed: determines the order of the data, dropout and the initial values of new parameters.
      **settings: other fields of a `jaxir.training.run.recipe.Recipe`: log_every, evaluators, ...

    Raises:
      UserError: a setting, the model, the data or `output_dir` cannot be used.
      KeyboardInterrupt: Ctrl-C or SIGTERM stopped training, and no `output_dir` was given.
    """
    _check(settings, steps=steps, dev=dev)
    if num_negatives is None:
        num_negatives = int(isinstance(pairs, Pairs) and all(pairs.negatives))
    if steps is None and epochs is None:
        epochs, settings = 1, {"min_steps": MIN_STEPS} | settings
    kind, usual = _kind_of(model, objective)
    if kind is Generator:
        settings = {"dev_metric": "loss"} | settings
    recipe = Recipe(
        model=_start(model),
        objective=objective or usual,
        data=_shortened("pairs", pairs),
        dev=None if dev is None else _shortened("dev", dev),
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer or OPTIMIZER,
        mesh=partitioner,
        num_negatives=num_negatives,
        seed=seed,
        eval_every=eval_every,
        **settings,
    )
    return _trained(recipe, kind, output_dir)


def _trained(recipe: Recipe, kind: type[Any], output_dir: str | Path | None) -> Any:
    with contextlib.ExitStack() as closing:
        place = output_dir or closing.enter_context(temporary_directory()) / "run"
        result = trainer.train(recipe, place, kept=output_dir is not None)
        if result.stopped_by is not None:
            _report_stop(result, output_dir)
        encoder = kind.load(str(place))
    encoder.training = result
    if output_dir is None:
        encoder.spec = None
    return encoder


def _check(settings: Mapping[str, Any], *, steps: int | None, dev: Any) -> None:
    known = {field.name: field.name for field in dataclasses.fields(Recipe)} | _CALLED
    for name in settings:
        if known.get(name) != name:
            raise UserError(f"fit has no setting {name!r}{suggest(known.get(name, name), known.values())}")
    if steps is not None and "min_steps" in settings:
        raise UserError("min_steps only applies with epochs, but steps is given: leave min_steps out")
    if "dev_metric" in settings and dev is None and not settings.get("evaluators"):
        raise UserError(
            f"dev_metric is {settings['dev_metric']!r}, but nothing is evaluated: give dev or evaluators, or"
            " leave dev_metric out"
        )


def _kind_of(model: Any, objective: Objective | None) -> tuple[type[Any], Objective]:
    """Returns the class that opens the trained model, and the default objective."""
    if isinstance(model, PretrainedCrossEncoder):
        return (QueryReranker if isinstance(objective, QueryReranking) else CrossEncoder), Reranking()
    if isinstance(model, PretrainedSeq2Seq):
        return Generator, WRITING
    if isinstance(model, PretrainedMultiVector):
        return MultiVectorEncoder, LateInteraction()
    if isinstance(model, PretrainedHybrid):
        return HybridEncoder, HybridContrastive()
    return DualEncoder, OBJECTIVE


def _report_stop(result: TrainResult, output_dir: str | Path | None) -> None:
    """Warns that training was stopped; raises KeyboardInterrupt if nothing of the run is kept."""
    stop = f"training was stopped by {result.stopped_by.name} after step {result.step} of {result.steps}"
    if output_dir is None:
        raise KeyboardInterrupt(f"{stop}; no checkpoint was saved: give output_dir to resume stopped runs")
    which = "the last step" if result.best_step is None else f"step {result.best_step}, the best so far"
    print(
        f"warning: {stop}; the model has the weights of {which}; call fit again with the same arguments to"
        " resume",
        file=sys.stderr,
    )


@dataclasses.dataclass(frozen=True)
class Shortened(TextData):
    """Data that are padded only to their longest texts instead of the model's length, for faster steps."""

    data: TextData

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> Dataset:
        found = self.data.build(tokenizer, features, on_bad_input=on_bad_input)
        return found.shortened() if isinstance(found, ArrayDataset) else found


def _shortened(what: str, data: Any) -> Any:
    check_data(what, data)
    return Shortened(data) if isinstance(data, TextData) else data


@dataclasses.dataclass(frozen=True)
class Copied:
    """Builds a copy of an encoder's model without dropout; training the copy leaves the encoder unchanged."""

    encoder: DualEncoder

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> model_dir.LoadedModel:
        # `params_of` copies parameters to the host, because training donates the arrays that it starts from.
        encoder, model = self.encoder, self.encoder.model
        found = StoredModel(
            config=model.config,
            params=stored.params_of(model),
            tokenizer=encoder.tokenizer,
            settings=encoder.settings,
        )
        found = Overrides(dropout_rate=DROPOUT).apply(found, seed=seed, where=repr(encoder))
        built = stored.build(found, partitioner)
        return model_dir.LoadedModel(built, encoder.tokenizer, encoder.settings, encoder.fingerprint)


def _start(model: Any) -> Any:
    if isinstance(model, str | Path):
        return Pretrained(source=str(model), dropout_rate=DROPOUT)
    if isinstance(model, DualEncoder):
        return Copied(model)
    if not hasattr(model, "build"):
        raise UserError(f"the model must be a name, a DualEncoder or a Pretrained(...), not {model!r:.60}")
    return model

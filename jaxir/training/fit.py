"""`fit`: training as a library call; pairs of texts in, an encoder out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

from jaxir.data.array_dataset import ArrayDataset
from jaxir.data.own_pairs import Pairs
from jaxir.data.text_data import TextData
from jaxir.errors import UserError
from jaxir.interop import model_dir, stored
from jaxir.interop.build import FromScratch, Pretrained, PretrainedCrossEncoder
from jaxir.interop.overrides import Overrides
from jaxir.interop.stored import StoredModel
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.models.cross_encoder import CrossEncoderModel
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.objective import Objective
from jaxir.partitioning import MeshConfig, Partitioner
from jaxir.retrieval.encoding.cross_encoder import CrossEncoder
from jaxir.retrieval.encoding.dual_encoder import DualEncoder
from jaxir.simple_types import Count, Natural, Positive, PositiveNumber, Seed, check_arguments
from jaxir.training import loop
from jaxir.training.checkpoints import check_run_dir
from jaxir.training.holding import held
from jaxir.training.length import check_length, in_steps, steps_of
from jaxir.training.optimizers import AdamW, Optimizer

# As in gin/pairs.gin, which tests hold them against.
OBJECTIVE = Contrastive(loss=functools.partial(in_batch_softmax, temperature=0.05))
OPTIMIZER = AdamW(learning_rate=3e-5, warmup_steps=0.05)
MIN_STEPS, DROPOUT = 100, 0.0


def fit(
    model: str | DualEncoder | Pretrained | PretrainedCrossEncoder | FromScratch,
    pairs: TextData,
    *,
    steps: Count | None = None,
    epochs: Positive | None = None,
    batch_size: Count = 32,
    objective: Objective | None = None,
    optimizer: Optimizer | None = None,
    dev: TextData | None = None,
    eval_every: PositiveNumber = 0.2,
    num_negatives: Natural | None = None,
    output_dir: str | Path | None = None,
    partitioner: Partitioner | None = None,
    seed: Seed = 0,
    **settings: Any,
) -> DualEncoder | CrossEncoder:
    """Trains a dual encoder on pairs of texts, or with `PretrainedCrossEncoder` a cross-encoder.

    What is given as `model` stays as it is. Defaults are what gin/pairs.gin sets. Ctrl-C ends training after
    the step at hand; the encoder has then been trained that far.

    Args:
      model: what to start from: a name (`st:NAME`, `hf:NAME`, a directory of ours) or an encoder, either
        without dropout, or a Pretrained(...) or FromScratch(...), which say lengths, dropout and towers.
      pairs: `Pairs`, or another kind of data of `jaxir.data`, such as BeirPairs(directory=...).
      steps: optimizer steps; or else
      epochs: how often to go through the pairs. By default once, and at least 100 steps.
      batch_size: pairs of a step, over all devices.
      objective: the training method; by default the in-batch softmax at temperature 0.05.
      optimizer: AdamW(...) or Adafactor(...); by default AdamW at 3e-5, with a warm-up.
      dev: pairs to evaluate on while training; the encoder is then the best by them, not the last.
      eval_every: steps between evaluations on them; below 1, a share of all steps.
      num_negatives: hard negatives of each pair in a batch; by default 1 where each of `Pairs` has some.
      output_dir: the run's directory, new or to be resumed, which is a model to every command; by default
        nothing of the run is kept.
      partitioner: the mesh; by default all devices split the batch.
      seed: of the order of the data, of dropout and of new parameters.
      **settings: what else `jaxir.training.loop.train` takes: log_every, checkpoint_every, dev_metric, ...

    Raises:
      UserError: no such model, pairs or settings that make no sense, or an `output_dir` that cannot be used.
    """
    numbers = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "eval_every": eval_every}
    check_arguments(fit, **numbers, num_negatives=num_negatives, seed=seed)
    if steps is not None or epochs is not None:
        check_length(steps, epochs, min_steps=1)
    partitioner = partitioner or MeshConfig().build()
    with contextlib.ExitStack() as closing:
        place = output_dir or closing.enter_context(tempfile.TemporaryDirectory(prefix="jaxir-fit-"))
        closing.enter_context(held(place))
        check_run_dir(place)
        loaded = _start(model, seed, partitioner)
        if num_negatives is None:
            num_negatives = int(isinstance(pairs, Pairs) and all(pairs.negatives))
        objective = objective or OBJECTIVE
        features = objective.features(loaded.settings.text_format(num_negatives))
        data = Shortened(pairs).build(loaded.tokenizer, features)
        if steps is None:
            how_long = (1, MIN_STEPS) if epochs is None else (epochs, 1)
            steps = steps_of(
                how_long[0], pairs=data.num_examples, batch_size=batch_size, min_steps=how_long[1]
            )
        loop.train(
            model=loaded.model,
            objective=objective,
            data=data,
            dev=dev and Shortened(dev),
            tokenizer=loaded.tokenizer,
            form=loaded.settings.text_format(num_negatives),
            output_dir=place,
            steps=steps,
            batch_size=batch_size,
            optimizer=optimizer or OPTIMIZER,
            partitioner=partitioner,
            seed=seed,
            eval_every=in_steps("eval_every", eval_every, steps),
            on_start=functools.partial(
                model_dir.write_description,
                config=loaded.model.config,
                tokenizer=loaded.tokenizer,
                settings=loaded.settings,
            ),
            **settings,
        )
        kind = CrossEncoder if isinstance(loaded.model, CrossEncoderModel) else DualEncoder
        encoder = kind.load(str(place))
    if output_dir is None:
        encoder.spec = None
    return encoder


@dataclasses.dataclass(frozen=True)
class Shortened:
    """Data whose texts are as long as the longest: a model can read more, but steps need take no longer."""

    data: TextData

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the data; see `TextData`."""
        found = self.data.build(*args, **kwargs)
        return found.shortened() if isinstance(found, ArrayDataset) else found


def _start(model: Any, seed: int, partitioner: Partitioner) -> model_dir.LoadedModel:
    if isinstance(model, str | Path):
        model = Pretrained(source=str(model), dropout_rate=DROPOUT)
    if isinstance(model, DualEncoder):
        # By way of the host, for the steps of training take the memory of the parameters that they are given.
        params = stored.params_of(model.model)
        found = StoredModel(
            config=model.model.config, params=params, tokenizer=model.tokenizer, settings=model.settings
        )
        found = Overrides(dropout_rate=DROPOUT).apply(found, seed=seed, where=repr(model))
        built = stored.build(found, partitioner)
        return model_dir.LoadedModel(built, model.tokenizer, model.settings, model.fingerprint)
    if not hasattr(model, "build"):
        raise UserError(f"the model must be a name, a DualEncoder or a Pretrained(...), not {model!r:.60}")
    return model.build(seed=seed, partitioner=partitioner)

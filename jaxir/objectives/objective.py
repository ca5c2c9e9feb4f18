"""What a training method is: what a batch holds, what is trained beside the model, and the loss."""

from __future__ import annotations

import abc
import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.errors import UserError, suggest
from jaxir.core.features import Features, TextFormat, TokenCounts
from jaxir.models.cross_encoder import CrossEncoderModel
from jaxir.models.dual_encoder import DualEncoderModel
from jaxir.models.layers import not_of
from jaxir.models.seq2seq import Seq2SeqModel

# What each kind of model is called, and what gives one.
_KINDS = {
    DualEncoderModel: ("a dual encoder", "Pretrained(...) (gin/models/minilm.gin)"),
    CrossEncoderModel: ("a cross-encoder", "PretrainedCrossEncoder(...) (gin/models/cross_encoder.gin)"),
    Seq2SeqModel: ("a generator", "PretrainedSeq2Seq(...) (gin/models/seq2seq.gin)"),
}
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class Corpus(Protocol):
    """What an objective may read of training data, as `ArrayDataset` of jaxir.data.batches has it."""

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts: ...


class Objective(abc.ABC):
    """A training method: one file, usually a frozen dataclass of its settings.

    Attributes:
      frozen: patterns of names (as `auxiliary.teacher.*`) of what it does not train.
      evaluated_on_pairs: whether its loss can be had of plain pairs, as dev data are; without, the dev
        evaluation has only retrieval's metrics.
      searched_on_pairs: whether the model makes vectors, by which dev pairs are searched; without, the dev
        evaluation has only the loss.
      reads_with: the method of the model that it reads texts with, by which a model of another kind is
        refused before data are read; None: only once the loss is traced.
    """

    frozen: tuple[str, ...] = ()
    evaluated_on_pairs: bool = True
    searched_on_pairs: bool = True
    reads_with: str | None = None

    def check_model(self, model: Any) -> None:
        """Raises a UserError where `model` is of another kind than what this trains."""
        if self.reads_with is not None and not hasattr(model, self.reads_with):
            raise UserError(_other_kind(self, model, self.reads_with))

    @abc.abstractmethod
    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds."""

    def auxiliary(self, model: nnx.Module, *, form: TextFormat, rngs: nnx.Rngs) -> nnx.Module | None:
        """Returns what is trained or used beside the model and never exported; None for nothing.

        Its `nnx.Param`s are trained, unless `frozen`; other variables (`nnx.BatchStat`) are state, which the
        objective changes in place. All are sharded, saved and resumed with the run.

        Args:
          model: which will be trained; may be of shapes alone, in a plan.
          form: lengths, prompts and the mask token of the texts.
          rngs: of the run's seed, not those of the model.
        """
        return None

    def read_corpus(self, auxiliary: Any, data: Corpus) -> None:
        """Sets variables of the auxiliary that follow from the training data, before the first step.

        They are no parameters, but state that is saved with the run; resuming it with other numbers is
        refused. In a plan, where nothing is read, they are as `auxiliary` made them.

        Args:
          auxiliary: what `auxiliary` made.
          data: what is trained on.

        Raises:
          UserError: the data cannot tell.
        """
        return

    @abc.abstractmethod
    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        auxiliary: Any = None,
        step: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss of the global batch and its metrics, float32 [].

        Args:
          model: the model.
          batch: arrays by feature, [B, ...].
          key: of all that is random in this step; None: nothing is, as in evaluation.
          auxiliary: what `auxiliary` made.
          step: int32 [], the number of finished steps; None in evaluation.
        """


def auxiliary_of(
    objective: Objective, model: nnx.Module, *, form: TextFormat, rngs: nnx.Rngs
) -> nnx.Module | None:
    """Returns the objective's `auxiliary`, once it is known to be a module of variables, or nothing.

    Arguments are those of `Objective.auxiliary`.

    Raises:
      UserError: it is something else, holds plain arrays, or asks the model for what that does not have.
    """
    with _naming_kind(objective, model):
        found = objective.auxiliary(model, form=form, rngs=rngs)
    if found is None:
        return None
    name = f"{type(objective).__name__}.auxiliary"
    if not isinstance(found, nnx.Module):
        raise UserError(
            f"{name} must return an nnx.Module or None, not {_told(found)}: what is no module goes into one,"
            " such as nnx.Dict(name=...)"
        )
    if plain := not_of(found, nnx.Variable):
        raise UserError(
            f"{name} holds {plain}, which would not be trained: jaxir.models.layers.param makes a parameter"
            " of an array, nnx.Variable what the objective changes itself"
        )
    return found


TRAINERS_METRICS = ("loss", "grad_norm", "learning_rate")


def loss_and_metrics(
    objective: Objective, model: Any, batch: Batch, key: jax.Array | None, auxiliary: Any, step: Any
) -> tuple[jax.Array, Metrics]:
    """Returns what `objective` says of a batch, once it is known to be a loss and metrics.

    Arguments are those of `Objective.__call__`.

    Raises:
      UserError: it does not take these arguments or asks the model for what that does not have; its answer
        is anything else than a float32 loss [] and a dict of numbers []; a metric has a name that is taken.
    """
    name = type(objective).__name__
    try:
        inspect.signature(objective).bind(model, batch, key, auxiliary=auxiliary, step=step)
    except TypeError as error:
        raise UserError(
            f"{name} must take (model, batch, key=None, *, auxiliary=None, step=None): {error}"
        ) from None
    with _naming_kind(objective, model):
        result = objective(model, batch, key, auxiliary=auxiliary, step=step)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise UserError(f"{name} must return the loss and a dict of metrics, not {_told(result)}")
    loss, metrics = result
    if not (isinstance(loss, jax.Array) and loss.shape == () and loss.dtype == jnp.float32):
        raise UserError(f"{name}'s loss must be float32 [], one number for the batch, not {_told(loss)}")
    for metric, value in metrics.items():
        if jnp.shape(value) != ():
            raise UserError(f"{name}'s metric {metric!r} must be one number, not {_told(value)}")
        if metric in TRAINERS_METRICS:
            raise UserError(
                f"{name}'s metric {metric!r} has a name of the trainer's own metrics: give it another"
            )
    return loss, metrics


@contextlib.contextmanager
def _naming_kind(objective: Objective, model: Any) -> Iterator[None]:
    """Has an objective that calls what the model does not have say so; other slips keep their traceback."""
    try:
        yield
    except AttributeError as error:
        if error.obj is not model or error.name is None:
            raise
        raise UserError(_other_kind(objective, model, error.name)) from error
    except TypeError as error:
        if str(error) != f"{type(model).__name__!r} object is not callable":
            raise
        raise UserError(_other_kind(objective, model, "__call__")) from error


def _other_kind(objective: Objective, model: Any, method: str) -> str:
    """Says that a model has no such method, and which kind has it."""
    name = type(objective).__name__
    given, _ = _KINDS.get(type(model), (f"a {type(model).__name__}", ""))
    for kind, (what, source) in _KINDS.items():
        if any(method in vars(parent) for parent in kind.__mro__):
            return (
                f"{name} trains {what} (it calls {method}), but the model is {given}: give model={source}, or"
                " another objective"
            )
    public = [known for known in dir(model) if not known.startswith("_")]
    return f"{name} calls {method}, which the model, {given}, does not have{suggest(method, public)}"


def _told(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__

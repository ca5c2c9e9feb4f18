"""What a training method is: what a batch holds, what is trained beside the model, and the loss."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.errors import UserError, suggest
from jaxir.core.features import Features, TextFormat, TokenCounts, Tokens
from jaxir.core.values import Count, Layers, Rate, Size, check_value, hints_of
from jaxir.models.cross_encoder import CrossEncoderModel
from jaxir.models.decoder import VectorDecoder, decoder_for
from jaxir.models.dual_encoder import DualEncoderModel
from jaxir.models.layers import unexpected_array
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextObjective(Objective):
    """The base of methods that train the passage tower on texts alone.

    Attributes:
      chunks: as in `Contrastive`.
    """

    chunks: Count | Literal["auto"] = 1
    evaluated_on_pairs = False

    def features(self, form: TextFormat) -> Features:
        """Returns what a batch holds: text_ids [L]."""
        return {"text_ids": Tokens("text", form.passage_length, form.passage_prompt)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderObjective(TextObjective):
    """The base of autoencoders, whose decoder sees a text's vector.

    Attributes:
      decoder_layers: blocks of the decoder.
      decoder_head_dim: dimensions of a head of its attention.
      decoder_dropout: its dropout.
    """

    decoder_layers: Layers = 2
    decoder_head_dim: Size = 32
    decoder_dropout: Rate = 0.1

    def decoder(self, model: Any, *, rngs: nnx.Rngs, **shape: Any) -> VectorDecoder:
        """Makes the decoder; `shape` as of `decoder_for`."""
        shape |= {"num_layers": self.decoder_layers, "head_dim": self.decoder_head_dim}
        return decoder_for(model.config, dropout_rate=self.decoder_dropout, rngs=rngs, **shape)


class LossObjective(Objective):
    """The base of dataclasses with a `loss` of `jaxir.losses`; give @dataclass repr=False to show it shortly.

    Attributes:
      loss: called with three arrays, and with `loss_inputs` by name.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]]
    loss_inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        check_loss(self.loss, *self.loss_inputs)

    def __repr__(self) -> str:
        others = (f for f in dataclasses.fields(self) if f.name != "loss")
        given = {f.name: getattr(self, f.name) for f in others if getattr(self, f.name) != f.default}
        values = [call_of(self.loss), *(f"{name}={value!r}" for name, value in given.items())]
        return f"{type(self).__name__}({', '.join(values)})"


def check_loss(loss: Callable[..., Any], *names: str) -> None:
    """Checks that a loss can be called with three arrays and others by name, and what is bound of it.

    Raises:
      UserError: it cannot: it is no loss, or one of other things; or a setting of it, bound by
        `functools.partial`, has a value that it may not have, or is none of its; likewise of a loss within.
    """
    _check_bound(loss)
    try:
        inspect.signature(loss).bind(None, None, None, **dict.fromkeys(names))
    except (TypeError, ValueError) as error:
        raise UserError(f"{call_of(loss)} is no loss for this objective: {error}") from error


def _check_bound(function: Any) -> None:
    """Checks what `functools.partial` has bound of a function, and of functions among that."""
    if not isinstance(function, functools.partial):
        return
    with contextlib.suppress(ValueError):  # of a function in C, which tells no signature
        try:
            inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
        except TypeError as error:
            raise UserError(f"{call_of(function)} cannot be called: {error}") from error
    hints = hints_of(function.func)
    for name, value in function.keywords.items():
        check_value(f"{name} of {call_of(function.func)}", value, hints.get(name, Any))
        _check_bound(value)


def call_of(loss: Callable[..., Any]) -> str:
    """Returns e.g. samtone(temperature=0.05)."""
    if not isinstance(loss, functools.partial):
        return getattr(loss, "__name__", repr(loss))
    values = [*map(repr, loss.args), *(f"{name}={value!r}" for name, value in loss.keywords.items())]
    return f"{call_of(loss.func)}({', '.join(values)})"


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
    if plain := unexpected_array(found, nnx.Variable):
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

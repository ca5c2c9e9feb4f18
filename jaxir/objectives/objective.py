"""The interface of an objective: the features of a batch, auxiliary parameters, and the loss."""

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
from jaxir.models.hybrid_encoder import HybridEncoderModel
from jaxir.models.layers import unexpected_array
from jaxir.models.multi_vector import MultiVectorModel
from jaxir.models.seq2seq import Seq2SeqModel
from jaxir.models.sparse_encoder import SparseEncoderModel

# Each kind of model: its name in error messages, and the value of the setting `model` that makes one.
_KINDS = {
    DualEncoderModel: ("a dual encoder", "Pretrained(...) (gin/models/minilm.gin)"),
    CrossEncoderModel: ("a cross-encoder", "PretrainedCrossEncoder(...) (gin/models/cross_encoder.gin)"),
    MultiVectorModel: (
        "a multi-vector encoder",
        "PretrainedMultiVector(...) (gin/models/multi_vector.gin)",
    ),
    Seq2SeqModel: ("a generator", "PretrainedSeq2Seq(...) (gin/models/seq2seq.gin)"),
    HybridEncoderModel: ("a hybrid encoder", "PretrainedHybrid(...) (gin/models/hybrid_encoder.gin)"),
    SparseEncoderModel: ("a sparse encoder", "PretrainedSparse(...) (gin/models/sparse_encoder.gin)"),
}
_TRAINER_METRICS = ("loss", "grad_norm", "learning_rate")
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
RandomKey = jax.Array | None  # None: no dropout and no random choices, as in evaluation
InSteps = Callable[[str, float], int]  # (setting's name, value: steps or a share of the run) -> steps


class Corpus(Protocol):
    """Training data from which `Objective.read_corpus` computes statistics, such as an `ArrayDataset`."""

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts: ...


class Objective(abc.ABC):
    """A training method: one file, usually a frozen dataclass of its settings.

    Attributes:
      frozen: patterns of the names of parameters that are not trained, such as `auxiliary.teacher.*`.
      evaluated_on_pairs: whether the loss can be computed on plain pairs, such as dev data. If not, the dev
        evaluation reports retrieval metrics only.
      searched_on_pairs: whether the model makes vectors, so that the passages of dev pairs can be searched.
        If not, the dev evaluation reports the loss only.
      reads_with: the model's method that reads texts. A model without this method is refused before data are
        read. None: an unsuitable model is refused only when the loss is traced.
    """

    frozen: tuple[str, ...] = ()
    evaluated_on_pairs: bool = True
    searched_on_pairs: bool = True
    reads_with: str | None = None

    def check_model(self, model: Any) -> None:
        """Raises a UserError if `model` is not of the kind that the objective trains."""
        if self.reads_with is not None and not hasattr(model, self.reads_with):
            raise UserError(_wrong_model(self, model, self.reads_with))

    def settled(self, in_steps: InSteps) -> Any:
        """Returns the objective with the settings that are shares of a run converted to steps."""
        return self

    @abc.abstractmethod
    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: each array's name, and the field of a record that fills it."""

    def auxiliary(self, model: nnx.Module, *, form: TextFormat, rngs: nnx.Rngs) -> nnx.Module | None:
        """Returns a module of auxiliary parameters, which is never exported, or None.

        Its `nnx.Param`s are trained unless they match `frozen`. Other variables (`nnx.BatchStat`) are state,
        which the objective changes in place. All are sharded, saved and resumed with the run.

        Args:
          model: the model to train; `jaxir.plan` passes one that has shapes but no values.
          form: the maximum lengths, the prompts and the mask token of texts.
          rngs: random streams from the run's seed, independent of those that initialise the model.
        """
        return None

    def read_corpus(self, auxiliary: Any, data: Corpus) -> None:
        """Sets variables of `auxiliary` that are computed from the training data, before the first step.

        These variables are saved with the run; a resume that computes other values is refused. `jaxir.plan`
        reads no data and leaves the values that `auxiliary` set.
        """
        return

    @abc.abstractmethod
    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss of the global batch and a dict of its metrics, all float32 scalars.

        Args:
          model: the model.
          batch: arrays by feature, [B, ...].
          key: the key of all random draws of this step; None in evaluation, where nothing is random.
          auxiliary: what the method `auxiliary` returned.
          step: int32 [], the number of finished steps; None in evaluation.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextObjective(Objective):
    """The base of objectives that train the passage tower on texts without labels.

    Attributes:
      chunks: the number of parts of a batch for gradient caching; see `Contrastive`.
    """

    chunks: Count | Literal["auto"] = 1
    evaluated_on_pairs = False

    def features(self, form: TextFormat) -> Features:
        """Returns the features of a batch: text_ids [L], the token ids of each text."""
        return {"text_ids": Tokens("text", form.passage_length, form.passage_prompt)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderObjective(TextObjective):
    """The base of autoencoders, in which a decoder reconstructs a text from its vector.

    Attributes:
      decoder_layers: the number of the decoder's transformer blocks.
      decoder_head_dim: the dimension of each of the decoder's attention heads.
      decoder_dropout: the decoder's dropout rate.
    """

    decoder_layers: Layers = 2
    decoder_head_dim: Size = 32
    decoder_dropout: Rate = 0.1

    def decoder(self, model: Any, *, rngs: nnx.Rngs, **shape: Any) -> VectorDecoder:
        """Makes the decoder; `shape` is passed on to `decoder_for`, such as `causal` or `span`."""
        shape |= {"num_layers": self.decoder_layers, "head_dim": self.decoder_head_dim}
        return decoder_for(model.config, dropout_rate=self.decoder_dropout, rngs=rngs, **shape)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LossObjective(Objective):
    """The base of objectives with an exchangeable loss; a subclass with `repr=False` inherits the short repr.

    Attributes:
      loss: a loss of `jaxir.losses` with its settings bound. It is called with three positional arrays, and
        with the keyword arguments named by `loss_inputs`.
      chunks: the number of parts of a batch for gradient caching; see `Contrastive`.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]]
    chunks: Count = 1
    loss_inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        _check_bound(self.loss)
        try:
            inspect.signature(self.loss).bind(None, None, None, **dict.fromkeys(self.loss_inputs))
        except (TypeError, ValueError) as error:
            raise UserError(f"{_call_text(self.loss)} is not a loss for this objective: {error}") from error

    def __repr__(self) -> str:
        others = (f for f in dataclasses.fields(self) if f.name != "loss")
        given = {f.name: getattr(self, f.name) for f in others if getattr(self, f.name) != f.default}
        values = [_call_text(self.loss), *(f"{name}={value!r}" for name, value in given.items())]
        return f"{type(self).__name__}({', '.join(values)})"


def _check_bound(function: Any) -> None:
    """Checks the names and values of arguments bound by `functools.partial`, also in nested partials."""
    if not isinstance(function, functools.partial):
        return
    with contextlib.suppress(ValueError):  # a function written in C may have no signature
        try:
            inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
        except TypeError as error:
            raise UserError(f"{_call_text(function)} cannot be called: {error}") from error
    hints = hints_of(function.func)
    for name, value in function.keywords.items():
        check_value(f"{name} of {_call_text(function.func)}", value, hints.get(name, Any))
        _check_bound(value)


def _call_text(loss: Callable[..., Any]) -> str:
    """Returns a function and its bound arguments as text, such as "samtone(temperature=0.05)"."""
    if not isinstance(loss, functools.partial):
        return getattr(loss, "__name__", repr(loss))
    values = [*map(repr, loss.args), *(f"{name}={value!r}" for name, value in loss.keywords.items())]
    return f"{_call_text(loss.func)}({', '.join(values)})"


def auxiliary_of(
    objective: Objective, model: nnx.Module, *, form: TextFormat, rngs: nnx.Rngs
) -> nnx.Module | None:
    """Calls `objective.auxiliary`; checks that it returns None or a module of `nnx.Variable`s."""
    with _explain_missing_method(objective, model):
        found = objective.auxiliary(model, form=form, rngs=rngs)
    if found is None:
        return None
    name = f"{type(objective).__name__}.auxiliary"
    if not isinstance(found, nnx.Module):
        raise UserError(
            f"{name} must return an nnx.Module or None, not {_kind_of(found)}: put the result into a module,"
            " such as nnx.Dict(name=...)"
        )
    if plain := unexpected_array(found, nnx.Variable):
        raise UserError(
            f"the module returned by {name} holds {plain}, which would not be trained: make a parameter with"
            " jaxir.models.layers.param, or an nnx.Variable if the objective changes the array itself"
        )
    return found


def loss_and_metrics(
    objective: Objective, model: Any, batch: Batch, key: RandomKey, auxiliary: Any, step: Any
) -> tuple[jax.Array, Metrics]:
    """Calls `objective` and checks its result: a float32 scalar and a dict of scalars with valid names."""
    name = type(objective).__name__
    try:
        inspect.signature(objective).bind(model, batch, key, auxiliary=auxiliary, step=step)
    except TypeError as error:
        raise UserError(
            f"the __call__ of objective {name} must accept (model, batch, key=None, *, auxiliary=None,"
            f" step=None): {error}"
        ) from None
    with _explain_missing_method(objective, model):
        result = objective(model, batch, key, auxiliary=auxiliary, step=step)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise UserError(f"{name} must return the loss and a dict of metrics, not {_kind_of(result)}")
    loss, metrics = result
    if not (isinstance(loss, jax.Array) and loss.shape == () and loss.dtype == jnp.float32):
        raise UserError(f"{name}'s loss must be one float32 number for the batch, not {_kind_of(loss)}")
    for metric, value in metrics.items():
        if jnp.shape(value) != ():
            raise UserError(f"{name}'s metric {metric!r} must be one number, not {_kind_of(value)}")
        if metric in _TRAINER_METRICS:
            raise UserError(
                f"{name}'s metric {metric!r} has the name of a metric that the trainer reports: rename it"
            )
    return loss, metrics


@contextlib.contextmanager
def _explain_missing_method(objective: Objective, model: Any) -> Iterator[None]:
    """Raises a UserError if a method is called that the model lacks; other errors keep their traceback."""
    try:
        yield
    except AttributeError as error:
        if error.obj is not model or error.name is None:
            raise
        raise UserError(_wrong_model(objective, model, error.name)) from error
    except TypeError as error:
        if str(error) != f"{type(model).__name__!r} object is not callable":
            raise
        raise UserError(_wrong_model(objective, model, "__call__")) from error


def _wrong_model(objective: Objective, model: Any, method: str) -> str:
    """Returns an error message: the objective needs `method`, the model lacks it, and which kind has it."""
    name = type(objective).__name__
    given, _ = _KINDS.get(type(model), (f"a {type(model).__name__}", ""))
    for kind, (what, source) in _KINDS.items():
        if any(method in vars(parent) for parent in kind.__mro__):
            return (
                f"{name} trains {what} (it calls {method}), but the model is {given}: give model={source}, or"
                " another objective"
            )
    public = [known for known in dir(model) if not known.startswith("_")]
    return f"{name} calls model.{method}, but the model, {given}, has no such method{suggest(method, public)}"


def _kind_of(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__

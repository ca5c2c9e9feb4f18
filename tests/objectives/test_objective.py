"""Refusals of a user's own objective: each is one sentence that names it."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.models import layers
from jaxir.objectives.objective import Objective, auxiliary_of, loss_and_metrics
from jaxir.objectives.weighted_sum import WeightedSum, _Parts
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.step.train_state import plan_state
from tests.objectives.unlabelled import FORM, make_model

ONE = jnp.float32(1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers(Objective):
    answer: object = None

    def features(self, form):
        return {}

    def __call__(self, model, batch, key=None, *, auxiliary=None, step=None):
        return self.answer


class TakesNoAuxiliary(Answers):
    def __call__(self, model, batch, key=None, *, step=None):
        return ONE, {}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (ONE, r"Answers must return the loss and a dict of metrics, not float32 \[\]"),
        ((ONE, ONE), "Answers must return the loss and a dict of metrics, not tuple"),
        ((jnp.ones(8), {}), r"Answers's loss must be one float32 number for the .*, not float32 \[8\]"),
        ((jnp.bfloat16(1), {}), r"Answers's loss must be one float32 number for the batch, not "),
        ((1.0, {}), "Answers's loss must be .*, not float"),
        ((ONE, {"hits": jnp.ones([8, 8])}), r"metric 'hits' must be one number, not float32 \[8, 8\]"),
        ((ONE, {"learning_rate": ONE}), "Answers's metric 'learning_rate' has the name of a metric that the"),
    ],
)
def test_invalid_results_are_refused(answer, sentence):
    with pytest.raises(UserError, match=sentence):
        loss_and_metrics(Answers(answer=answer), None, {}, None, None, None)


def test_an_objective_with_other_arguments_is_refused():
    sentence = r"TakesNoAuxiliary must accept \(model, batch, .*unexpected keyword argument 'auxiliary'"
    with pytest.raises(UserError, match=sentence):
        loss_and_metrics(TakesNoAuxiliary(), None, {}, None, None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asks(Answers):
    """A user's objective that does not set `reads_with`; `how` calls the model."""

    how: object = None

    def __call__(self, model, batch, key=None, *, auxiliary=None, step=None):
        return self.how(model), {}


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (lambda m: m(ONE, ONE), r"generator \(it calls __call__\), but the model is a dual encoder: give"),
        (lambda m: m.predict(ONE, ONE), r"Asks trains a generator \(it calls predict\), but .*, or another"),
        (lambda m: m.score_texts(ONE, ONE), "trains a cross-encoder .* give model=PretrainedCrossEncoder"),
        (lambda m: m.encdoe(ONE), "model.encdoe, .* has no such method; did you mean 'encode'"),
        (lambda m: m.embed(ONE), r"model.embed, but the model, a dual .* has no such method(\n|$)"),
    ],
)
def test_an_objective_that_calls_what_another_kind_of_model_has(how, sentence):
    model = make_model()
    objective = Asks(how=how)
    for asking in (objective, WeightedSum(parts={"a": objective})):
        with pytest.raises(UserError, match=sentence):
            nnx.jit(lambda m, asking=asking: loss_and_metrics(asking, m, {}, None, None, None))(model)


def test_other_errors_of_an_objective_keep_their_traceback():
    for how, error in ((lambda m: m.config.nothing, AttributeError), (lambda m: ONE(m), TypeError)):
        with pytest.raises(error):
            loss_and_metrics(Asks(how=how), make_model(), {}, None, None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside(Answers):
    def auxiliary(self, model, *, form, rngs):
        return self.answer(model)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda m: layers.param(ONE), "Beside.auxiliary must return an nnx.Module or None, not Param"),
        (lambda m: {"scale": layers.param(ONE)}, "must return an nnx.Module or None, not dict"),
        (lambda m: ONE, r"must return an nnx.Module or None, not float32 \[\]"),
        (lambda m: m.output_table, "Beside trains a generator .it calls output_table., but"),
    ],
)
def test_auxiliary_must_be_a_module(answer, sentence):
    for objective in (Beside(answer=answer), WeightedSum(parts={"a": Beside(answer=answer)})):
        with pytest.raises(UserError, match=sentence):
            auxiliary_of(objective, make_model(), form=FORM, rngs=nnx.Rngs(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(Answers):
    """An objective whose loss is a function of the auxiliary."""

    def __call__(self, model, batch, key=None, *, auxiliary=None, step=None):
        return self.answer(auxiliary), {}


def test_a_part_of_a_sum_is_given_its_own_auxiliary_whatever_it_is_called():
    """A part may have the name of a method of every module, such as `train` or `eval`."""
    found = {}

    def part(name):
        return Given(answer=lambda auxiliary: found.__setitem__(name, auxiliary) or ONE)

    parts = _Parts({"eval": Holder(layers.param)})
    WeightedSum(parts={"train": part("train"), "eval": part("eval")})(None, {}, auxiliary=parts)
    assert found["train"] is None and isinstance(found["eval"], Holder)


class Holder(nnx.Module):
    def __init__(self, kind):
        self.scale = layers.param(ONE)
        self.parts = nnx.List([kind(ONE)])


@pytest.mark.parametrize("shapes", [False, True])
def test_plain_arrays_in_the_auxiliary_are_refused(shapes):
    """A plan, which traces the auxiliary, refuses them, too."""
    for kind in (jnp.asarray, np.asarray, nnx.BatchStat, layers.param):
        objective = Beside(answer=lambda m, kind=kind: Holder(kind))
        of = partial(auxiliary_of, objective, make_model(), form=FORM, rngs=nnx.Rngs(0))
        make = partial(nnx.eval_shape, of) if shapes else of
        if kind in (nnx.BatchStat, layers.param):
            assert isinstance(make().parts[0], nnx.Variable)
            continue
        with pytest.raises(UserError, match=r"Beside.auxiliary holds 'parts.0' .a plain array., which would"):
            make()


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_trained_parameters_must_be_float32(dtype):
    class Head(nnx.Module):
        def __init__(self):
            self.scale = layers.param(jnp.ones([], dtype))

    with pytest.raises(UserError, match=rf"auxiliary.scale is {dtype} \[\], but only float32 is trained"):
        plan_state(make_model(), optax.sgd(1.0), MeshConfig().build(), auxiliary=Head())


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (lambda: 1.0, "must be a function of the step: too many positional arguments"),
        (lambda step: None, "must return one number for a step, not None"),
        (lambda step: jnp.ones(2), r"must return one number for a step, not an array \[2\]"),
    ],
)
def test_a_weight_of_a_sum_is_a_number_at_each_step(weight, sentence):
    parts = {"a": Answers(answer=(ONE, {}))}
    with pytest.raises(UserError, match=f"the weight of 'a' {sentence}"):
        WeightedSum(parts=parts, weights={"a": weight})(None, {}, step=jnp.int32(1))

"""What an objective of a user's own may not answer: each costs one sentence that names it."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from unlabelled import make_model

from jaxir.errors import UserError
from jaxir.models import layers
from jaxir.objectives.objective import Objective, loss_and_metrics
from jaxir.partitioning import MeshConfig
from jaxir.training.state import plan_state

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
        (
            (jnp.ones(8), {}),
            r"Answers's loss must be float32 \[\], one number for the batch, not float32 \[8\]",
        ),
        ((jnp.bfloat16(1), {}), r"Answers's loss must be float32 \[\], one number for the batch, not "),
        ((1.0, {}), "Answers's loss must be .*, not float"),
        (
            (ONE, {"hits": jnp.ones([8, 8])}),
            r"Answers's metric 'hits' must be one number, not float32 \[8, 8\]",
        ),
        ((ONE, {"learning_rate": ONE}), "Answers's metric 'learning_rate' has a name of the trainer's own"),
    ],
)
def test_answers_that_are_none(answer, sentence):
    with pytest.raises(UserError, match=sentence):
        loss_and_metrics(Answers(answer=answer), None, {}, None, None, None)


def test_an_objective_that_takes_other_arguments():
    sentence = r"TakesNoAuxiliary must take \(model, batch, .*unexpected keyword argument 'auxiliary'"
    with pytest.raises(UserError, match=sentence):
        loss_and_metrics(TakesNoAuxiliary(), None, {}, None, None, None)


def test_an_answer_is_given_on():
    assert loss_and_metrics(Answers(answer=(ONE, {"hits": ONE})), None, {}, None, None, None) == (
        ONE,
        {"hits": ONE},
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_what_is_trained_is_float32(dtype):
    class Head(nnx.Module):
        def __init__(self):
            self.scale = layers.param(jnp.ones([], dtype))

    with pytest.raises(
        UserError, match=rf"the parameter auxiliary.scale is {dtype} \[\]: what is trained is float32"
    ):
        plan_state(make_model(), optax.sgd(1.0), MeshConfig().build(), auxiliary=Head())

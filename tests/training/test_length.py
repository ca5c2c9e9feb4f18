"""Lengths of runs in epochs, and shares of a run, in steps."""

import pytest

from jaxir.core.errors import UserError
from jaxir.training.step.length import check_length, in_steps, lengthened, steps_of
from jaxir.training.step.optimizers import Adafactor, AdamW


@pytest.mark.parametrize(
    ("epochs", "pairs", "batch_size", "min_steps", "steps"),
    [
        (1, 64, 32, 1, 2),
        (1, 65, 32, 1, 3),
        (0.1, 960, 32, 1, 3),
        (1.1, 100, 10, 1, 11),
        (2.5, 64, 32, 1, 5),
        (1, 64, 32, 100, 100),
    ],
)
def test_epochs_in_steps(epochs, pairs, batch_size, min_steps, steps):
    assert steps_of(epochs, pairs=pairs, batch_size=batch_size, min_steps=min_steps) == steps


def test_a_run_that_min_steps_makes_longer_than_its_epochs_has_a_note():
    of_64 = {"pairs": 64, "batch_size": 32}
    told = "epochs=0.5 of 64 examples is 1 step at batch_size 32; min_steps makes the run 100 steps long"
    assert lengthened(0.5, min_steps=100, **of_64).startswith(told)
    assert lengthened(0.5, min_steps=1, **of_64) is lengthened(None, min_steps=100, **of_64) is None


@pytest.mark.parametrize(
    ("value", "steps", "found"), [(0.1, 30, 3), (0.1, 31, 4), (0.2, 2, 1), (7, 2, 7), (2.0, 9, 2)]
)
def test_numbers_below_one_are_shares_of_a_run(value, steps, found):
    assert in_steps("eval_every", value, steps) == found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: check_length(None, None), "steps or epochs must be given"),
        (lambda: check_length(3, 2.0), "steps is 3 and epochs is 2.0: keep one"),
        (lambda: in_steps("eval_every", 2.5, 10), "eval_every must be a whole number of steps"),
        (
            lambda: steps_of(1e30, pairs=64, batch_size=32, min_steps=1),
            "epochs=1e.30 of 64 .* at most 2,147",
        ),
    ],
)
def test_impossible_lengths_are_refused(given, sentence):
    with pytest.raises(UserError, match=sentence):
        given()


@pytest.mark.parametrize("optimizer", [AdamW, Adafactor])
def test_a_warm_up_may_be_a_share(optimizer):
    share, told = (optimizer(warmup_steps=steps).build(40).schedule for steps in (0.25, 10))
    assert [float(share(t)) for t in range(40)] == [float(told(t)) for t in range(40)]
    optimizer(warmup_steps=0.05).build(1)  # a single step has no warm-up

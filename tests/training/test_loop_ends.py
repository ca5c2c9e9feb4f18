"""How long runs are and how they end: the last step, numbers that are not finite, signals, unread output."""

import functools
import itertools
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.losses.matryoshka import matryoshka
from jaxir.objectives.contrastive import Contrastive
from jaxir.training.step.length import check_length, in_steps, lengthened, steps_of
from jaxir.training.step.optimizers import Adafactor, AdamW
from jaxir.training.step.prefetch import AHEAD, prefetch
from jaxir.training.stopping import StopSignal
from tests.training.saved_run import log
from tests.training.tiny_run import Bag, Hooked, pairs, run

# The only step is no multiple of an interval, but as the last step it is logged, evaluated and saved.
ONE_STEP = {"steps": 1, "log_every": 2, "eval_every": 2, "checkpoint_every": 2}
ONE_STEP["optimizer"] = AdamW(learning_rate=1e-3, clip_norm=0.01)


def steps_in(run_dir) -> list[str]:
    return [p.name for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()]


def test_the_last_step_is_logged_with_its_rate_and_its_gradient_before_clipping(tmp_path):
    run(tmp_path / "run", model=Bag(dropout_rate=0.0), **ONE_STEP)
    lines = log(tmp_path / "run")
    (trained,) = [line for line in lines if "loss" in line]
    (evaluated,) = [line for line in lines if "dev/loss" in line]
    assert trained["step"] == evaluated["step"] == 1 and steps_in(tmp_path / "run") == ["1"]

    graphdef, params = nnx.split(Bag(dropout_rate=0.0))
    batch = jax.tree.map(jnp.asarray, next(pairs(64).batches(batch_size=8, seed=0)))
    loss, gradients = jax.jit(
        jax.value_and_grad(lambda params: Contrastive()(nnx.merge(graphdef, params), batch)[0])
    )(params)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradients)))
    assert trained["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert trained["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 1
    assert trained["learning_rate"] == pytest.approx(1e-3)


class Steep(Contrastive):
    """The loss is finite, but its gradient is not."""

    def __call__(self, model, batch, key=None, **more):
        loss, metrics = super().__call__(model, batch, key, **more)
        return loss + 0.0 * jnp.sqrt(0.0 * loss), metrics


class BlindToDev(Contrastive):
    """A loss that is not a number without dropout, as in evaluation."""

    def __call__(self, model, batch, key=None, **more):
        loss, metrics = super().__call__(model, batch, key, **more)
        return loss if key is not None else loss * jnp.nan, metrics


@pytest.mark.parametrize(
    ("objective", "told"),
    [(Steep(), "the grad_norm is nan.*"), (BlindToDev(), "evaluator Loss: the metric loss is nan.*")],
)
def test_non_finite_gradient_or_dev_loss_ends_the_run_unsaved(tmp_path, objective, told):
    sentence = rf"^step 1: {told}; training stopped, no checkpoint was saved yet$"
    with pytest.raises(UserError, match=sentence):
        run(tmp_path / "run", objective=objective, **ONE_STEP)
    assert not steps_in(tmp_path / "run")
    assert not (tmp_path / "run" / "COMPLETE").exists()


class Ending(Hooked):
    """A user's data whose batches end."""

    def __init__(self, count):
        super().__init__(pairs(64), lambda step: None)
        self._count = count

    def batched(self, how):
        return itertools.islice(super().batched(how), max(0, self._count - how.start_step))


@pytest.mark.slow
def test_data_that_end_before_the_run_are_an_error(tmp_path):
    ended = "the data has no more batches, but the run has 10 steps"
    with pytest.raises(UserError, match=f"^step 5: {ended}.*last good checkpoint is .*checkpoints/4$"):
        run(tmp_path / "run", data=Ending(5), steps=10, checkpoint_every=4)
    assert steps_in(tmp_path / "run") == ["4"] and not (tmp_path / "run" / "COMPLETE").exists()
    with pytest.raises(UserError, match=f"^step 4: {ended}"):
        run(tmp_path / "run", data=Ending(4), steps=10, checkpoint_every=4)
    assert run(tmp_path / "run", data=Ending(10), steps=10, checkpoint_every=4).step == 10


def test_a_second_interrupt_does_not_wait_for_the_step():
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # some job queues send it twice
        assert stop.received is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.received is signal.SIGTERM


# Nobody reads standard error any more: Ctrl-C also ends `tee` in `train 2>&1 | tee log`.
UNREAD = """
import os, pty, signal
from jaxir.training.run.logs import Narrator
from jaxir.training.stopping import StopSignal

for opening in (os.pipe, pty.openpty):
    reader, writer = opening()
    os.close(reader)
    os.dup2(writer, 2)
    narrator = Narrator(steps=9, start_step=0, batch_size=1)
    with StopSignal() as stop:
        narrator.say("step 1/9")
        signal.raise_signal(signal.SIGINT)
        narrator.say("step 2/9")
        print(stop.received.name, stop.requested(2))
"""


def test_a_run_whose_output_nobody_reads_continues_and_ends_in_good_order():
    done = subprocess.run([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "SIGINT True\n" * 2)


def test_failure_before_the_first_step_leaves_directories_as_they_were(tmp_path):
    wrong = {"objective": Contrastive(loss=functools.partial(matryoshka, dimensions=[99])), "dev": None}
    with pytest.raises(UserError, match=r"dimensions must lie between 1 and 32, .* not 99"):
        run(tmp_path / "a/run", **wrong)
    assert not list(tmp_path.iterdir())
    run(tmp_path / "run", steps=4, dev=None)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="was trained with"):
        run(tmp_path / "run", steps=4, **wrong)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_more_than_a_few_batches_are_made_ahead():
    made = []

    def numbers():
        for number in itertools.count():
            made.append(number)
            yield number

    with prefetch(numbers(), lambda x: x) as batches:
        for read in range(1, 4):
            assert next(batches) == read - 1
            time.sleep(0.2)
            # One more batch is made ahead, which waits for room in the queue.
            assert read + 1 < len(made) <= read + AHEAD + 1 == read + 3


def test_prefetch_keeps_order_passes_errors_on_and_ends_its_thread():
    def numbers():
        yield from range(5)
        raise ValueError("the sixth")

    with prefetch(numbers(), lambda x: 10 * x) as batches:
        assert [next(batches) for _ in range(5)] == [0, 10, 20, 30, 40]
        with pytest.raises(ValueError, match="the sixth"):
            next(batches)
    with prefetch(itertools.count(), lambda x: x) as batches:
        assert next(batches) == 0
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


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
        (lambda: steps_of(1e30, pairs=64, batch_size=32, min_steps=1), "epochs=1e.30 of 64 .* at most 2,147"),
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

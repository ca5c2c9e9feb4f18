"""How the loop ends: the records of its last step, numbers that are not finite, signals, unread output."""

import functools
import itertools
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.losses.matryoshka import matryoshka
from jaxir.objectives.contrastive import Contrastive
from jaxir.training.step.optimizers import AdamW
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
    """A finite loss whose gradient is not finite."""

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
    [(Steep(), "the grad_norm is nan.*"), (BlindToDev(), "evaluator Loss: the metric loss is nan")],
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
        signal.raise_signal(signal.SIGTERM)  # sent twice by some queues
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

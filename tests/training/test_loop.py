"""The loop within one process: stopping, refusals, and equal results on any mesh."""

import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.mixture import MixtureDataset
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.weighted_sum import WeightedSum
from jaxir.training.step.optimizers import Adafactor, AdamW
from tests.training import tiny_run
from tests.training.saved_run import log, losses, saved_steps
from tests.training.tiny_run import Bag, Hooked, ToOne, pairs, run


def params_of(model) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in leaves}


class Poisoned(Contrastive):
    """A loss that is NaN for batches with the query whose key is POISON; dev data lack this query."""

    def __call__(self, model, batch, key=None, **more):
        loss, metrics = super().__call__(model, batch, key, **more)
        hit = jnp.any(batch["query_key"][:, 0] == POISON)
        return jnp.where(hit, jnp.nan, loss), metrics


POISON = next(iter(pairs(64).batches(batch_size=8, seed=0, start_step=10)))["query_key"][0, 0]
# POISON's query is taken from step 11, in the second epoch; it comes in the first epoch, too.
FIRST_POISONED = next(
    step
    for step, batch in enumerate(pairs(64).batches(batch_size=8, seed=0), 1)
    if POISON in batch["query_key"][:, 0]
)


def test_a_loss_that_is_not_a_number_names_its_step_and_keeps_the_last_good_checkpoint(tmp_path):
    assert 2 <= FIRST_POISONED <= 8
    every = FIRST_POISONED - 1
    good = f"the last good checkpoint is {tmp_path}/run/checkpoints/{every}$"
    with pytest.raises(UserError, match=f"^step {FIRST_POISONED}: the loss is nan: .*{good}"):
        run(tmp_path / "run", objective=Poisoned(), checkpoint_every=every, eval_every=100)
    assert saved_steps(tmp_path / "run") == [every]


def of_one_passage(count: int, seed: int = 0) -> ArrayDataset:
    """Pairs whose passages all have the same id."""
    found = pairs(count, seed)
    passages = found._tables["passages"]
    found._tables["passages"] = passages._replace(keys=np.zeros_like(passages.keys))
    return found


def test_batch_without_negatives_is_refused_first_and_reported_later(tmp_path, capsys):
    masked = of_one_passage(64)
    with pytest.raises(UserError, match=r"^step 1: no pair of the batch has a negative, so the loss is 0"):
        run(tmp_path / "run", data=masked, checkpoint_every=1)
    assert losses(tmp_path / "run") == {} and not saved_steps(tmp_path / "run")
    both = MixtureDataset({"good": pairs(64), "masked": masked}, rates=[3, 1])
    batches = itertools.islice(both.batches(batch_size=8, seed=1), 12)
    schedule = [len(np.unique(batch["passage_key"], axis=0)) > 1 for batch in batches]
    assert schedule[0] and not all(schedule)  # a batch with negatives comes first
    capsys.readouterr()
    objective = WeightedSum(parts={"pairs": Contrastive(), "others": ToOne()}, weights={"others": 0.1})
    dev = of_one_passage(21, seed=1)
    run(tmp_path / "mixed", data=both, objective=objective, seed=1, steps=12, dev=dev)
    errors = capsys.readouterr().err
    at = schedule.index(False) + 1
    assert errors.count("no pair of the batch has a negative") == 1
    assert f"warning: step {at}: pairs: no pair of the batch" in errors
    assert errors.count("warning: step 10: pairs: no pair of the dev batches has a negative") == 1
    (line,) = (x for x in log(tmp_path / "mixed") if x["step"] == at and "loss" in x)
    assert line["pairs/loss"] == 0


@pytest.mark.slow
def test_interrupt_ends_the_step_saves_it_and_restores_the_handlers(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    sent = Hooked(pairs(64), lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 12 else None)
    result = run(tmp_path / "run", data=sent, steps=16)
    assert result.stopped_by is signal.SIGINT and 9 <= result.step <= 13
    assert saved_steps(tmp_path / "run")[-1] == result.step
    assert signal.getsignal(signal.SIGINT) is before
    resumed = run(tmp_path / "run", steps=16)
    assert resumed.step == 16 and resumed.stopped_by is None


def test_a_complete_run_is_left_alone(tmp_path):
    model = Bag()
    first = run(tmp_path / "run", model=model, steps=10)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    again = Bag()
    second = run(tmp_path / "run", model=again, steps=10)
    assert second == first._replace(started_at=10)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    (tmp_path / "run" / "COMPLETE").unlink()  # killed between the last checkpoint and this mark
    run(tmp_path / "run", steps=10)
    assert (tmp_path / "run" / "COMPLETE").read_text() == "10 steps\n"
    for name, value in params_of(model).items():
        assert np.array_equal(params_of(again)[name], value)
        assert not np.array_equal(params_of(Bag())[name], value)


def test_nothing_compiles_and_nothing_is_transferred_once_the_loop_runs(tmp_path, monkeypatch):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(at[0]) if event.endswith("backend_compile_duration") else None
    )
    at = [None]
    data = Hooked(pairs(64), lambda step: at.__setitem__(0, step))
    try:
        run(tmp_path / "run", data=data, eval_every=5)
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(compiled) > 3  # guard: the listener counts compilations
    # The first evaluation compiles its search; the prefetching thread is at most 3 steps ahead of the loop.
    assert [step for step in compiled if step is not None and step > 5 + 3] == []


class Again(Hooked):
    """Pairs that repeat the first batch at every step, whatever the seed."""

    def batched(self, how):
        first = next(self._data.batched(how._replace(start_step=0, seed=0)))
        for step in itertools.count(how.start_step):
            self._before(step)
            yield first


@pytest.mark.slow
def test_dropout_is_on_in_training_and_differs_from_step_to_step(tmp_path):
    """At learning rate 0 on one batch, only the key of dropout can change the loss."""

    data = Again(pairs(64), lambda step: None)
    settings = {"steps": 9, "learning_rate": 0.0, "dev": None, "checkpoint_every": 100}
    results = {}
    for name, rate, seed in (("with", 0.5, 0), ("again", 0.5, 0), ("other", 0.5, 1), ("without", 0.0, 0)):
        run(tmp_path / name, model=Bag(dropout_rate=rate), data=data, seed=seed, **settings)
        results[name] = set(losses(tmp_path / name).values())
    assert len(results["with"]) == 9 and results["with"] == results["again"]
    assert len(results["without"]) == 1
    assert not results["with"] & (results["without"] | results["other"])


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        # With an eps of 1e-8 a gradient that is 0 but for rounding moves a weight as far as any other.
        pytest.param(
            lambda: tiny_run.bert(num_layers=1), AdamW(learning_rate=1e-3, eps=1e-5), marks=pytest.mark.slow
        ),
        (Bag, Adafactor(learning_rate=1e-2, min_dim_size_to_factor=16)),
    ],
)
def test_four_devices_give_what_one_gives(tmp_path, make, optimizer):
    models = {}
    for name, mesh in (("one", {"data": 1}), ("four", {"data": 2, "fsdp": 2})):
        models[name] = make()
        settings = {"steps": 5, "batch_size": 16, "optimizer": optimizer, "dev": None}
        run(tmp_path / name, model=models[name], mesh=mesh, **settings)
    assert losses(tmp_path / "one").keys() == {1, 2, 3, 4, 5}
    for step, loss in losses(tmp_path / "one").items():
        assert losses(tmp_path / "four")[step] == pytest.approx(loss, abs=1e-5)
    one, four, start = (params_of(m) for m in (models["one"], models["four"], make()))
    assert max(np.abs(one[n] - start[n]).max() for n in one) > 1e-3
    for name, value in one.items():
        np.testing.assert_allclose(four[name], value, atol=1e-5, err_msg=name)
    leaves = jax.tree.leaves(nnx.state(models["four"], nnx.Param))
    assert any(leaf.sharding.spec[0] == "fsdp" for leaf in leaves)

"""Checkpoints: which are kept, which is the best, and which are refused."""

import contextlib
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
import tensorstore

from jaxir.core.errors import UserError
from jaxir.interop.weights import stores
from jaxir.training.run.checkpoints import Checkpoints
from jaxir.training.step.train_state import TrainState


def state(step: int) -> TrainState:
    return TrainState(jnp.int32(step), {"w": jnp.full(3, float(step))}, {"m": jnp.full(3, 0.5)})


@contextlib.contextmanager
def opened(run_dir, metric):
    greater = metric != "loss"
    checkpoints = Checkpoints(run_dir, {}, keep_last=2, metric=metric, greater_is_better=greater)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    try:
        yield checkpoints, checkpoints.open(like)
    finally:
        checkpoints.close()


def best_in(run_dir) -> dict:
    return json.loads((run_dir / "checkpoints" / "best.json").read_text())


@pytest.mark.parametrize(("metric", "sign"), [("nDCG@10", 1), ("loss", -1)])
def test_the_first_of_equally_good_checkpoints_is_the_best_and_is_kept(tmp_path, metric, sign):
    values = {1: 0.2, 2: 0.5, 3: 0.5, 4: 0.3, 5: None, 6: 0.1}
    with opened(tmp_path / "run", metric) as (checkpoints, resumed):
        assert resumed is None and checkpoints.best() is None
        for step, value in values.items():
            value = value and sign * value
            assert value is None or checkpoints.is_best(value) == (step <= 2), step
            checkpoints.save(step, state(step), value)
            assert checkpoints.settle() == step
        assert checkpoints.steps() == [2, 5, 6]
    assert best_in(tmp_path / "run") == {"step": 2, "metric": metric, "value": sign * 0.5}
    with opened(tmp_path / "run", metric) as (checkpoints, resumed):  # another process remembers it
        assert resumed.step == 6 and resumed.state.params["w"].tolist() == [6.0] * 3
        assert checkpoints.best() == (2, sign * 0.5)
        assert [checkpoints.is_best(sign * x) for x in (0.4, 0.5, 0.6)] == [False, False, True]
        checkpoints.save(7, state(7), sign * 0.6)
        checkpoints.settle()
        assert checkpoints.steps() == [6, 7]
    assert best_in(tmp_path / "run")["step"] == 7


@pytest.mark.parametrize(("item", "number"), [("params", jnp.inf), ("opt_state", jnp.nan)])
def test_a_state_with_one_number_that_is_not_finite_is_never_saved(tmp_path, item, number):
    with opened(tmp_path / "run", None) as (checkpoints, _):
        checkpoints.save(1, state(1), None)
        checkpoints.settle()
        spoilt = jax.tree.map(lambda x: x.at[1].set(number), getattr(state(2), item))
        with pytest.raises(
            UserError,
            match=r"^step 2: a parameter or a moment .* is not finite: lower the learning rate; .*/1$",
        ):
            checkpoints.save(2, state(2)._replace(**{item: spoilt}), None)
        assert checkpoints.steps() == [1]


def test_a_checkpoint_with_another_number_than_was_saved_is_set_aside(tmp_path, capsys):
    """The number is replaced by TensorStore itself, so that no file is damaged."""
    with opened(tmp_path / "run", None) as (checkpoints, _):
        for step in (1, 2):
            checkpoints.save(step, state(step), None)
            checkpoints.settle()
    (spec,) = stores.orbax_specs(tmp_path / "run" / "checkpoints" / "2" / "opt_state").values()
    tensorstore.open(spec, open=True).result()[1] = 7.0
    with opened(tmp_path / "run", None) as (checkpoints, resumed):
        assert resumed.step == 1 and checkpoints.steps() == [1]
    assert "checkpoint 2 is damaged (its checksums do not match its content)" in capsys.readouterr().err


def test_missing_index_is_damage_and_another_checkpoint_becomes_the_best(tmp_path, capsys):
    """The only evaluated checkpoint is set aside, so there is no best one any more."""
    with opened(tmp_path / "run", "loss") as (checkpoints, _):
        for step, value in ((1, None), (2, 0.5)):
            checkpoints.save(step, state(step), value)
            checkpoints.settle()
    assert best_in(tmp_path / "run")["step"] == 2
    (tmp_path / "run" / "checkpoints" / "2" / "params" / stores.ORBAX_INDEX).unlink()
    with opened(tmp_path / "run", "loss") as (checkpoints, resumed):
        assert resumed.step == 1 and checkpoints.best() is None
    assert f"checkpoint 2 is damaged ({tmp_path}/run/checkpoints/2/params/" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints" / "best.json").exists()


def test_checkpoint_with_the_record_of_another_is_set_aside(tmp_path, capsys):
    """By a copy under another number, or by a changed word that decides the course of the run."""
    with opened(tmp_path / "run", None) as (checkpoints, _):
        checkpoints.save(1, state(1), None)
        checkpoints.settle()
    directory = tmp_path / "run" / "checkpoints"
    shutil.copytree(directory / "1", directory / "2")
    shutil.copytree(directory / "1", directory / "3")
    path = directory / "3" / "run" / "metadata"
    path.write_text(path.read_text().replace('"step": 1', '"step": 3'))
    with opened(tmp_path / "run", None) as (checkpoints, resumed):
        assert resumed.step == 1 and checkpoints.steps() == [1]
    said = capsys.readouterr().err
    assert (
        "checkpoint 2 is damaged" in said and "metadata is damaged: it is the record of another step" in said
    )
    assert "checkpoint 3 is damaged" in said and "metadata is damaged: it does not match its sha256" in said


def test_withdraw_keeps_a_run_that_had_begun_before(tmp_path):
    with opened(tmp_path / "run", None) as (checkpoints, _):
        checkpoints.withdraw()
    assert not list((tmp_path / "run").iterdir())
    with opened(tmp_path / "run", None):
        pass
    with opened(tmp_path / "run", None) as (checkpoints, _):
        checkpoints.withdraw()
    assert (tmp_path / "run" / "run.json").exists(), "of the run that was begun before"

"""Checkpoints: which are kept, which is the best, which are damaged, and the checksums of their arrays."""

import contextlib
import errno
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jaxir.core.errors import UserError
from jaxir.interop.weights import array_checksums, stores
from jaxir.training.run.checkpoints import Checkpoints
from jaxir.training.run.damage import is_damage
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
    # Opened anew, as by a new process, the directory still has its best checkpoint.
    with opened(tmp_path / "run", metric) as (checkpoints, resumed):
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
        refused = r"^step 2: a parameter or a moment .* is not finite: lower the learning rate; .*/1$"
        with pytest.raises(UserError, match=refused):
            checkpoints.save(2, state(2)._replace(**{item: spoilt}), None)
        assert checkpoints.steps() == [1]


def replace_a_number(directory):
    """Changes a number with TensorStore, so that each file still has the checksums that are inside it."""
    (spec,) = stores.orbax_specs(directory / "2" / "opt_state").values()
    tensorstore.open(spec, open=True).result()[1] = 7.0


def remove_the_index(directory):
    (directory / "2" / "params" / stores.ORBAX_INDEX).unlink()


def copy_another(directory):
    shutil.rmtree(directory / "2")
    shutil.copytree(directory / "1", directory / "2")


def copy_another_and_change_its_record(directory):
    copy_another(directory)
    path = directory / "2" / "run" / "metadata"
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (replace_a_number, "checkpoint 2 is damaged (its checksums do not match its content)"),
        (remove_the_index, "checkpoint 2 is damaged ({}/checkpoints/2/params/"),
        (copy_another, "metadata is damaged: it is the record of another step"),
        (copy_another_and_change_its_record, "metadata is damaged: it does not match its sha256"),
    ],
)
def test_damaged_checkpoint_is_set_aside_and_is_not_the_best_any_more(tmp_path, capsys, damage, reason):
    run_dir = tmp_path / "run"
    with opened(run_dir, "loss") as (checkpoints, _):
        for step, value in ((1, None), (2, 0.5)):
            checkpoints.save(step, state(step), value)
            checkpoints.settle()
    assert best_in(run_dir)["step"] == 2
    damage(run_dir / "checkpoints")
    with opened(run_dir, "loss") as (checkpoints, resumed):
        assert resumed.step == 1 and checkpoints.steps() == [1] and checkpoints.best() is None
    assert reason.format(run_dir) in capsys.readouterr().err
    assert not (run_dir / "checkpoints" / "best.json").exists()


def test_only_known_errors_count_as_damage():
    def caused(cause: Exception) -> Exception:
        error = Exception("Encountered error while reading array index")
        error.__cause__ = cause
        return error

    for passing in (
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17 bytes"),
        ConnectionResetError(),
        TimeoutError(),
        *(OSError(n, "") for n in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ENOMEM)),
        ValueError("ABORTED: All 1 retry attempts failed: Service Unavailable"),
        ValueError("PERMISSION_DENIED: Forbidden"),
        ValueError("RESOURCE_EXHAUSTED: Too many open files"),
        ValueError("Bad Request [http_response_code='400']"),
        UnicodeError("NOT_FOUND: in words like TensorStore's, and not by it"),
    ):
        assert not is_damage(passing) and not is_damage(caused(passing)), passing
    for damage in (
        *(OSError(n, "") for n in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)),
        KeyError("opt_state"),
        json.JSONDecodeError("Expecting value", "", 0),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ValueError("OUT_OF_RANGE: Requested byte range is not valid for value of size 3"),
        ValueError("DATA_LOSS: Error decoding manifest"),
        ValueError("NOT_FOUND: Metadata does not exist"),
        ValueError("FAILED_PRECONDITION: Error reading: Truncated Zstd-compressed stream"),
    ):
        assert is_damage(damage) and is_damage(caused(damage)), damage


def test_checksums_of_parts_add_up_however_an_array_is_cut():
    rng = np.random.default_rng(0)
    for shape in ((), (7,), (70_000,), (3, 5, 7), (300, 500), (4, 1), (2, 70_000)):
        values = rng.normal(size=shape).astype(np.float32)
        whole = array_checksums.of_part(values, [0] * len(shape), shape)
        assert whole == int(jax.jit(array_checksums.of_array)(values)), shape
        for axis, size in enumerate(shape):
            cut = int(rng.integers(0, size + 1))
            low, high = np.split(values, [cut], axis)
            starts = [cut if a == axis else 0 for a in range(len(shape))]
            parts = array_checksums.of_part(low, [0] * len(shape), shape)
            parts += array_checksums.of_part(high, starts, shape)
            assert parts % 2**32 == whole, shape
    for dtype in (jnp.bfloat16, np.float16, np.int32, np.int8):
        values = np.asarray(rng.normal(size=(6, 5)) * 50).astype(dtype)
        whole = array_checksums.of_part(values, (0, 0), (6, 5))
        assert whole == int(jax.jit(array_checksums.of_array)(values)), dtype
    square = rng.normal(size=(8, 8)).astype(np.float32)
    known = array_checksums.of_part(square, (0, 0), (8, 8))
    for changed in (square.T, -square, square[::-1], np.roll(square, 1), square + 1):
        assert array_checksums.of_part(np.ascontiguousarray(changed), (0, 0), (8, 8)) != known


def test_parts_of_an_array_that_are_read_again_are_counted_once():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    top, bottom = ((slice(0, 2), slice(0, 4)), (slice(2, 3), slice(0, 4)))
    known = array_checksums.of_part(values, (0, 0), (3, 4))
    for expected in (known, known + 1):
        reading = array_checksums.Reading("w", (3, 4), expected)
        for part, is_last in ((top, False), (top, False), (bottom, True), (bottom, False), (top, True)):
            if is_last and expected != known:
                with pytest.raises(UserError, match=r"^w is damaged"):
                    reading.add(part, values[part])
            else:
                reading.add(part, values[part])

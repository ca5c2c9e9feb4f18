"""An objective's parameters beside the model: trained, frozen or averaged, saved and resumed."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.data.batches.text_data import TextData
from jaxir.models import layers
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.objective import Objective
from jaxir.objectives.weighted_sum import Ramp, WeightedSum
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.run import warm_start
from jaxir.training.step import train_state as state_lib
from jaxir.training.step.optimizers import AdamW
from tests.training import tiny_run
from tests.training.beside import Sigmoid
from tests.training.saved_run import arrays, log
from tests.training.tiny_run import Bag, Hooked, pairs, run

SETTINGS = {"steps": 12, "checkpoint_every": 6, "eval_every": 6}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = tmp_path_factory.mktemp("whole") / "run"
    run(place, objective=Sigmoid(), **SETTINGS)
    (place / "jaxir.json").touch()  # the command `train` writes this file, by which a run is recognised
    return place


def test_auxiliary_parameters_are_trained_averaged_or_frozen(whole):
    before, after = arrays(whole, 6), arrays(whole, 12)
    assert before.keys() == after.keys()
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {"auxiliary['teacher']['kernel']"}
    assert "statistics['norm']['mean']" in before
    # The optimizer keeps moments of trained parameters only.
    kept = [name for name in before if name.startswith("opt_state") and "auxiliary" in name]
    assert kept and not any("teacher" in name for name in kept)
    assert sum("scale" in name for name in kept) == 4  # two moments of each of the two scales


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(whole, tmp_path):
    class Stopped(Exception):
        pass

    def stop(step):
        if step == 9:
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path / "run", objective=Sigmoid(), data=Hooked(pairs(64), stop), **SETTINGS)
    assert run(tmp_path / "run", objective=Sigmoid(), **SETTINGS).started_at == 6
    expected, found = arrays(whole, 12), arrays(tmp_path / "run", 12)
    assert expected.keys() == found.keys()
    assert all(expected[name].tobytes() == found[name].tobytes() for name in expected)


def test_resume_refuses_another_auxiliary(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for change, sentence in (
        ({"frozen": ["auxiliary.head.*"]}, r"frozen=None, not \['auxiliary"),
        ({"objective": Contrastive()}, rf"objective={SIGMOID}, not Contrastive\(loss="),
    ):
        with pytest.raises(UserError, match=f"was trained with {sentence}"):
            run(tmp_path / "run", **{"objective": Sigmoid()} | SETTINGS | change)


def test_frozen_parameters_stay_unchanged(tmp_path):
    model = Bag()
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    run(tmp_path / "run", model=model, frozen=["table"], steps=5, dev=None)
    after = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {"kernel", "bias"}


def test_a_sum_adds_weighs_and_keeps_parts_apart(tmp_path):
    parts = {"softmax": Contrastive(), "sigmoid": Sigmoid()}
    ramp = Ramp(start=0.0, end=0.5, steps=10, first=2)
    objective = WeightedSum(parts=parts, weights={"sigmoid": ramp})
    run(tmp_path / "run", objective=objective, steps=12)
    lines = log(tmp_path / "run")
    steps = {line["step"]: line for line in lines if "loss" in line}
    for done, line in steps.items():
        # Steps count from 0: the weight of line `done` is that of step done - 1.
        weight = 0.5 * min(max((done - 1 - 2) / 10, 0), 1)
        expected = line["softmax/loss"] + weight * line["sigmoid/loss"]
        assert line["loss"] == pytest.approx(expected, rel=1e-5)
        assert line["sigmoid/weight"] == pytest.approx(weight, abs=1e-6) and "softmax/weight" not in line
    assert len(steps) == 12 and steps[12]["sigmoid/scale"] != steps[4]["sigmoid/scale"]
    names = arrays(tmp_path / "run", 12)
    assert "auxiliary['sigmoid']['scale']" in names
    rate = AdamW(learning_rate=3e-4, warmup_steps=3).build(12).schedule
    assert {done: line["learning_rate"] for done, line in steps.items()} == {
        done: pytest.approx(float(rate(done - 1)), abs=1e-10) for done in steps
    }
    dev = {line["step"]: line for line in lines if "dev/loss" in line}
    assert set(dev) == {10, 12}
    for line in dev.values():  # evaluation uses the final weight, also at step 10
        expected = line["dev/softmax/loss"] + 0.5 * line["dev/sigmoid/loss"]
        assert line["dev/loss"] == pytest.approx(expected, rel=1e-5)


class Drawn(Objective):
    """An objective whose loss is a random number, and 0 in evaluation."""

    def features(self, form):
        return {}

    def __call__(self, model, batch, key=None, *, auxiliary, step=None):
        return jnp.float32(0) if key is None else jax.random.uniform(key), {}


def test_parts_of_a_sum_have_random_numbers_of_their_own():
    total, found = WeightedSum(parts={"a": Drawn(), "b": Drawn()})(None, {}, jax.random.key(0))
    assert abs(found["a/loss"] - found["b/loss"]) > 0.01
    assert total == pytest.approx(float(found["a/loss"] + found["b/loss"]))


@pytest.mark.slow
def test_weights_of_a_sum_must_be_known_in_evaluation(tmp_path):
    """Optax's schedules do not accept None, which is the step in evaluation."""
    falling = optax.linear_schedule(1.0, 0.0, 10)
    parts = {"a": Contrastive(), "b": Drawn()}
    with pytest.raises(UserError, match=r"the weight of 'b' must accept the step None"):
        run(tmp_path / "run", objective=WeightedSum(parts=parts, weights={"b": falling}), steps=5)
    assert not (tmp_path / "run" / "checkpoints").exists()
    told = lambda step: falling(10 if step is None else step)  # noqa: E731
    run(tmp_path / "run", objective=WeightedSum(parts=parts, weights={"b": told}), steps=5)
    lines = log(tmp_path / "run")
    weights = [line["b/weight"] for line in lines if "b/weight" in line]
    assert weights == pytest.approx([1, 0.9, 0.8, 0.7, 0.6])
    assert [line["dev/b/weight"] for line in lines if "dev/b/weight" in line] == [0.0]


@dataclasses.dataclass(frozen=True)
class Taught(Sigmoid):
    """A user's objective with another objective in a field."""

    inner: Contrastive = dataclasses.field(default_factory=lambda: Contrastive(chunks=3))


class Unread(TextData):
    def dataset(self, *args, **kwargs):
        raise AssertionError("the data are read")


@pytest.mark.parametrize(
    "objective", [Taught(), WeightedSum(parts={"a": Sigmoid(), "b": Contrastive(chunks=3)})]
)
def test_chunks_of_a_part_that_do_not_divide_the_batch_are_refused_before_data_are_read(tmp_path, objective):
    with pytest.raises(UserError, match=r"4 examples on each of the 2 devices .* cannot be embedded in 3 "):
        run(tmp_path / "run", objective=objective, data=Unread(), steps=5)
    assert not (tmp_path / "run").exists()


def test_a_model_with_other_state_is_refused():
    class Averaging(nnx.Module):
        def __init__(self):
            self.kernel, self.mean = layers.param(jnp.ones(2), None), nnx.BatchStat(jnp.zeros(2))

    with pytest.raises(UserError, match=r"the model holds 'mean' \(BatchStat\), but only an nnx\.Param is"):
        state_lib.plan_state(Averaging(), AdamW().build(1).transform, MeshConfig().build())


@pytest.mark.slow
def test_groups_have_rates_decay_and_norms_of_their_own(tmp_path):
    """A rate of 0 changes nothing; huge gradients of another group do not scale down the model's."""

    class Loud(Sigmoid):
        def __call__(self, model, batch, key=None, *, auxiliary, step=None):
            loss, metrics = super().__call__(model, batch, key, auxiliary=auxiliary, step=step)
            return loss + 1e6 * jnp.square(auxiliary.bias[...]), metrics

    def trained(name, **groups):
        optimizer = AdamW(learning_rate=1e-3, weight_decay=0.0, eps=1e-3, groups=groups)
        run(tmp_path / name, objective=Loud(), optimizer=optimizer, steps=5, dev=None)
        return arrays(tmp_path / name, 5)

    start = jax.device_get(nnx.to_pure_dict(nnx.state(Bag(), nnx.Param)))
    together = trained("together")
    apart = trained("apart", **{"auxiliary.[bs]*": {"clip_norm": 1.0}, "bias": {"learning_rate": 0.0}})
    near, far = (np.abs(x["params['table']"] - start["table"]).max() for x in (together, apart))
    assert far > 100 * near > 0
    np.testing.assert_array_equal(apart["params['bias']"], start["bias"])
    assert not np.array_equal(together["params['bias']"], start["bias"])
    assert apart["auxiliary['bias']"] != -1


@pytest.mark.slow
def test_warm_start_begins_with_learnt_parameters(whole, tmp_path):
    learnt = arrays(whole, json.loads((whole / "checkpoints/best.json").read_text())["step"])
    kept = AdamW(learning_rate=0.0, weight_decay=0.0)
    run(tmp_path / "later", objective=Sigmoid(), optimizer=kept, steps=1, auxiliary_from=str(whole))
    later = arrays(tmp_path / "later", 1)
    names = [name for name in learnt if name.startswith("auxiliary")]
    assert len(names) == 6 and all(np.array_equal(later[name], learnt[name]) for name in names)
    with pytest.raises(UserError, match="was trained with auxiliary_from="):
        run(tmp_path / "later", objective=Sigmoid(), optimizer=kept, steps=1)


@pytest.mark.slow
def test_warm_start_refuses_unsuitable_runs(whole, tmp_path):
    run(tmp_path / "plain", steps=5, dev=None)
    (tmp_path / "plain" / "jaxir.json").touch()
    (tmp_path / "empty").mkdir()
    for start, objective, message in (
        (tmp_path / "plain", Sigmoid(), "plain: its objective had no auxiliary"),
        (whole, Contrastive(), "the objective has no auxiliary parameters"),
        (whole, WeightedSum(parts={"a": Sigmoid()}), "its auxiliary has"),
        (tmp_path / "empty", Sigmoid(), "empty is not a run with checkpoints"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path / "run", objective=objective, steps=5, auxiliary_from=str(start))


SIGMOID = r"Sigmoid\(frozen=\['auxiliary.teacher.\*'\], scale=2.0, width=32\)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Sigmoid):
    """`Sigmoid` with a statistic of the data: how many queries have each word."""

    def auxiliary(self, model, *, form, rngs):
        found = super().auxiliary(model, form=form, rngs=rngs)
        found.queries = nnx.Variable(jnp.zeros(tiny_run.VOCABULARY, jnp.float32))
        return found

    def read_corpus(self, auxiliary, data):
        counts = data.token_counts("query", tiny_run.VOCABULARY)
        auxiliary.queries[...] = jnp.asarray(counts.texts_with, jnp.float32)


class OtherWords(Hooked):
    """Data that count the words of other data; the fingerprint stays their own."""

    def token_counts(self, field, vocab_size):
        return pairs(64, seed=1).token_counts(field, vocab_size)


@pytest.mark.slow
def test_statistics_are_of_a_runs_own_corpus(tmp_path):
    """A warm start computes statistics anew, too; a resume refuses statistics of other data."""
    objective = WeightedSum(parts={"task": Contrastive(), "own": Counting()})
    settings = {"objective": objective, "steps": 4, "checkpoint_every": 2, "dev": None}
    for name, count, more in (("first", 64, {}), ("second", 40, {"auxiliary_from": str(tmp_path / "first")})):
        data, run_dir = pairs(count), tmp_path / name
        run(run_dir, data=data, **settings, **more)
        (run_dir / "jaxir.json").touch()
        texts = [set(row[1:-1]) for row in data._tables["queries"].ids(np.arange(count), tiny_run.LENGTH)]
        expected = [sum(word in text for text in texts) for word in range(tiny_run.VOCABULARY)]
        np.testing.assert_array_equal(arrays(run_dir, 4)["statistics['own']['queries']"], expected)
        assert len(set(expected)) > 5
    shutil.rmtree(tmp_path / "first/checkpoints/4")
    (tmp_path / "first/COMPLETE").unlink()
    with pytest.raises(UserError, match="auxiliary modules that started with other values; these values"):
        run(tmp_path / "first", data=OtherWords(pairs(64), lambda step: None), **settings)


class Begun(Exception):
    """Raised once a run has its initial state."""


@pytest.mark.slow
def test_warm_start_never_uses_a_damaged_auxiliary(whole, tmp_path, monkeypatch):
    """A later stage starts from a run with a file that is missing, cut off, or has a flipped bit."""
    found, real = [], warm_start.with_auxiliary_of

    def begun(*args, **how):
        found.append(jax.device_get(real(*args, **how)))
        raise Begun

    monkeypatch.setattr(warm_start, "with_auxiliary_of", begun)

    def start(run_dir):
        """Returns the auxiliary that a run starts from, or the error."""
        with pytest.raises((Begun, UserError)) as raised:
            run(tmp_path / "later", objective=Sigmoid(), steps=5, dev=None, auxiliary_from=str(run_dir))
        return (found[-1].auxiliary, found[-1].statistics) if raised.type is Begun else str(raised.value)

    expected, refused = start(whole), []
    best = json.loads((whole / "checkpoints/best.json").read_text())["step"]
    place = whole / "checkpoints" / str(best)
    files = [place / "auxiliary" / name for name in ("_METADATA", "manifest.ocdbt")]
    for item in ("auxiliary", "statistics"):
        data = [*(place / item).glob("d/*"), *(place / item).glob("ocdbt.process_0/d/*")]
        files.append(max(data, key=lambda path: path.stat().st_size))
    for number, file in enumerate(files):
        content, middle = file.read_bytes(), file.stat().st_size // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        for damage, left in (("removed", None), ("cut", content[:middle]), ("flipped", flipped)):
            shutil.copytree(whole, run_dir := tmp_path / f"{number} {damage}")
            path = run_dir / file.relative_to(whole)
            path.unlink() if left is None else path.write_bytes(left)
            got = start(run_dir)
            if isinstance(got, str):
                refused.append(got)
                assert "\n" not in got and str(run_dir) in got and "has no" not in got
            else:  # the damage did not change the arrays
                assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(expected)))
    assert len(refused) > len(files)

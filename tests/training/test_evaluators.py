"""Evaluators give the numbers of a plain computation; their schedules, errors and best checkpoints."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.batches.dataset import Dataset
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.weighted_sum import WeightedSum
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.evaluators.evaluation_context import BatchedFunction, Bench
from jaxir.training.evaluators.evaluator import Evaluator, Prepared
from jaxir.training.evaluators.loss import Loss
from jaxir.training.evaluators.retrieval import Retrieval
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_settings import disagreement
from jaxir.training.step.optimizers import AdamW
from jaxir.training.step.train_state import initial_state, plan_state
from jaxir.training.suite import Suite, evaluators_of
from tests.training.saved_run import log
from tests.training.tiny_run import LENGTH, Bag, pairs, run


def ranks_of(query, passage, dimensions=None):
    """Returns the rank of each query's passage (in the same row) by cosines of the first dimensions."""
    cut = (x[:, :dimensions] for x in (query, passage))
    query, passage = (x / np.linalg.norm(x, axis=1)[:, None] for x in cut)
    similarity = query @ passage.T
    return 1 + (similarity > np.diag(similarity)[:, None]).sum(1)


def reciprocal(ranks):
    return pytest.approx(np.where(ranks <= 10, 1 / ranks, 0).mean(), abs=1e-6)


def bench_of(*, training=None, batch_size=8, devices=4, objective=None):
    return Bench(
        tokenizer=None,
        form=TextFormat(LENGTH, LENGTH),
        objective=objective or Contrastive(),
        training_data=training or pairs(40, seed=9),
        batch_size=batch_size,
        partitioner=MeshConfig().build(jax.devices()[:devices]),
    )


def evaluation(dev, *, distractors=0, batch_size=8, devices=4, objective=None, training=None):
    model = Bag(dropout_rate=0.9)
    bench = bench_of(training=training, batch_size=batch_size, devices=devices, objective=objective)
    settings = {"dev": dev, "dev_distractors": distractors, "dev_metric": "loss", "batch_size": batch_size}
    recipe = Recipe(model=object(), objective=Contrastive(), data=None, steps=1, **settings)
    retrieval, loss = evaluators_of(recipe)
    evaluators = [dataclasses.replace(retrieval, dimensions=[5]), loss]
    suite = Suite(evaluators, bench, best_by="loss", eval_every=1, steps=1)
    transform = AdamW().build(1).transform
    plan = plan_state(model, transform, bench.partitioner)
    bench.compile(plan)
    return model, suite.measure(1, initial_state(model, transform, plan))


@pytest.mark.parametrize("distractors", [0, 40])
def test_retrieval_metrics_count_every_pair_and_every_distractor(distractors):
    dev = pairs(21, seed=25)
    model, scores = evaluation(dev, distractors=distractors)
    rows, extra = dev.once(), pairs(40, seed=9).once(distractors)
    query = np.asarray(model.encode(rows["query_ids"], tower="query"))
    passages = np.concatenate([rows["passage_ids"], extra["passage_ids"]])
    passage = np.asarray(model.encode(passages, tower="passage"))
    ranks = ranks_of(query, passage)
    assert ranks.mean() > 2 and {10, 11} <= {*np.minimum(ranks, 11)} and len(passage) == 21 + distractors
    assert scores["RR@10"] == reciprocal(ranks)
    assert scores["RR@10/5"] == reciprocal(ranks_of(query, passage, 5)) != scores["RR@10"]
    gain = np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean()
    assert scores["nDCG@10"] == pytest.approx(gain, abs=1e-6)


class OnlyBatches(Dataset):
    """A user's data without the method `once`, which training does not call."""

    num_examples, fingerprint, features = 40, "a", pairs(1).features

    def batched(self, how):
        return pairs(40, seed=9).batched(how)


def test_pairs_that_cannot_be_evaluated_are_refused():
    dev, training = pairs(21, seed=25), pairs(40, seed=9)
    for some in ({"dev": OnlyBatches()}, {"dev": dev, "training": OnlyBatches()}):
        with pytest.raises(UserError, match="OnlyBatches cannot be evaluated on: it does not define `once`"):
            evaluation(some.pop("dev"), distractors=5, **some)
    training.features = {"text_ids": training.features["query_ids"]}
    with pytest.raises(UserError, match="training data have none: set dev_distractors to 0"):
        evaluation(dev, distractors=5, training=training)
    queries = dev._tables["queries"]
    dev._tables["queries"] = queries._replace(flat=np.ones_like(queries.flat))
    with pytest.raises(UserError, match="all 21 texts of the dev pairs' query tower have the same tokens"):
        evaluation(dev)


@pytest.mark.parametrize("count", [16, 21])
def test_loss_and_accuracy_are_means_over_full_batches_without_dropout(count):
    dev = pairs(count, seed=1)
    model, scores = evaluation(dev)
    batches = dev.batches(batch_size=1, seed=0)
    rows = [next(batches) for _ in range(count)]
    found, loss_of = [], jax.jit(lambda batch: Contrastive()(model, batch, None))
    for at in (0, 8):
        batch = {k: np.concatenate([r[k] for r in rows[at : at + 8]]) for k in rows[0]}
        loss, metrics = loss_of(batch)
        found.append((float(loss), float(metrics["accuracy"])))
    assert (scores["loss"], scores["accuracy"]) == pytest.approx(np.mean(found, axis=0), rel=1e-5)
    assert found[0] != found[1]


@pytest.mark.slow
def test_fewer_pairs_than_a_batch_are_one_smaller_batch():
    _, scores = evaluation(pairs(7, seed=1), batch_size=512)
    _, one_device = evaluation(pairs(7, seed=1), batch_size=4, devices=1)
    assert scores["loss"] == pytest.approx(one_device["loss"], rel=1e-5)
    _, at_once = evaluation(pairs(7, seed=1), batch_size=512, devices=1)
    for objective in (Contrastive(chunks=4), WeightedSum(parts={"a": Contrastive(chunks=4)})):
        _, in_chunks = evaluation(pairs(7, seed=1), batch_size=512, devices=1, objective=objective)
        assert in_chunks["loss"] == pytest.approx(at_once["loss"], rel=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm(Evaluator):
    """Measures the norm of the bias; `values` may have another result, or an error to raise, for a step."""

    metrics = {"norm": "smaller"}  # noqa: RUF012

    values: dict = dataclasses.field(default_factory=dict)
    seen: list = dataclasses.field(default_factory=list)

    def prepare(self, bench):
        rows = {"one": np.ones([2, 1], np.float32)}
        program = bench.program(lambda model, _, batch: batch["one"] * model.bias[...][None], rows)

        def measure(state):
            step = int(state.step)
            self.seen.append(step)
            value = self.values.get(step, float(np.linalg.norm(program.of_rows(state)[0])))
            if isinstance(value, Exception):
                raise value
            return value if isinstance(value, dict) else {"norm": value}

        return Prepared(measure, "the model's own bias")


def best_of(run_dir):
    return json.loads((run_dir / "checkpoints" / "best.json").read_text())


def logged(run_dir, name):
    lines = log(run_dir)
    return {line["step"]: line[name] for line in lines if name in line}


def test_any_metric_chooses_the_best_checkpoint_in_its_direction(tmp_path):
    """The bias starts at 0 and grows, so the first evaluation is the best if smaller is better."""
    norm = Norm(every=5)
    result = run(tmp_path / "run", evaluators=[norm], dev_metric="norm", checkpoint_every=30)
    assert norm.seen == [0, 5, 10, 15, 20, 25, 30]  # before the first step, each evaluator is tried out
    values = logged(tmp_path / "run", "dev/norm")
    assert list(values) == norm.seen[1:] and len(set(values.values())) == 6
    assert min(values.values()) == values[5]
    assert best_of(tmp_path / "run") == {"step": 5, "metric": "norm", "value": values[5]}
    assert (result.best_step, result.best_value) == (5, values[5])
    # The default evaluators follow eval_every.
    assert sorted(logged(tmp_path / "run", "dev/nDCG@10")) == [10, 20, 30]


def test_evaluators_have_schedules_of_their_own(tmp_path):
    first, second = Norm(name="a", every=0.5), Norm(name="b", every=7)
    run(tmp_path / "run", dev=None, evaluators=[first, second], dev_metric="b/norm", checkpoint_every=100)
    assert (first.seen, second.seen) == ([0, 15, 30], [0, 7, 14, 21, 28, 30])
    assert best_of(tmp_path / "run")["step"] == 7
    with pytest.raises(UserError, match=r"Norm 'a': every must be a whole number of steps, or a share"):
        run(tmp_path / "other", evaluators=[Norm(name="a", every=1.5)])


SUM = WeightedSum(parts={"pairs": Contrastive()})


def by(metric, *evaluators, **settings):
    return {"dev_metric": metric or "nDCG@10", "evaluators": list(evaluators)} | settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (by("norms", Norm()), "dev_metric is 'norms', but only nDCG@10, RR@10, loss, accuracy, norm are mea"),
        (by("", Norm(), Norm()), "evaluators Norm and Norm both measure norm: give one a `name`"),
        (by("", Retrieval(data=None)), "evaluators Retrieval and Retrieval both measure nDCG@10: give"),
        (by("", Norm), "evaluators must be objects such as Retrieval(...), not <class"),
        (by("", Norm(name="a", values={2: UserError("no")})), "step 2: evaluator Norm 'a': no; training"),
        (
            by("", Norm(values={4: np.nan})),
            "step 4: evaluator Norm: the metric norm is nan, not a finite number",
        ),
        (by("", Norm(values={2: {"loss": 1.0}})), "step 2: evaluator Norm measures loss, as another eval"),
        (by("norm", Norm(values={2: {"n": 1.0}})), "step 2: evaluator Norm measured no norm (dev_metric),"),
        (by("norm", Norm(values={0: {"n": 1.0}})), "tried before the first step: evaluator Norm measured"),
        (by("accuracy", objective=SUM), "tried before the first step: evaluator Loss measured no accuracy"),
        (by("", Retrieval(name="none", data=None)), "evaluator Retrieval 'none': the evaluator has no dat"),
        (by("", objective=Norm()), "objective must be an Objective of jaxir.objectives.objective, not a"),
    ],
)
def test_impossible_evaluators_are_refused(tmp_path, settings, sentence):
    with pytest.raises(UserError) as error:
        run(tmp_path / "run", eval_every=2, **settings)
    assert str(error.value).startswith(sentence)
    assert (tmp_path / "run").exists() == sentence.startswith("step")


def test_error_of_an_evaluator_names_the_evaluator_and_the_step(tmp_path):
    class Unprepared(Norm):
        def prepare(self, bench):
            raise KeyError("x")

    with pytest.raises(RuntimeError, match=r"^evaluator Unprepared: KeyError: 'x'"):
        run(tmp_path / "run", evaluators=[Unprepared()])
    assert not (tmp_path / "run").exists()
    with pytest.raises(RuntimeError, match="step 2: evaluator Norm: KeyError: 'x'") as error:
        run(tmp_path / "run", eval_every=2, evaluators=[Norm(values={2: KeyError("x")})])
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.slow
def test_resume_refuses_only_another_choice_of_the_best_checkpoint(tmp_path):
    run(tmp_path / "run", evaluators=[Norm()], steps=10)
    more = Norm(name="more")
    assert run(tmp_path / "run", evaluators=[more], steps=10).step == 10
    with pytest.raises(UserError, match=r"with dev=nDCG@10 on 21 pairs .* not norm on the model's"):
        run(tmp_path / "run", evaluators=[Norm()], steps=10, dev_metric="norm")


def test_resume_compares_the_settings_of_a_users_evaluator():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Scaled(Evaluator):
        metrics = {"norm": "smaller"}  # noqa: RUF012
        scale: float = 1.0
        data: object = None

        def prepare(self, bench):
            return Prepared(lambda state: {"norm": 1.0}, "the same data")

    def dev(**settings):
        suite = Suite([Scaled(**settings)], None, best_by="norm", eval_every=1, steps=1)
        return {"dev": suite.fingerprint}

    one = dev(scale=1.0, data=pairs(4))
    # `data` and `every` are not compared: data have a fingerprint of their own.
    assert disagreement(one, dev(scale=1.0, data=pairs(8), every=2)) is None
    assert "evaluated by" in disagreement(one, dev(scale=2.0))
    # Earlier versions recorded the evaluator in this form.
    assert disagreement({"dev": "norm on the same data"}, one) is None


def test_resume_compares_the_rows_of_a_single_smaller_batch():
    """On four devices two of ten rows are left out: the values of two meshes are not compared."""

    def told(devices, batch_size):
        bench = bench_of(batch_size=batch_size, devices=devices)
        return {"dev": f"loss on {Loss(data=pairs(10, seed=2)).prepare(bench).data}"}

    assert re.search("in one batch of 10, not .* in one batch of 8;", disagreement(told(1, 16), told(4, 16)))
    assert disagreement(told(1, 16), told(2, 16)) is None
    assert disagreement(told(1, 8), told(4, 8)) is None
    earlier = {"dev": told(1, 16)["dev"].partition(", in one")[0]}
    assert disagreement(earlier, told(4, 16)) is None


def test_on_cpus_a_batch_is_evaluated_before_the_next_one_begins():
    """Collectives of two batches would starve each other: eight devices hung in two of three runs."""
    partitioner, model, optimizer = MeshConfig().build(), Bag(), AdamW().build(1)

    def slow(model, _, batch):
        x = jnp.ones([400, 400]) * batch["x"].mean()
        return jax.lax.fori_loop(0, 10, lambda _, x: jnp.sin(x @ x), x).sum()

    rows = {"x": np.ones([24, 1], np.float32)}
    program = BatchedFunction(slow, rows, batch_size=8, partitioner=partitioner)
    plan = plan_state(model, optimizer.transform, partitioner)
    program.compile(plan)
    state = initial_state(model, optimizer.transform, plan)
    ready = [found.is_ready() for found in program._run(state, range(0, 24, 8))]
    assert ready == [True] * 3

"""Evaluators: against the same numbers computed plainly, and what the loop makes of a list of them."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import Pairs, fit
from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.batches.dataset import Dataset
from jaxir.evaluation.collection import evaluate_collection, read_collection
from jaxir.evaluation.senteval_files import TASKS, read_senteval
from jaxir.evaluation.sts_files import read_sts
from jaxir.evaluation.sts_scores import evaluate_sts
from jaxir.evaluation.transfer_tasks import scores_of, texts_of
from jaxir.interop.formats import convert
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.weighted_sum import WeightedSum
from jaxir.retrieval.encoding.text_encoder import DualEncoder
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.evaluators.corpus_search import Search
from jaxir.training.evaluators.evaluation_context import Bench, Program
from jaxir.training.evaluators.evaluator import Evaluator, Prepared
from jaxir.training.evaluators.loss import Loss
from jaxir.training.evaluators.retrieval import Retrieval
from jaxir.training.evaluators.senteval import SentEval
from jaxir.training.evaluators.sts import STS
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.run_settings import disagreement
from jaxir.training.step.optimizers import AdamW
from jaxir.training.step.train_state import initial_state, plan_state
from jaxir.training.suite import Suite, evaluators_of
from tests.training.saved_run import log
from tests.training.tiny_run import LENGTH, Bag, ToOne, pairs, run


def rr_of_first(count, query, passage):
    query, passage = (x[:, :count] / np.linalg.norm(x[:, :count], axis=1)[:, None] for x in (query, passage))
    similarity = query @ passage.T
    ranks = 1 + (similarity > np.diag(similarity)[:, None]).sum(1)
    return np.where(ranks <= 10, 1 / ranks, 0).mean()


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
    settings = {"dev": dev, "dev_distractors": distractors, "dev_metric": "loss"}
    recipe = Recipe(
        model=object(), objective=Contrastive(), data=None, steps=1, batch_size=batch_size, **settings
    )
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
    similarity = query @ passage.T
    ranks = 1 + (similarity > np.diag(similarity)[:, None]).sum(1)
    assert ranks.mean() > 2 and {10, 11} <= {*np.minimum(ranks, 11)} and len(passage) == 21 + distractors
    assert scores["RR@10"] == pytest.approx(np.where(ranks <= 10, 1 / ranks, 0).mean(), abs=1e-6)
    assert scores["RR@10/5"] == pytest.approx(rr_of_first(5, query, passage), abs=1e-6) != scores["RR@10"]
    assert scores["nDCG@10"] == pytest.approx(
        np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean(), abs=1e-6
    )


class OnlyBatches(Dataset):
    """Data of one's own without `once`, which training does not ask for."""

    num_examples, fingerprint, features = 40, "a", pairs(1).features

    def batched(self, how):
        return pairs(40, seed=9).batched(how)


def test_pairs_that_cannot_be_evaluated_cost_a_sentence():
    dev, training = pairs(21, seed=25), pairs(40, seed=9)
    for some in ({"dev": OnlyBatches()}, {"dev": dev, "training": OnlyBatches()}):
        with pytest.raises(
            UserError, match="OnlyBatches has no `once`, which gives the examples that are ev"
        ):
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
    """The length of the bias; what `values` has for a step it returns instead, or raises."""

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


def test_the_best_checkpoint_goes_by_any_metric_in_its_direction(tmp_path):
    """The bias starts at 0 and grows: the smaller the better, the first evaluation is the best."""
    norm = Norm(every=5)
    result = run(tmp_path / "run", evaluators=[norm], dev_metric="norm", checkpoint_every=30)
    assert norm.seen == [0, 5, 10, 15, 20, 25, 30]  # at 0 it is tried out
    values = logged(tmp_path / "run", "dev/norm")
    assert (
        list(values) == norm.seen[1:] and len(set(values.values())) == 6 and min(values.values()) == values[5]
    )
    assert best_of(tmp_path / "run") == {"step": 5, "metric": "norm", "value": values[5]}
    assert (result.best_step, result.best_value) == (5, values[5])
    assert sorted(logged(tmp_path / "run", "dev/nDCG@10")) == [10, 20, 30]  # by eval_every


def test_evaluators_have_a_schedule_of_their_own_as_a_share_too(tmp_path):
    first, second = Norm(name="a", every=0.5), Norm(name="b", every=7)
    run(tmp_path / "run", dev=None, evaluators=[first, second], dev_metric="b/norm", checkpoint_every=100)
    assert (first.seen, second.seen) == ([0, 15, 30], [0, 7, 14, 21, 28, 30])
    assert best_of(tmp_path / "run")["step"] == 7
    with pytest.raises(UserError, match=r"Norm 'a': every must be a whole number of steps, or a share"):
        run(tmp_path / "other", evaluators=[Norm(name="a", every=1.5)])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"evaluators": [Norm()], "dev_metric": "norms"},
            "there is no dev metric 'norms', only nDCG@10, RR@10, loss, accuracy, norm; did you mean 'norm'?",
        ),
        ({"evaluators": [Norm(), Norm()]}, "evaluators Norm and Norm both measure norm: give one a name"),
        (
            {"evaluators": [Retrieval(data=None)]},
            "evaluators Retrieval and Retrieval both measure nDCG@10: give one a name",
        ),
        ({"evaluators": [Norm]}, "evaluators must be objects such as Retrieval(...), not <class"),
        (
            {"evaluators": [Norm(name="late", values={2: UserError("no more")})]},
            "step 2: evaluator Norm 'late': no more; training stopped, ",
        ),
        (
            {"evaluators": [Norm(values={4: np.nan})]},
            "step 4: evaluator Norm: norm is nan; training stopped",
        ),
        (
            {"evaluators": [Norm(values={2: {"loss": 1.0}})]},
            "step 2: evaluator Norm measures loss, as another one does: give it a name; training stopped",
        ),
        (
            {"evaluators": [Norm(values={2: {"n": 1.0}})], "dev_metric": "norm"},
            "step 2: evaluator Norm has measured no norm, only n; training stopped",
        ),
        (
            {"evaluators": [Norm(values={0: {"n": 1.0}})], "dev_metric": "norm"},
            "tried before the first step: evaluator Norm has measured no norm, only n",
        ),
        (
            {"objective": WeightedSum(parts={"pairs": Contrastive()}), "dev_metric": "accuracy"},
            "tried before the first step: evaluator Loss has measured no accuracy, only loss, pairs/accuracy",
        ),
        (
            {"evaluators": [Retrieval(name="none", data=None)]},
            "evaluator Retrieval 'none': it has no data: DEV_SPLIT, or the setting that names them, is None",
        ),
        (
            {"objective": Norm()},
            "objective must be an Objective of jaxir.objectives.objective, not a",
        ),
    ],
)
def test_evaluators_that_cannot_be_cost_a_sentence(tmp_path, settings, sentence):
    with pytest.raises(UserError) as error:
        run(tmp_path / "run", eval_every=2, **settings)
    assert str(error.value).startswith(sentence)
    assert (tmp_path / "run").exists() == sentence.startswith("step")


def test_a_fault_of_an_evaluator_names_the_evaluator_and_the_step(tmp_path):
    class Unprepared(Norm):
        def prepare(self, bench):
            raise KeyError("x")

    with pytest.raises(RuntimeError, match=r"^evaluator Unprepared: KeyError: 'x'"):
        run(tmp_path / "run", evaluators=[Unprepared()])
    assert not (tmp_path / "run").exists()
    with pytest.raises(RuntimeError, match="step 2: evaluator Norm: KeyError: 'x'") as error:
        run(tmp_path / "run", eval_every=2, evaluators=[Norm(values={2: KeyError("x")})])
    assert isinstance(error.value.__cause__, KeyError)


def test_only_what_the_best_goes_by_must_agree_on_resuming(tmp_path):
    run(tmp_path / "run", evaluators=[Norm()], steps=10)
    more = Norm(name="more")
    assert run(tmp_path / "run", evaluators=[more], steps=10).step == 10
    with pytest.raises(
        UserError, match=r"was trained with dev=nDCG@10 on 21 pairs .* not norm on the model's"
    ):
        run(tmp_path / "run", evaluators=[Norm()], steps=10, dev_metric="norm")


def test_resume_compares_the_settings_of_an_evaluator_that_is_not_jaxirs():
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
    assert disagreement(one, dev(scale=1.0, data=pairs(8), every=2)) is None  # `data` has its fingerprint
    assert "evaluated by" in disagreement(one, dev(scale=2.0))
    assert disagreement({"dev": "norm on the same data"}, one) is None  # as earlier versions recorded it


def test_resume_names_the_chosen_setting_before_its_consequences():
    saved = {"auxiliary": "2 arrays a", "model": "9 parameters a", "objective": "TSDAE()", "seed": 0}
    now = {"auxiliary": "2 arrays b", "model": "9 parameters b", "objective": "TSDAE()", "seed": 1}
    assert disagreement(saved, now).startswith("was trained with seed=0, not 1;")
    now = now | {"seed": 0, "objective": "Contrastive()"}
    assert disagreement(saved, now).startswith("was trained with objective=TSDAE(), not Contrastive();")
    now = now | {"objective": "TSDAE()"}
    assert disagreement(saved, now).startswith("was trained with auxiliary modules that began with")


def test_runs_whose_loss_was_told_with_distractors_are_resumed(tmp_path):
    run(tmp_path / "run", dev_metric="loss", steps=10)
    record = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    earlier = record | {"dev": record["dev"] + ", 40 distractors"}
    assert disagreement(earlier, record) is None
    assert "dev=" in disagreement(earlier | {"dev": "loss on other pairs, 40 distractors"}, record)


def test_runs_that_did_not_tell_how_texts_were_written_are_resumed():
    told = {"dev": "EM on 8 questions, hash a, written with max_new_tokens=4, num_beams=1"}
    assert disagreement({"dev": "EM on 8 questions, hash a"}, told) is None
    assert "dev=" in disagreement({"dev": "EM on 8 questions, hash b"}, told)
    assert "dev=" in disagreement({"dev": None}, told)
    assert "dev=" in disagreement({"dev": "EM on 8 questions, hash a"}, {"dev": None})


def test_the_loss_of_one_smaller_batch_tells_its_rows():
    """On four devices two of ten rows are left out: the values of two meshes are not compared."""

    def told(devices, batch_size):
        bench = bench_of(batch_size=batch_size, devices=devices)
        return {"dev": f"loss on {Loss(data=pairs(10, seed=2)).prepare(bench).data}"}

    assert re.search("in one batch of 10, not .* in one batch of 8;", disagreement(told(1, 16), told(4, 16)))
    assert disagreement(told(1, 16), told(2, 16)) is None
    assert disagreement(told(1, 8), told(4, 8)) is None
    earlier = {"dev": told(1, 16)["dev"].partition(", in one")[0]}
    assert disagreement(earlier, told(4, 16)) is None


WORDS = ["da de di", "ha he hi", "la le li", "ma me mi"]


def trained(model, path, evaluators, best_by):
    how = {"steps": 2, "batch_size": 4, "evaluators": evaluators, "dev_metric": best_by}
    return fit(model, Pairs(WORDS, WORDS), objective=ToOne(), **how, output_dir=path)


def test_sts_in_the_loop_is_sts_of_the_encoder(tmp_path, one_layer):
    lines = [
        "5\tda de\tda de di",
        "3\tha he\tha ha he he",
        "4\tla\tla le",
        "1\tma me\tda",
        "0.5\tra\tla me",
        "2\tsa\tse",
    ]
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_text(
            "\n".join(["score\tsentence1\tsentence2", *lines[: 6 if name == "a" else 4]])
        )
    (tmp_path / "splits").mkdir()  # by whose test split no checkpoint may be chosen
    for name, file in (("test", "a"), ("dev", "b"), ("train", "a")):
        shutil.copy(tmp_path / f"{file}.tsv", tmp_path / "splits" / f"{name}.tsv")
    judges = [
        STS(path=str(tmp_path)),
        STS(path=str(tmp_path / "b.tsv"), name="one"),
        STS(path=str(tmp_path / "splits"), name="splits"),
        STS(path=str(tmp_path), name="weighted", setting="wmean"),
    ]
    encoder = trained(f"st:{one_layer}", tmp_path / "run", judges, "spearman")
    best = best_of(tmp_path / "run")
    scores = evaluate_sts(encoder, read_sts(tmp_path))
    found = scores.spearman | {"": scores.spearman["all"]}
    names = {name: f"spearman/{name}".rstrip("/") for name in found}
    told = {name: logged(tmp_path / "run", f"dev/{log}")[best["step"]] for name, log in names.items()}
    assert told == pytest.approx(found, abs=1e-6) and len(set(told.values())) == 5
    for one in ("one", "splits"):
        assert logged(tmp_path / "run", f"dev/{one}/spearman")[best["step"]] == told["b"]
    assert logged(tmp_path / "run", "dev/weighted/spearman")[best["step"]] == told["wmean"]
    space, uniformity = scores.space["all"], logged(tmp_path / "run", "dev/uniformity")
    assert uniformity[best["step"]] == pytest.approx(space.uniformity, abs=1e-5)
    assert len(set(uniformity.values())) == len(uniformity) > 1, "each is of the encoder as it is then"
    assert logged(tmp_path / "run", "dev/alignment")[best["step"]] == pytest.approx(space.alignment, abs=1e-5)
    assert (best["metric"], best["value"]) == ("spearman", told["all"])


def test_search_in_the_loop_is_search_of_the_encoder(tmp_path, one_layer):
    """By a metric of a collection, some queries of which are documents too."""
    rng = np.random.default_rng(0)
    texts = {f"d{n}": " ".join(rng.choice([*WORDS[n % 4].split(), "ro"], 5)) for n in range(40)}
    queries = {f"d{n}": texts[f"d{n}"] for n in range(6)} | {"q": "la ro"}
    for name, some in (("corpus", texts), ("queries", queries)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in some.items()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "qrels").mkdir()
    judged = [f"{query}\td{n + far}\t1" for n, query in enumerate(queries) for far in (4, 8, 21)]
    (tmp_path / "qrels/dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    for forum in ("android", "unix"):
        shutil.copytree(tmp_path, tmp_path / "cqa" / forum, ignore=lambda *_: ["cqa"])
    (tmp_path / "cqa/unix/qrels/dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged[:9]]))
    wanted, dropped = "R@10 CappedR@1 P@10", {"identical_ids": "drop"}
    judges = [
        Search(dataset=f"beir:{tmp_path}", wanted=wanted, **dropped),
        Search(dataset=str(tmp_path), name="kept"),
        Search(dataset=f"cqadupstack:{tmp_path}/cqa", name="forums"),
    ]
    model = f"st:{one_layer}"
    encoder = trained(model, tmp_path / "run", judges, "R@10")
    best = best_of(tmp_path / "run")
    assert best["metric"] == "R@10"
    collection = read_collection(tmp_path, "dev")
    for name, metrics, how in (("", wanted, dropped), ("kept/", "R@10 P@10", {})):
        values = evaluate_collection(encoder, collection, metrics, **how).values
        found = {metric: logged(tmp_path / "run", f"dev/{name}{metric}")[best["step"]] for metric in values}
        assert found == pytest.approx(values, abs=1e-6) and 0 < values["R@10"] < 1
    forums = {m: logged(tmp_path / "run", f"dev/forums/{m}") for m in ("R@10", "R@10/android", "R@10/unix")}
    mean, android, unix = (values[best["step"]] for values in forums.values())
    fewer = evaluate_collection(encoder, read_collection(tmp_path / "cqa/unix", "dev"), "R@10").values["R@10"]
    assert (android, unix) == pytest.approx((found["R@10"], fewer)) and android != unix > 0
    assert mean == pytest.approx((android + unix) / 2)
    for search, sentence in (
        ({"dataset": str(tmp_path), "wanted": "R@@10"}, "metric 'R@@10' cannot be computed"),
        (
            {"dataset": str(tmp_path), "wanted": "R@1000", "depth": 100},
            "R@1000 is of 1000 answers, and a query",
        ),
        ({"dataset": "sts:x"}, "evaluator Search: dataset must be beir:DIR or quora:DIR or eproduct:DIR or"),
    ):
        with pytest.raises(UserError, match=sentence):
            trained(model, tmp_path / "other", [Search(**search)], "R@10")
    assert not (tmp_path / "other").exists()


def test_transfer_tasks_in_the_loop_are_those_of_vectors_of_their_own_length(tmp_path, one_layer):
    rng = np.random.default_rng(0)
    for file, words in zip(TASKS["CR"].files, (WORDS[:2], WORDS[2:]), strict=True):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        rows = [" ".join(rng.choice(" ".join([*words, *WORDS]).split(), 4)) for _ in range(20)]
        (tmp_path / file).write_text("\n".join(rows) + "\n")
    convert(f"st:{one_layer}", tmp_path / "cosine", "jaxir", similarity="cosine")
    judges = [SentEval(directory=str(tmp_path), folds=2)]
    trained(str(tmp_path / "cosine"), tmp_path / "run", judges, "transfer")
    best = best_of(tmp_path / "run")
    convert(str(tmp_path / "run"), tmp_path / "model", "jaxir", similarity="dot")
    tasks = read_senteval(tmp_path)
    vectors = DualEncoder.load(str(tmp_path / "model")).encode_queries(texts_of(tasks))
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() > 0.1
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    dev, of_unit = (scores_of(tasks, v, folds=2)["CR"].dev for v in (vectors, unit))
    assert dev != pytest.approx(of_unit)
    assert 40 < dev < 100 and best["metric"] == "transfer" and best["value"] == pytest.approx(dev)
    assert logged(tmp_path / "run", "dev/transfer/CR")[best["step"]] == pytest.approx(dev)


def test_on_cpus_a_batch_is_evaluated_before_the_next_one_begins():
    """Their collectives would starve each other: eight devices on two cores hung, two runs of three."""
    partitioner, model, optimizer = MeshConfig().build(), Bag(), AdamW().build(1)

    def slow(model, _, batch):
        x = jnp.ones([400, 400]) * batch["x"].mean()
        return jax.lax.fori_loop(0, 10, lambda _, x: jnp.sin(x @ x), x).sum()

    rows = {"x": np.ones([24, 1], np.float32)}
    program = Program(slow, rows, batch_size=8, partitioner=partitioner)
    plan = plan_state(model, optimizer.transform, partitioner)
    program.compile(plan)
    state = initial_state(model, optimizer.transform, plan)
    ready = [found.is_ready() for found in program._run(state, range(0, 24, 8))]
    assert ready == [True] * 3

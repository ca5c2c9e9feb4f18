"""STS, Search and SentEval while a model trains give the numbers of the saved encoder."""

import json
import shutil

import numpy as np
import pytest

from jaxir import Pairs, fit
from jaxir.core.errors import UserError
from jaxir.evaluation.collection import evaluate_collection, read_collection
from jaxir.evaluation.senteval_files import TASKS, read_senteval
from jaxir.evaluation.sts_files import read_sts
from jaxir.evaluation.sts_scores import evaluate_sts
from jaxir.evaluation.transfer_tasks import scores_of, texts_of
from jaxir.interop.formats import convert
from jaxir.retrieval.encoding.text_encoder import DualEncoder
from jaxir.training.evaluators.corpus_search import Search
from jaxir.training.evaluators.senteval import SentEval
from jaxir.training.evaluators.sts import STS
from tests.training.saved_run import log
from tests.training.tiny_run import ToOne

WORDS = ["da de di", "ha he hi", "la le li", "ma me mi"]
RATED = ["5\tda de\tda de di", "3\tha he\tha ha he he", "4\tla\tla le", "1\tma me\tda"]
RATED += ["0.5\tra\tla me", "2\tsa\tse"]
WANTED = {"wanted": "R@10 CappedR@1 P@10", "identical_ids": "drop"}


def write_sts(folder):
    """Writes two files, and a folder of splits, whose test split must not choose a checkpoint."""
    (folder / "splits").mkdir(parents=True)
    for name, count in (("a", 6), ("b", 4)):
        (folder / f"{name}.tsv").write_text("\n".join(["score\tsentence1\tsentence2", *RATED[:count]]))
    for name, file in (("test", "a"), ("dev", "b"), ("train", "a")):
        shutil.copy(folder / f"{file}.tsv", folder / "splits" / f"{name}.tsv")


def write_collection(folder):
    """Writes a collection in which some queries are documents, too, and two forums made from it."""
    (folder / "qrels").mkdir(parents=True)
    rng = np.random.default_rng(0)
    texts = {f"d{n}": " ".join(rng.choice([*WORDS[n % 4].split(), "ro"], 5)) for n in range(40)}
    queries = {f"d{n}": texts[f"d{n}"] for n in range(6)} | {"q": "la ro"}
    for name, some in (("corpus", texts), ("queries", queries)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in some.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    judged = [f"{query}\td{n + far}\t1" for n, query in enumerate(queries) for far in (4, 8, 21)]
    (folder / "qrels/dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    for forum in ("android", "unix"):
        shutil.copytree(folder, folder / "cqa" / forum, ignore=lambda *_: ["cqa"])
    (folder / "cqa/unix/qrels/dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged[:9]]))


def write_tasks(folder):
    rng = np.random.default_rng(1)
    for file, words in zip(TASKS["CR"].files, (WORDS[:2], WORDS[2:]), strict=True):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        rows = [" ".join(rng.choice(" ".join([*words, *words, *WORDS]).split(), 8)) for _ in range(100)]
        (folder / file).write_text("\n".join(rows) + "\n")


def trained(model, path, evaluators, best_by):
    how = {"steps": 2, "batch_size": 4, "evaluators": evaluators, "dev_metric": best_by}
    return fit(model, Pairs(WORDS, WORDS), objective=ToOne(), **how, output_dir=path)


@pytest.fixture(scope="module")
def judged(one_layer, tmp_path_factory):
    """A folder with a run that all evaluators measured, its encoder, and its best checkpoint's metrics."""
    place = tmp_path_factory.mktemp("judged")
    sts, corpus, tasks = place / "sts", place / "corpus", place / "tasks"
    write_sts(sts)
    write_collection(corpus)
    write_tasks(tasks)
    convert(f"st:{one_layer}", place / "cosine", "jaxir", similarity="cosine")
    evaluators = [
        STS(path=str(sts)),
        STS(path=str(sts / "b.tsv"), name="one"),
        STS(path=str(sts / "splits"), name="splits"),
        STS(path=str(sts), name="weighted", setting="wmean"),
        Search(dataset=f"beir:{corpus}", **WANTED),
        Search(dataset=str(corpus), name="kept"),
        Search(dataset=f"cqadupstack:{corpus}/cqa", name="forums"),
        SentEval(directory=str(tasks), folds=2),
    ]
    encoder = trained(str(place / "cosine"), place / "run", evaluators, "spearman")
    best = json.loads((place / "run" / "checkpoints" / "best.json").read_text())
    lines = {line["step"]: line for line in log(place / "run") if "dev/spearman" in line}
    found = lines[best["step"]]
    assert (best["metric"], best["value"]) == ("spearman", found["dev/spearman"])
    uniformity = {line["dev/uniformity"] for line in lines.values()}
    assert len(uniformity) == len(lines) > 1, "each evaluation is of the encoder at that step"
    return place, encoder, lambda name: found[f"dev/{name}"]


@pytest.mark.slow
def test_sts_in_the_loop_is_sts_of_the_encoder(judged):
    place, encoder, value = judged
    scores = evaluate_sts(encoder, read_sts(place / "sts"))
    found = scores.spearman | {"": scores.spearman["all"]}
    measured = {name: value(f"spearman/{name}".rstrip("/")) for name in found}
    assert measured == pytest.approx(found, abs=1e-6) and len(set(measured.values())) == 5
    assert value("one/spearman") == value("splits/spearman") == measured["b"]
    assert value("weighted/spearman") == measured["wmean"]
    assert value("uniformity") == pytest.approx(scores.space["all"].uniformity, abs=1e-5)
    assert value("alignment") == pytest.approx(scores.space["all"].alignment, abs=1e-5)


def test_search_in_the_loop_is_search_of_the_encoder(judged):
    place, encoder, value = judged
    corpus = place / "corpus"
    dropped = {"identical_ids": "drop"}
    for name, metrics, how in (("", WANTED["wanted"], dropped), ("kept/", "R@10 P@10", {})):
        values = evaluate_collection(encoder, read_collection(corpus, "dev"), metrics, **how).values
        found = {metric: value(f"{name}{metric}") for metric in values}
        assert found == pytest.approx(values, abs=1e-6) and 0 < values["R@10"] < 1
    fewer = evaluate_collection(encoder, read_collection(corpus / "cqa/unix", "dev"), "R@10").values["R@10"]
    mean, android, unix = (value(f"forums/R@10{end}") for end in ("", "/android", "/unix"))
    assert (android, unix) == pytest.approx((found["R@10"], fewer)) and android != unix > 0
    assert mean == pytest.approx((android + unix) / 2)


def test_transfer_tasks_in_the_loop_use_vectors_that_are_not_normalised(judged):
    place, _, value = judged
    convert(str(place / "run"), place / "model", "jaxir", similarity="dot")
    tasks = read_senteval(place / "tasks")
    vectors = DualEncoder.load(str(place / "model")).encode_queries(texts_of(tasks))
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() > 0.1
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    dev, of_unit = (scores_of(tasks, v, folds=2)["CR"].dev for v in (vectors, unit))
    assert dev != pytest.approx(of_unit)
    assert 40 < dev < 100 and value("transfer") == value("transfer/CR") == pytest.approx(dev)


@pytest.mark.parametrize(
    ("search", "sentence"),
    [
        ({"wanted": "R@@10"}, "metric 'R@@10' cannot be computed"),
        ({"wanted": "R@1000", "depth": 100}, "R@1000 needs 1000 results per query"),
        ({"dataset": "sts:x"}, "evaluator Search: dataset must be beir:DIR or quora:DIR or eproduct:DIR or"),
    ],
)
def test_impossible_searches_are_refused(tmp_path, one_layer, search, sentence):
    with pytest.raises(UserError, match=sentence):
        evaluators = [Search(**{"dataset": str(tmp_path)} | search)]
        trained(f"st:{one_layer}", tmp_path / "run", evaluators, "R@10")
    assert not (tmp_path / "run").exists()

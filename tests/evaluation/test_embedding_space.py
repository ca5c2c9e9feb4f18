import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.analyze import analyze
from jaxir.core.errors import UserError
from jaxir.evaluation import analysis, embedding_space, plots
from tests.beir_folder import write_folder

MODEL = f"hf:{Path(__file__).resolve().parent.parent / 'golden' / 'bert'}"


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def cloud(seed, count=300, dimension=16):
    return np.random.default_rng(seed).normal(size=(count, dimension))


def axis(length):
    return length * np.eye(1, 16)


@pytest.mark.parametrize(
    ("query", "passage", "auc", "accuracy", "neighbours"),
    [
        (cloud(0), cloud(1), (0.44, 0.56), (0.44, 0.56), (0.47, 0.53)),
        # A passage is its query's nearest neighbour, so a naive count would favour the other tower.
        (cloud(0), cloud(0) + 0.05 * cloud(1), (0.44, 0.56), (0, 1), (0.46, 0.54)),
        (cloud(0), cloud(1) + axis(6), (0.99, 1), (0.95, 1), (0.85, 1)),
        # Queries lie at both ends of an axis and passages between, so the means of both towers are equal.
        (cloud(0) + np.sign(cloud(2)[:, :1]) * axis(8), cloud(1), (0.4, 0.6), (0, 1), (0.8, 1)),
    ],
    ids=["overlapping towers", "close pairs", "towers apart", "apart, not linearly"],
)
def test_separability_of_clouds_with_known_answers(query, passage, auc, accuracy, neighbours):
    found = embedding_space.separability(unit(query), unit(passage), seed=0)
    for measure, (least, most) in (("auc", auc), ("accuracy", accuracy), ("neighbours", neighbours)):
        assert least <= getattr(found, measure) <= most, measure


def test_similarities_of_random_pairs_leave_out_the_own_one():
    # Queries are orthogonal, and each passage equals its query: only a pair i = j would not have 0.
    eye = np.eye(8, dtype=np.float32)
    numerators, divisors = embedding_space.similarity_ratios(eye, eye, samples=500)
    assert not numerators.any() and not divisors.any() and len(divisors) == 500
    query, passage = unit(np.ones((8, 4)) + 0.1 * cloud(0, 8, 4)), unit(np.ones((8, 4)) * [1, 1, 0, 0])
    numerators, divisors = embedding_space.similarity_ratios(query, passage, samples=500)
    assert np.median(numerators / divisors) == pytest.approx(np.sqrt(2), abs=0.1)


@pytest.mark.parametrize("dimension", [1, 384])
def test_equal_vectors_are_projected_to_a_point(dimension):
    """scikit-learn's t-SNE would crash the process if all vectors are equal."""
    one = np.random.default_rng(0).normal(size=dimension)
    same = np.tile(one / np.linalg.norm(one), (256, 1)).astype(np.float32)
    same[::2] *= 1 + 1e-7  # lengths differ only as by rounding
    np.testing.assert_array_equal(embedding_space.project(same), np.zeros((256, 2)))


class Opposite:
    """A model with equal passages, and queries opposite to them."""

    def encode_queries(self, texts):
        return -self.encode_passages(texts)

    def encode_passages(self, texts):
        return np.tile(np.eye(1, 8, dtype=np.float32), (len(texts), 1))


def test_a_collapsed_model_is_analysed(folder, tmp_path):
    sample = analysis.draw_sample(folder, "test", queries=50, documents=60, seed=0)
    found = {"opposite": analysis.analyze_model(Opposite(), sample, seed=0)}
    assert found["opposite"].ratio is None and found["opposite"].divisors_not_positive == 1
    assert "| none " in analysis.tables(found)
    assert json.loads(json.dumps(found["opposite"].numbers()))["ratio"] is None
    analysis.draw(found, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure1.png", "figure5.png", "figure6.png"]
    # Regression: all edges of the histogram were 1.
    plots.nearest({"ones": np.ones(50)}, tmp_path / "ones.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "pairs", train=12, held_out=50)


def random_vectors(texts):
    """Gives each text a random vector of the same distribution in both towers, so that the towers overlap."""
    return unit(np.stack([cloud(zlib.crc32(text.encode()), 1, 64)[0] for text in texts]))


def test_passages_of_several_queries_do_not_set_towers_apart(tmp_path):
    """SQuAD's questions share paragraphs; copies of one would be neighbours, as if towers were apart."""
    (tmp_path / "qrels").mkdir()
    corpus = [{"_id": f"d{i}", "text": f"passage {i // 2}{' ' * (i % 2)}"} for i in range(400)]
    queries = [{"_id": f"q{i}", "text": f"query {i % 900}"} for i in range(1000)]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = [f"q{i}\td{i % 400}\t1\n" for i in range(1000)]
    (tmp_path / "qrels/test.tsv").write_text("".join(["query-id\tcorpus-id\tscore\n", *lines]))
    sample = analysis.draw_sample(tmp_path, "test", queries=2000, documents=400, seed=0)
    query, passage = random_vectors(sample.queries), random_vectors(sample.passages)
    found = embedding_space.separability(query, passage)
    assert abs(found.auc - 0.5) < 0.06
    assert abs(found.neighbours - 0.5) < 0.03
    assert len(sample.queries) == len(set(sample.queries)) == 200
    assert len({text.strip() for text in sample.passages}) == 200
    few = analysis.draw_sample(tmp_path, "test", queries=50, documents=400, seed=0)
    assert len(few.queries) == 50 and len(few.documents) == 400
    with pytest.raises(UserError, match="but there are 39"):
        analysis.draw_sample(tmp_path, "test", queries=39, documents=400, seed=0)


@pytest.mark.slow
def test_the_command_gives_equal_results_for_equal_models(folder, tmp_path, capsys):
    from matplotlib.image import imread

    flags = {"models": [f"one={MODEL}", f"two={MODEL}"], "dataset": f"beir:{folder}", "documents": 55}
    values = analyze(**flags, output=str(tmp_path / "a"))
    printed = capsys.readouterr().out
    assert "50 queries, 55 documents" in printed and "neighbours of the same tower" in printed
    assert values == json.loads((tmp_path / "a" / "analysis.json").read_text())
    one, two = values["models"]["one"], values["models"]["two"]
    assert one == two | {"model": one["model"]}
    assert f"{one['ratio']['quantiles']['0.5']:.3f}" in printed
    assert one["nearest"]["mean"] >= one["own"]["mean"] and one["nearest"]["count"] == 50
    for name in ("figure1", "figure5", "figure6"):
        image = imread(tmp_path / "a" / f"{name}.png")
        assert min(image.shape[:2]) > 300 and image[..., :3].std() > 0.02
    left, right = np.split(imread(tmp_path / "a" / "figure1.png")[150:-150, :, :3], 2, axis=1)
    # Both panels show the same number of points.
    assert (left != 1).any(2).mean() == pytest.approx((right != 1).any(2).mean(), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dataset": "DIR"}, "or texts:DIR or hf:NAME or ir_datasets:ID, not 'DIR', which is not a"),
        ({"models": f"{MODEL},{MODEL}"}, "twice; give each model its own name"),
        ({"models": "no/such"}, "no/such: no such model directory"),
        ({"queries": "30"}, "but there are 30"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(folder, tmp_path, capsys, changes, sentence):
    given = {"models": MODEL, "dataset": f"beir:{folder}", "output": str(tmp_path / "out")} | changes
    status = cli.main("jaxir.analyze:analyze", [f"--{name}={value}" for name, value in given.items()])
    assert status == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert not (tmp_path / "out").exists()

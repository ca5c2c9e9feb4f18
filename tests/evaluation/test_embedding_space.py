"""Separability, ratios and figures: on clouds of points whose answers are known, and on a model."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jaxir import cli
from jaxir.analyze import analyze
from jaxir.core.errors import UserError
from jaxir.evaluation import analysis, embedding_space, plots

MODEL = f"hf:{Path(__file__).resolve().parent.parent / 'golden' / 'bert'}"
WORDS = ["apple", "banana", "cherry", "dune", "ember", "fjord", "grove", "harbour", "iris", "jade"]


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
        # A passage is its query's nearest neighbour: counted naively, neighbours would be of the other tower.
        (cloud(0), cloud(0) + 0.05 * cloud(1), (0.44, 0.56), (0, 1), (0.46, 0.54)),
        (cloud(0), cloud(1) + axis(6), (0.99, 1), (0.95, 1), (0.85, 1)),
        # Queries point along either end of an axis, passages across it: the means are the same.
        (cloud(0) + np.sign(cloud(2)[:, :1]) * axis(8), cloud(1), (0.4, 0.6), (0, 1), (0.8, 1)),
    ],
    ids=["overlapping towers", "close pairs", "towers apart", "apart, but by no hyperplane"],
)
def test_separability_of_clouds_whose_answer_is_known(query, passage, auc, accuracy, neighbours):
    found = embedding_space.separability(unit(query), unit(passage), seed=0)
    for measure, (least, most) in (("auc", auc), ("accuracy", accuracy), ("neighbours", neighbours)):
        assert least <= getattr(found, measure) <= most, measure


def test_few_pairs_and_wrong_shapes_are_refused():
    with pytest.raises(UserError, match="at least 40 queries, .* there are 39"):
        embedding_space.separability(unit(cloud(0, 39)), unit(cloud(1, 39)))
    with pytest.raises(TypeCheckError):
        embedding_space.separability(unit(cloud(0, 50)), unit(cloud(1, 49)))


def test_similarities_of_random_pairs_leave_out_the_own_one():
    # Orthogonal queries; each passage is its query: only i = j would give anything but 0.
    eye = np.eye(8, dtype=np.float32)
    numerators, divisors = embedding_space.similarity_ratios(eye, eye, samples=500)
    assert not numerators.any() and not divisors.any() and len(divisors) == 500
    query, passage = unit(np.ones((8, 4)) + 0.1 * cloud(0, 8, 4)), unit(np.ones((8, 4)) * [1, 1, 0, 0])
    numerators, divisors = embedding_space.similarity_ratios(query, passage, samples=500)
    assert np.median(numerators / divisors) == pytest.approx(np.sqrt(2), abs=0.1)


def test_spread_describes_a_sample():
    found = embedding_space.spread(np.arange(101.0))
    assert (found.count, found.mean, found.median, found.interquartile_range) == (101, 50.0, 50.0, 50.0)
    assert found.deviation == pytest.approx(np.arange(101.0).std())


@pytest.mark.parametrize("dimension", [1, 384])
def test_vectors_that_are_all_alike_are_a_point(dimension):
    """scikit-learn's t-SNE ends with the process on them."""
    one = np.random.default_rng(0).normal(size=dimension)
    same = np.tile(one / np.linalg.norm(one), (256, 1)).astype(np.float32)
    same[::2] *= 1 + 1e-7  # rounding
    np.testing.assert_array_equal(embedding_space.project(same), np.zeros((256, 2)))


def test_vectors_of_one_number_are_laid_out():
    line = np.where(np.arange(50) % 2, 1.0, -1.0).astype(np.float32)[:, None]
    plane = embedding_space.project(line)
    assert plane.shape == (50, 2) and np.isfinite(plane).all() and np.ptp(plane) > 0


class Opposite:
    """A model whose queries lie opposite to its passages, all of which are alike."""

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
    plots.nearest({"ones": np.ones(50)}, tmp_path / "ones.png")  # all edges were 1, with warnings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    (directory / "qrels").mkdir()
    corpus, queries, lines = [], [], ["query-id\tcorpus-id\tscore\n"]
    for i in range(60):
        words = rng.choice(WORDS, 6).tolist()
        corpus.append({"_id": f"d{i}", "text": " ".join(words)})
        if i < 50:
            queries.append({"_id": f"q{i}", "text": " ".join(words[:5])})
            lines.append(f"q{i}\td{i}\t1\n")
    (directory / "qrels" / "test.tsv").write_text("".join(lines))
    for name, records in (("corpus", corpus), ("queries", queries)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


class Drawn:
    """A model that gives each text a random vector, whatever its tower: its towers overlap."""

    def encode_queries(self, texts):
        return self.encode_passages(texts)

    def encode_passages(self, texts):
        return unit(np.stack([cloud(zlib.crc32(text.encode()), 1, 64)[0] for text in texts]))


def test_passages_of_several_queries_do_not_set_towers_apart(tmp_path):
    """As in SQuAD, where five questions share a paragraph: of its copies each told the others."""
    (tmp_path / "qrels").mkdir()
    corpus = [{"_id": f"d{i}", "text": f"passage {i // 2}{' ' * (i % 2)}"} for i in range(400)]
    queries = [{"_id": f"q{i}", "text": f"query {i % 900}"} for i in range(1000)]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = [f"q{i}\td{i % 400}\t1\n" for i in range(1000)]
    (tmp_path / "qrels/test.tsv").write_text("".join(["query-id\tcorpus-id\tscore\n", *lines]))
    sample = analysis.draw_sample(tmp_path, "test", queries=2000, documents=400, seed=0)
    found = analysis.analyze_model(Drawn(), sample, seed=0)
    assert abs(found.separability.auc - 0.5) < 0.06
    assert abs(found.separability.neighbours - 0.5) < 0.03
    assert len(sample.queries) == len(set(sample.queries)) == 200
    assert len({text.strip() for text in sample.passages}) == 200
    few = analysis.draw_sample(tmp_path, "test", queries=50, documents=400, seed=0)
    assert len(few.queries) == 50 and len(few.documents) == 400
    with pytest.raises(UserError, match="but there are 39"):
        analysis.draw_sample(tmp_path, "test", queries=39, documents=400, seed=0)


@pytest.mark.slow
def test_the_command_draws_and_counts_the_same_for_the_same_model(folder, tmp_path, capsys):
    from matplotlib.image import imread

    flags = {"models": [f"one={MODEL}", f"two={MODEL}"], "dataset": f"beir:{folder}", "documents": 55}
    values = analyze(**flags, output=str(tmp_path / "a"))
    printed = capsys.readouterr().out
    assert "50 queries, 55 documents" in printed and "neighbours of the same tower" in printed
    assert values == json.loads((tmp_path / "a" / "analysis.json").read_text())
    one, two = values["models"]["one"], values["models"]["two"]
    assert one == two | {"model": one["model"]}
    assert f"{one['ratio']['quantiles']['0.5']:.3f}" in printed
    assert one["nearest"]["mean"] >= one["own"]["mean"]
    assert one["nearest"]["count"] == 50
    for name in ("figure1", "figure5", "figure6"):
        image = imread(tmp_path / "a" / f"{name}.png")
        assert min(image.shape[:2]) > 300 and image[..., :3].std() > 0.02
    left, right = np.split(imread(tmp_path / "a" / "figure1.png")[150:-150, :, :3], 2, axis=1)
    assert (left != 1).any(2).mean() == pytest.approx((right != 1).any(2).mean(), rel=0.1)  # the same points


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dataset": "DIR"}, "--dataset must be beir:DIR or sts:DIR or texts:DIR, not 'DIR'"),
        ({"dataset": "beir:no/such"}, "no/such is not a directory"),
        ({"split": "tset"}, "did you mean 'test'?"),
        ({"models": f"{MODEL},{MODEL}"}, "twice; write NAME=MODEL"),
        ({"models": "no/such"}, "no/such: no such model directory"),
        ({"queries": "30"}, "but there are 30"),
        ({"documents": "0"}, "--documents must be a whole number of at least 1, not 0"),
    ],
)
def test_mistakes_cost_one_sentence_and_write_nothing(folder, tmp_path, capsys, changes, sentence):
    given = {"models": MODEL, "dataset": f"beir:{folder}", "output": str(tmp_path / "out")} | changes
    status = cli.main("jaxir.analyze:analyze", [f"--{name}={value}" for name, value in given.items()])
    assert status == (2 if "must be a whole number" in sentence else 1)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists_is_kept(folder, tmp_path):
    output = tmp_path / "analysis"
    output.mkdir()
    (output / "figure.png").touch()
    with pytest.raises(UserError, match="already exists"):
        analyze(models=[MODEL], dataset=f"beir:{folder}", output=str(output))

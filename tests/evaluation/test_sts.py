import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.evaluation.pair_space import measure
from jaxir.evaluation.sts_files import read_sts, read_sts_tasks
from jaxir.evaluation.sts_scores import evaluate_sts
from tests.evaluation.published_files import STS_HEADER, YEAR, write


class Angles:
    """Encodes "30" as a vector at 30 degrees, of length 4: cosine must not depend on lengths."""

    calls = 0

    def encode_queries(self, texts):
        self.calls += 1
        radians = np.deg2rad([float(t) for t in texts])
        lengths = [[1 + float(t) / 10] for t in texts]
        return (lengths * np.stack([np.cos(radians), np.sin(radians)], axis=1)).astype(np.float32)


class Collapsed:
    def encode_queries(self, texts):
        return np.ones((len(texts), 3), np.float32)


@pytest.fixture
def folder(tmp_path):
    # Cosines fall with angles. Scores in a.tsv fall too, except for one swap; in b.tsv they rise.
    (tmp_path / "a.tsv").write_text(STS_HEADER + "5\t0\t10\n3\t0\t20\n4\t0\t30\n1.5\t0\t40\n")
    (tmp_path / "b.tsv").write_text(STS_HEADER + "1\t0\t10\n2\t90\t45\n")
    (tmp_path / "readme.txt").write_text("not a set")
    return tmp_path


def test_spearman_by_hand(folder):
    encoder = Angles()
    scores = evaluate_sts(encoder, read_sts(folder))
    # One adjacent swap among 4 ranks: 1 - 6 * 2 / (4 * 15) = .8.
    assert scores.spearman["a"] == pytest.approx(80.0)
    assert scores.spearman["b"] == pytest.approx(-100.0)
    # Pearson's correlation of ranks: those of cosines (10 10 20 30 40 45 degrees) and those of scores.
    cosine, people = [5.5, 5.5, 4, 3, 2, 1], [6, 1, 4, 5, 2, 3]
    assert scores.spearman["all"] == pytest.approx(100 * np.corrcoef(cosine, people)[0, 1])
    assert scores.spearman["mean"] == pytest.approx((80 - 100) / 2)
    assert scores.spearman["wmean"] == pytest.approx((4 * 80 - 2 * 100) / 6)
    assert scores.pairs == {"a": 4, "b": 2, "all": 6, "mean": 6, "wmean": 6}
    assert encoder.calls == 1


def test_a_collapsed_model_scores_zero(folder):
    scores = evaluate_sts(Collapsed(), read_sts(folder))
    assert set(scores.spearman.values()) == {0.0}
    space = scores.space["a"]
    assert (space.alignment, space.uniformity) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))
    assert space.recall == {1: 0.0, 5: 100.0, 10: 100.0}, "ties count against the partner"


def test_space_by_hand():
    """Sentences are at 0, 90, 180 and 270 degrees, and one is at 350, whose nearest is the one at 0."""
    degrees = np.deg2rad([0.0, 90.0, 180.0, 270.0, 350.0])
    vectors = np.stack([np.cos(degrees), np.sin(degrees)], 1).astype(np.float32)
    rows = np.array([[0, 1], [0, 4], [2, 3], [1, 1]])
    found = measure(vectors, rows, np.array([4.5, 5.0, 4.0, 5.0]))
    chord = 2 - 2 * np.cos(np.deg2rad(10))
    assert found.alignment == pytest.approx((2 + chord + 0) / 3, rel=1e-5)
    assert (found.positives, found.same) == (3, 1), "a sentence is not its own partner"
    assert found.recall == {1: 100.0, 5: 100.0, 10: 100.0}
    # All pairs of the eight sentences in `rows`.
    every = vectors[rows.ravel()].astype(np.float64)
    apart = [np.sum((x - y) ** 2) for i, x in enumerate(every) for y in every[i + 1 :]]
    assert len(apart) == 28
    assert found.uniformity == pytest.approx(np.log(np.mean(np.exp(-2 * np.array(apart)))), rel=1e-5)
    # Seen from 0 degrees, 350 is nearer than the partner at 90. From 90, 0 and 180 tie, so the partner is
    # second.
    far = measure(vectors, rows, np.array([5.0, 1.0, 1.0, 1.0]))
    assert far.recall == {1: 0.0, 5: 100.0, 10: 100.0}
    assert measure(vectors, rows, np.array([1.0, 2.0, 1.0, 1.0])).recall is None


def test_pairs_beyond_a_block_are_counted_once(monkeypatch):
    from jaxir.evaluation import pair_space

    vectors = np.random.default_rng(0).normal(size=(23, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = np.random.default_rng(1).integers(0, 23, (40, 2))
    whole = measure(vectors, rows, np.full(40, 5.0))
    monkeypatch.setattr(pair_space, "BLOCK", 7)
    parts = measure(vectors, rows, np.full(40, 5.0))
    assert parts.uniformity == pytest.approx(whole.uniformity) and parts.recall == whole.recall
    assert 0 < whole.recall[5] < 100


BENCHMARK = {
    f"sts-{split}.csv": f'main\tfile\t2012\t0001\t5.000\t"a {split}\tb\n'
    "main\tfile\t2012\t2\t1\tc\td\tsource\n"
    for split in ("train", "dev", "test")
}
SICK = {
    f"SICK_{split}.txt": "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
    f"1\ta {split}\tb\t4.5\tNEUTRAL\n2\tc\td\t3\tENTAILMENT\n"
    for split in ("train", "trial", "test_annotated")
}


def test_official_layouts(tmp_path):
    year = read_sts(write(tmp_path / "STS16-en-test", YEAR))
    assert [tuple(p) for p in year["forums"]] == [(5.0, "0", "10"), (3.0, "0", "20"), (4.5, "0", "30")]
    assert [p.score for p in year["question-question"]] == [1.0, 2.25] and len(year) == 2
    benchmark = read_sts(write(tmp_path / "STSBenchmark", BENCHMARK))
    assert list(benchmark) == ["sts-dev", "sts-test", "sts-train"]
    assert [tuple(p) for p in benchmark["sts-test"]] == [(5.0, '"a test', "b"), (1.0, "c", "d")]
    sick = read_sts(write(tmp_path / "SICK", SICK))
    assert [tuple(p) for p in sick["SICK_trial"]] == [(4.5, "a trial", "b"), (3.0, "c", "d")]
    tsv = "score\tsentence1\tsentence2\n1\ta\tb\n2\tc\td\n"
    write(tmp_path / "plain", {"train.tsv": tsv, "test.tsv": tsv})
    (tmp_path / "empty").mkdir()
    tasks = read_sts_tasks(tmp_path)
    assert [" ".join([name, *sets]) for name, sets in sorted(tasks.items())] == [
        "SICK SICK_test_annotated",
        "STS16-en-test forums question-question",
        "STSBenchmark sts-test",
        "plain test",
    ]
    assert read_sts_tasks(tmp_path / "SICK") == {}
    with pytest.raises(UserError, match=r"plain has no split 'dev', only test, train"):
        read_sts_tasks(tmp_path, "dev")
    only = read_sts(tmp_path / "STSBenchmark" / "sts-dev.csv")
    assert only == {"sts-dev": benchmark["sts-dev"]} == read_sts(tmp_path / "STSBenchmark", "dev")
    assert read_sts(tmp_path / "STS16-en-test", "dev") == year


def test_quotes_and_inner_spaces_are_kept(tmp_path):
    (tmp_path / "x.tsv").write_text(STS_HEADER + '4\t"Then  he said.\tno\r\n\n1\té\t"b"\n', newline="")
    assert [tuple(p) for p in read_sts(tmp_path)["x"]] == [(4.0, '"Then  he said.', "no"), (1.0, "é", '"b"')]

"""STS: correlations by hand, pairs taken together, malformed files, and a collapsed model."""

import numpy as np
import pytest

from jaxir.errors import BadInputError, UserError
from jaxir.evaluation.sts import evaluate_sts, read_sts

HEADER = "score\tsentence1\tsentence2\n"


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
    # Angles 10, 20, 30, 40 apart: cosine falls. Scores fall too in a.tsv, but for one swap; b.tsv rises.
    (tmp_path / "a.tsv").write_text(HEADER + "5\t0\t10\n3\t0\t20\n4\t0\t30\n1.5\t0\t40\n")
    (tmp_path / "b.tsv").write_text(HEADER + "1\t0\t10\n2\t90\t45\n")
    (tmp_path / "readme.txt").write_text("not a set")
    return tmp_path


def test_spearman_by_hand(folder):
    encoder = Angles()
    scores = evaluate_sts(encoder, read_sts(folder))
    # One adjacent swap among 4 ranks: 1 - 6 * 2 / (4 * 15).
    assert scores.spearman["a"] == pytest.approx(80.0)
    assert scores.spearman["b"] == pytest.approx(-100.0)
    # Pearson of the ranks: of cosine (10 10 20 30 40 45 degrees) and of the scores.
    cosine, people = [5.5, 5.5, 4, 3, 2, 1], [6, 1, 4, 5, 2, 3]
    assert scores.spearman["all"] == pytest.approx(100 * np.corrcoef(cosine, people)[0, 1])
    assert scores.pairs == {"a": 4, "b": 2, "all": 6}
    assert encoder.calls == 1


def test_a_collapsed_model_scores_zero(folder):
    assert set(evaluate_sts(Collapsed(), read_sts(folder)).spearman.values()) == {0.0}


def test_quotes_and_inner_spaces_are_kept(tmp_path):
    (tmp_path / "x.tsv").write_text(HEADER + '4\t"Then  he said.\tno\r\n\n1\té\t"b"\n', newline="")
    assert [tuple(p) for p in read_sts(tmp_path)["x"]] == [(4.0, '"Then  he said.', "no"), (1.0, "é", '"b"')]


@pytest.mark.parametrize(
    ("content", "where", "why"),
    [
        (b"5\ta\tb\n", "x.tsv:1:", "header"),
        (HEADER.encode() + b"5\ta\n", "x.tsv:2:", "3 columns"),
        (HEADER.encode() + b"4\ta\tb\nfive\ta\tb\n", "x.tsv:3:", "not a number"),
        (HEADER.encode() + b"nan\ta\tb\n", "x.tsv:2:", "not a number"),
        (HEADER.encode() + b"4\t\tb\n", "x.tsv:2:", "empty"),
        (HEADER.encode() + b"4\t\xff\tb\n", "x.tsv:2:", "UTF-8"),
        (HEADER.encode() + b"4\ta\tb\n", "x.tsv:", "two different scores"),
        (b"", "x.tsv:", "the file is empty"),
        (HEADER.encode(), "x.tsv:", "no usable record"),
    ],
)
def test_malformed_files_say_where_and_why(tmp_path, content, where, why):
    (tmp_path / "x.tsv").write_bytes(content)
    with pytest.raises(BadInputError, match=why) as caught:
        read_sts(tmp_path)
    assert where in str(caught.value)


def test_no_files(tmp_path):
    with pytest.raises(UserError, match=r"no \.tsv files"):
        read_sts(tmp_path)
    (tmp_path / "all.tsv").write_text(HEADER)
    with pytest.raises(UserError, match="rename the file"):
        read_sts(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        read_sts(tmp_path / "absent")

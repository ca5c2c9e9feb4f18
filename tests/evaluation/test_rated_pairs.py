import json
from pathlib import Path

import numpy as np
import pytest

from jaxir.analyze import analyze
from jaxir.evaluation import plots
from jaxir.evaluation.rated_pairs import cosines_by_rating
from jaxir.evaluation.sts_files import SentencePair

MODEL = f"hf:{Path(__file__).resolve().parent.parent / 'golden' / 'bert'}"


class Angles:
    """Encodes "30" as a vector at 30 degrees."""

    def encode_queries(self, texts):
        radians = np.deg2rad([float(text) for text in texts])
        return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def test_pairs_are_grouped_by_rating():
    rated = [(0, 90), (0.99, 80), (1, 60), (3.9, 30), (4, 20), (5, 0)]
    found = cosines_by_rating(Angles(), [SentencePair(score, "0", str(angle)) for score, angle in rated])
    degrees = {group: np.rad2deg(np.arccos(np.clip(x, -1, 1))) for group, x in found.items()}
    expected = {"0-1": [90, 80], "1-2": [60], "3-4": [30], "4-5": [20, 0]}
    assert list(degrees) == list(expected)
    for group, angles in expected.items():
        assert degrees[group] == pytest.approx(angles, abs=0.1)


def test_each_group_is_drawn_on_its_line(tmp_path):
    """If one group moves to the right, the picture changes on its line only."""
    from matplotlib.image import imread

    low, high = np.linspace(-0.6, -0.2, 50), np.linspace(0.4, 0.9, 50)
    plots.ratings({"one": {"0-1": low, "4-5": high}}, tmp_path / "a.png")
    plots.ratings({"one": {"0-1": low, "4-5": high - 0.3}}, tmp_path / "b.png")
    a, b = (imread(tmp_path / f"{name}.png")[..., :3] for name in ("a", "b"))
    changed = np.flatnonzero((a != b).any(axis=(1, 2)))
    assert len(changed) and changed.max() < len(a) / 2, "the higher rating is above"


def test_the_command_writes_figure_and_numbers(tmp_path, capsys):
    lines = ["5\tda de\tda de di", "3\tha he\tha ha he he", "4.5\tla\tla le", "0.5\tra\tla me"]
    (tmp_path / "a.tsv").write_text("\n".join(["score\tsentence1\tsentence2", *lines]))
    given = {"models": [f"one={MODEL}"], "dataset": f"sts:{tmp_path / 'a.tsv'}"}
    values = analyze(**given, output=str(tmp_path / "out"))
    assert values == json.loads((tmp_path / "out" / "analysis.json").read_text())
    groups = values["models"]["one"]["ratings"]
    assert {group: found["count"] for group, found in groups.items()} == {"0-1": 1, "3-4": 1, "4-5": 2}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["analysis.json", "figure2-2.png"]
    assert f"| 4-5    |     2 | {groups['4-5']['mean']:.3f} |" in capsys.readouterr().out


def test_a_model_in_a_directory_with_an_equals_sign_has_its_own_name(tmp_path):
    (tmp_path / "lr=1e-5").symlink_to(MODEL.removeprefix("hf:"))
    (tmp_path / "x.tsv").write_text("score\tsentence1\tsentence2\n1\ta dog\ta cat\n4.5\ta\tb\n")
    models = [f"hf:{tmp_path}/lr=1e-5", f"again=hf:{tmp_path}/lr=1e-5"]
    found = analyze(models=models, dataset=f"sts:{tmp_path}/x.tsv", output=str(tmp_path / "out"))["models"]
    assert list(found) == [models[0], "again"] and found["again"]["ratings"] == found[models[0]]["ratings"]

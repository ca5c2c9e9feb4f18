import json

import pytest

from jaxir.evaluate import evaluate
from jaxir.evaluation.exact_match import exact_match, f1, normalized, score_answers
from tests.beir_folder import write_jsonl


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel\tTower!", "eiffel tower"),
        ("a.b.c. of an A", "abc of"),
        ("theatre and thean", "theatre and thean"),  # articles are whole words
        ("the-end", "theend"),  # punctuation is removed first, without a space
        ("l’été", "l’été"),  # ASCII punctuation only
        ("1,000 $", "1000"),
        ("The", ""),
    ],
)
def test_normalisation(text, expected):
    assert normalized(text) == expected


def test_scores_by_hand():
    assert exact_match("the Rhine.", ["Danube", "rhine"]) == 1.0
    assert exact_match("Rhine river", ["Rhine"]) == 0.0
    assert f1("the cat sat", ["cat", "a cat sat down"]) == pytest.approx(2 * 2 / (2 + 3))
    assert f1("cat cat", ["cat"]) == pytest.approx(2 / 3)
    assert f1("dog", ["cat"]) == 0.0 == f1("the", ["a"])
    found = score_answers(
        {"q1": "Rhine river", "q2": "", "q9": "x", "q3": "Paris"},
        {"q1": ["Rhine"], "q2": ["The"], "q3": ["paris"], "q4": ["y"]},
    )
    assert found.per_query["EM"] == {"q1": 0.0, "q2": 0.0, "q3": 1.0, "q4": 0.0}
    assert found.values == pytest.approx({"EM": 0.25, "F1": (2 / 3 + 1) / 4})
    assert (found.queries, found.unanswered, found.unjudged) == (4, 2, 1)


@pytest.fixture
def files(tmp_path):
    answers = [{"_id": f"q{i}", "answers": [f"Word {i}", f"number {i}"]} for i in range(12)]
    write_jsonl(tmp_path / "answers.jsonl", answers)
    for name, right in (("a", 3), ("b", 9), ("c", 8)):
        texts = [[f"the word {i}!", "x"] if i < right else [] if i == 11 else ["z"] for i in range(12)]
        outputs = [{"_id": f"q{i}", "outputs": some} for i, some in enumerate(texts)]
        write_jsonl(tmp_path / f"{name}.jsonl", outputs)
    return tmp_path


def test_systems_are_compared_over_questions(files, capsys):
    systems = [f"tuned={files}/b.jsonl+{files}/c.jsonl"]
    given = {"predictions": systems, "answers": f"{files}/answers.jsonl", "baseline": f"{files}/a.jsonl"}
    result = evaluate(**given, per_query=True, output=str(files / "out.json"))
    assert json.loads((files / "out.json").read_text()) == result
    assert result["systems"]["tuned"]["metrics"]["EM"] == pytest.approx(8.5 / 12)
    assert result["systems"]["a"]["metrics"]["EM"] == 0.25
    assert "identical_ids" not in result["systems"]["a"]
    em, _ = result["comparisons"]
    assert (em["metric"], em["comparison"]["wins"], em["comparison"]["losses"]) == ("EM", 6, 0)
    assert em["t_test"] < 0.05 and em["randomisation"] < 0.05
    printed = capsys.readouterr().out
    assert "12 questions; 1 of them without a predicted answer, which score 0" in printed
    assert "own id" not in printed and "t-test p" in printed and "2 runs" in printed
    alone = evaluate(predictions=f"{files}/a.jsonl", answers=f"{files}/answers.jsonl")
    assert alone["metrics"]["F1"] == 0.25 and alone["queries_without_answers"] == 1

"""Early stopping: training ends after some evaluations without a better dev metric."""

import dataclasses
import json
from typing import ClassVar

import jax
import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.training.evaluators.evaluator import Evaluator, Prepared
from tests.training.saved_run import arrays, log, saved_steps
from tests.training.tiny_run import Hooked, ToOne, pairs, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed(Evaluator):
    """Measures the score that a list has for a step."""

    metrics: ClassVar = {"score": "greater"}
    scores: tuple[float, ...]

    def prepare(self, bench):
        return Prepared(lambda state: {"score": self.scores[int(jax.device_get(state.step))]}, "a list")


#         step: 0    1    2    3    4    5    6    7    8    9    10   11   12
SCORES = (0.0, 0.1, 0.3, 0.0, 0.2, 0.0, 0.4, 0.9, 0.4, 0.9, 0.3, 0.9, 0.5)
SETTINGS = {
    "objective": ToOne(),
    "evaluators": [Listed(scores=SCORES)],
    "dev": None,
    "dev_metric": "score",
    "steps": 12,
    "eval_every": 2,
    "checkpoint_every": 3,
    "early_stopping": 2,
}


def ending_of(run_dir) -> tuple[dict, dict, str]:
    """Returns the best checkpoint, the evaluations and how the run ended."""
    best = json.loads((run_dir / "checkpoints/best.json").read_text())
    evaluated = {x["step"]: x["dev/score"] for x in log(run_dir) if "dev/score" in x}
    return best, evaluated, (run_dir / "COMPLETE").read_text()


def assert_same_parameters(run_dir, other, step):
    found, expected = arrays(run_dir, step), arrays(other, step)
    assert found.keys() == expected.keys() and len(found) > 3
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_a_run_stops_early_and_is_complete(tmp_path):
    place = tmp_path / "run"
    first = run(place, **SETTINGS)
    assert (first.steps, first.started_at, first.step, first.stopped_by) == (12, 0, 10, None)
    assert (first.best_step, first.best_value) == (6, 0.4)
    said = "stopped early at step 10 of 12, after 2 evaluations without a better score\n"
    evaluated = {step: SCORES[step] for step in (2, 4, 6, 8, 10)}
    best = {"step": 6, "metric": "score", "value": 0.4}
    assert ending_of(place) == (best, evaluated, said) and saved_steps(place) == [6, 9, 10]

    before = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file()}
    assert run(place, **SETTINGS) == first._replace(started_at=10)
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file()} == before
    (place / "COMPLETE").unlink()  # killed between the last checkpoint and this mark
    assert run(place, **SETTINGS).step == 10 and (place / "COMPLETE").read_text() == said

    # Without early stopping the run is continued, as if it had never stopped.
    assert run(place, **SETTINGS | {"early_stopping": None}).started_at == 10
    run(tmp_path / "whole", **SETTINGS | {"early_stopping": None})
    assert ending_of(place) == ending_of(tmp_path / "whole")
    assert ending_of(place)[0]["step"] == 12 and ending_of(place)[2] == "12 steps\n"
    assert_same_parameters(place, tmp_path / "whole", 12)


def test_an_interrupted_run_stops_at_the_step_of_an_uninterrupted_one(tmp_path):
    """The checkpoint of step 9 knows of the evaluation after step 8."""
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", data=Hooked(pairs(64), lambda at: at == 9 and 1 / 0), **SETTINGS)
    assert not (tmp_path / "run/COMPLETE").exists()
    result = run(tmp_path / "run", **SETTINGS)
    assert (result.started_at, result.step) == (9, 10)
    run(tmp_path / "whole", **SETTINGS)
    assert ending_of(tmp_path / "run") == ending_of(tmp_path / "whole")
    assert_same_parameters(tmp_path / "run", tmp_path / "whole", 10)


def test_a_smaller_metric_may_be_the_better_and_equal_is_not_better(tmp_path):
    falling = dict.fromkeys(["score"], "smaller")
    kind = type("Falling", (Listed,), {"metrics": falling})
    scores = (9.0, 0.5, 0.4, 0.4, 0.4, 0.1)
    changed = {"evaluators": [kind(scores=scores)], "eval_every": 1, "checkpoint_every": 100}
    result = run(tmp_path / "run", **SETTINGS | changed)
    assert (result.step, result.best_step) == (4, 2)


def test_early_stopping_without_an_evaluation_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"early_stopping=2 counts evaluations, but nothing is evaluated: "):
        run(tmp_path / "run", **SETTINGS | {"evaluators": None})
    assert not (tmp_path / "run").exists()

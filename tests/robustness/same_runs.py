"""Comparing two runs on the disk."""

from pathlib import Path

import numpy as np

from tests.training.saved_run import arrays, log


def assert_same_results(ours: Path, theirs: Path, step: int) -> None:
    """Checks that the parameters, the optimizer's state and the log of two runs are the same bits."""
    found, expected = arrays(ours, step), arrays(theirs, step)
    assert found.keys() == expected.keys() and len(found) > 40
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name
    logs = [
        [(x["step"], x.get("loss"), x.get("dev/nDCG@10")) for x in log(run) if "checkpoint" not in x]
        for run in (ours, theirs)
    ]
    assert logs[0] == logs[1]
    for name in ("COMPLETE", "checkpoints/best.json"):
        assert (ours / name).read_text() == (theirs / name).read_text()

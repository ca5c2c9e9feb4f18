"""A reader on eight devices has the loss, gradients and answers of one device."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_eight_devices_equal_one(tmp_path, launch, finish):
    worker = Path(__file__).with_name("reader_worker.py")
    ended = finish(launch(str(worker), str(tmp_path / "report.json"), devices=8))
    assert [status for status, _ in ended] == [0], ended
    reports = json.loads((tmp_path / "report.json").read_text())
    assert len(reports) == 2
    for name, report in reports.items():
        one, eight = report["losses"]
        assert eight == pytest.approx(one, rel=1e-5), name
        assert report["difference"] < 1e-5 < 1e-4 < report["least"], name
        assert report["same"], name

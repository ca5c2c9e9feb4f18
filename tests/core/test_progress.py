"""Progress of long work, in a log file and on a terminal."""

import io
import re
import sys
import time

import pytest

from jaxir.core import progress


def run(count, seconds, **how):
    for _ in progress.progress(range(count), what="encode", unit="texts", **how):
        time.sleep(seconds)


def test_log_gets_a_line_at_intervals(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.1)
    run(40, 0.02)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 10
    form = re.compile(r"encode: (\d+) of 40 texts, [\d:]+ so far, about [\d:]+ left")
    counts = [int(form.fullmatch(line)[1]) for line in lines]
    assert counts == sorted(counts) and counts[0] < 40 == counts[-1]


def test_work_of_unknown_length_shows_its_count(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    bar = progress.progress(what="reading", unit="lines")
    for _ in range(10):
        time.sleep(0.02)
        bar.update(3)
    bar.close()
    assert re.match(r"reading: \d+ lines, 00:00 so far\n", capsys.readouterr().err)


@pytest.mark.parametrize(("every", "how"), [(0.01, {"hidden": True}), (0.01, {"lines": False}), (9, {})])
def test_short_or_hidden_work_prints_nothing_to_a_log(monkeypatch, capsys, every, how):
    monkeypatch.setattr(progress, "EVERY", every)
    run(5, 0.01, **how)
    assert capsys.readouterr().err == ""


def test_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    run(5, 0.0)
    assert "100%|" in sys.stderr.getvalue()

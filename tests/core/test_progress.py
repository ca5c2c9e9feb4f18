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
    found = [
        re.fullmatch(r"encode: (\d+) of 40 texts, [\d:]+ so far, about [\d:]+ left", line) for line in lines
    ]
    assert all(found)
    counts = [int(match[1]) for match in found]
    assert counts == sorted(counts) and counts[0] < 40 == counts[-1]


def test_work_of_unknown_length_shows_its_count(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    bar = progress.progress(what="reading", unit="lines")
    for _ in range(10):
        time.sleep(0.02)
        bar.update(3)
    bar.close()
    assert re.match(r"reading: \d+ lines, 00:00 so far\n", capsys.readouterr().err)


@pytest.mark.parametrize("how", [{"hidden": True}, {"lines": False}])
def test_progress_prints_nothing_if_hidden_or_without_lines(monkeypatch, capsys, how):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    run(5, 0.01, **how)
    assert capsys.readouterr().err == ""


def test_short_work_prints_no_progress_line_to_a_log(capsys):
    run(5, 0.0)
    assert capsys.readouterr().err == ""


def test_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    run(5, 0.0)
    assert "100%|" in sys.stderr.getvalue()

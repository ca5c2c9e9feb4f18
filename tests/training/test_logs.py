"""The JSONL log, TensorBoard and what is told on standard error."""

import fcntl
import json
import os
import pty
import struct
import termios

import pytest

from jaxir.training.logs import Narrator, RunLog, clock


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def test_a_resumed_log_has_every_step_once(tmp_path):
    log = RunLog(tmp_path, start_step=0)
    for step in (5, 10, 15):
        log.write(step, {"loss": step / 10, "dev/loss": 1.0})
    log.checkpoint(10)
    log.checkpoint(None)
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')  # killed while writing
    log = RunLog(tmp_path, start_step=10)
    log.write(15, {"loss": 7.0})
    log.close()
    assert [(x["step"], x.get("loss")) for x in lines(tmp_path)] == [
        (5, 0.5),
        (10, 1.0),
        (10, None),
        (15, 7.0),
    ]
    events = b"".join(p.read_bytes() for p in (tmp_path / "tensorboard").iterdir())
    assert b"train/loss" in events and b"dev/loss" in events


def test_without_a_terminal_there_is_one_line_per_logged_step(capsys):
    narrator = Narrator(steps=100, start_step=20, batch_size=8)
    narrator.step(21, 2.5)
    narrator.tell(30, {"loss": 1.5, "learning_rate": 1e-4, "examples_per_second": 70.0})
    narrator.tell_dev(30, {"nDCG@10": 0.25})
    narrator.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 30/100  loss 1.5000  lr 0.0001  70 examples/s  8s left",
        "step 30/100  dev  nDCG@10 0.2500",
    ]


def test_on_a_terminal_a_bar_shows_loss_rate_and_time_left(monkeypatch):
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        narrator = Narrator(steps=100, start_step=20, batch_size=8)
        narrator.step(30, 1.5)
        narrator.tell(30, {"loss": 1.5, "learning_rate": 1e-4, "examples_per_second": 70.0})
        narrator.close()
        terminal.flush()
        shown = ""
        while "left" not in shown:
            shown += os.read(main, 10_000).decode()
    os.close(main)
    assert "30/100" in shown and "loss 1.5000, 70 examples/s, 8s left" in shown


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (125, "2m05s"), (3725, "1h02m")])
def test_clock(seconds, text):
    assert clock(seconds) == text

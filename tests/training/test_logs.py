"""log.jsonl, TensorBoard and progress on standard error."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading

from tensorboardX.proto import event_pb2

from jaxir.training.run.logs import Narrator, RunLog, clock, lines_until, timed
from tests.training import tiny_run
from tests.training.saved_run import log as read_log


def test_resumed_log_has_every_step_once(tmp_path):
    log = RunLog(tmp_path, start_step=0, run="a")
    for step in (5, 10, 15):
        log.write(step, {"loss": step / 10, "dev/loss": 1.0})
    log.checkpoint(10)
    log.checkpoint(None)
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')  # a process was killed while it wrote this line
    log = RunLog(tmp_path, start_step=10, run="a")
    log.write(15, {"loss": 7.0})
    log.close()
    found = [(x["step"], x.get("loss")) for x in read_log(tmp_path)]
    assert found == [(5, 0.5), (10, 1.0), (10, None), (15, 7.0)]
    restarts, written = {}, b""
    for path in (tmp_path / "tensorboard").iterdir():
        content, at = path.read_bytes(), 0
        written += content
        while at < len(content):  # a record: length, its checksum, event, its checksum
            size = int.from_bytes(content[at : at + 8], "little")
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16
            if event.session_log.status == event_pb2.SessionLog.START:
                restarts[path.suffix] = event.step
    assert restarts[".10"] == 11, "TensorBoard drops earlier events from this step on"
    assert b"train/loss" in written and b"dev/loss" in written


def test_unreadable_lines_and_later_steps_are_dropped_from_a_log():
    own = b'{"step": 1, "run": "a"}\n{"step": 2, "checkpoint": true}\n'
    left = [line + "\n" for line in own.decode().splitlines()]
    for end in (b"", b'{"step": 3}\n', b'{"step": 4', b"null\n7\n{}\n", b'\xff{"step": 2}'):
        assert lines_until(own + end, 2) == left
    assert lines_until(b'{"step": 1}\r\n', 1) == ['{"step": 1}\n']  # written by an earlier version


def test_without_a_terminal_each_logged_step_is_one_line_with_the_objectives_own_metrics(capsys):
    narrator = Narrator(steps=100, start_step=20, batch_size=8)
    values = {"loss": 1.5, "learning_rate": 1e-4, "grad_norm": 3.0, "rows_without_negatives": 0.0}
    own = {"scale": 10.25, "part/loss": 2e-5, **{f"metric_{n}": float(n) for n in range(9)}}
    narrator.step(21, 2.5)
    narrator.show_step(30, values | {"examples_per_second": 70.0})
    narrator.show_step(30, values | {"examples_per_second": 70.0}, values | own)
    narrator.show_evaluation(30, {"nDCG@10": 0.25}, {"scale": 10.25})
    narrator.close()
    shown = "  scale 10.25  part/loss 2e-05  metric_0 0  metric_1 1  metric_2 2"
    assert capsys.readouterr().err.splitlines() == [
        "step 30/100  loss 1.5000  lr 0.0001  70 examples/s  8s left",
        f"step 30/100  loss 1.5000{shown}  lr 0.0001  70 examples/s  8s left",
        "step 30/100  dev  nDCG@10 0.2500  scale 10.25",
    ]


def on_screen(line: str) -> str:
    """What a terminal shows of a line with carriage returns."""
    assert "\x1b" not in line, "moves the cursor"
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


def test_on_a_terminal_losses_stay_above_the_bar(monkeypatch, tmp_path):
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    written = bytearray()

    def listen():
        with contextlib.suppress(OSError):  # Linux raises this if the other end is closed
            while part := os.read(main, 10_000):
                written.extend(part)

    listener = threading.Thread(target=listen)
    listener.start()
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        tiny_run.run(tmp_path / "run", steps=6, eval_every=4, log_every=2, checkpoint_every=6)
    listener.join()
    os.close(main)
    shown = [on_screen(line) for line in written.decode().split("\n")]
    assert shown.pop() == "" and shown[-1].startswith("train: 100%") and "6/6" in shown[-1]
    found = [re.sub(r"\d[\d.]*(e-\d+)?", "N", line) for line in shown[:-1]]
    own = "accuracy N  positive_similarity N  query_query_similarity N"
    step = f"step N/N  loss N  {own}  lr N  N examples/s  Ns left"
    dev = f"step N/N  dev  nDCG@N N  RR@N N  loss N  accuracy N  {own.partition('  ')[2]}"
    assert found == [
        "compiling the step ... Ns",
        "compiling the evaluation ... Ns",
        "N s per step: about Ns for the other N steps, and N evaluations",
        *[step, step, dev, step, dev],
    ]
    assert shown[2].endswith(", and 2 evaluations")
    assert [line.split()[1] for line in shown if "lr" in line] == ["2/6", "4/6", "6/6"]


def test_without_a_terminal_compiling_has_a_line_before_and_one_after(capsys):
    with timed("compiling the step"):
        assert capsys.readouterr().err == "compiling the step ...\n"
    assert capsys.readouterr().err == "compiling the step: 0s\n"


def test_time_left_counts_coming_evaluations_and_no_past_ones(capsys, monkeypatch):
    now = iter([0.0, 10.0, 10.0, 70.0, 72.0, 80.0, 80.0, 110.0])  # a pause of 60 s, and an evaluation of 30 s
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    how = {"steps": 12, "start_step": 0, "batch_size": 8}
    narrator = Narrator(**how, evaluations_from=lambda step: len(range(step, 13, 3)))
    values = {"loss": 1.5, "learning_rate": 1e-4, "examples_per_second": 8.0}
    narrator.step(1, 2.5)
    with narrator.paused():
        pass
    narrator.step(2, 2.5)
    narrator.step(3, 2.5)
    narrator.show_step(3, values)
    with narrator.paused(evaluating=True):
        pass
    narrator.show_step(6, values)
    narrator.close()
    assert capsys.readouterr().err.splitlines() == [
        "2 s per step: about 20s for the other 10 steps, and 4 evaluations",
        "step 3/12  loss 1.5000  lr 0.0001  8 examples/s  9s left",
        "step 6/12  loss 1.5000  lr 0.0001  8 examples/s  1m36s left",
    ]


def test_clock():
    assert [clock(seconds) for seconds in (0.4, 59.6, 125, 3725)] == ["0s", "1m00s", "2m05s", "1h02m"]

"""A run in several processes, killed and preempted, goes on with other processes on another mesh."""

import json
import signal
import sys
import time
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))
import tiny_run

STEPS = 30


def log(run_dir) -> list[dict]:
    path = run_dir / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_step(processes, run_dir, step):
    while all(process.poll() is None for process in processes):
        if any(line["step"] >= step and "loss" in line for line in log(run_dir)):
            return
        time.sleep(0.01)
    raise AssertionError([process.communicate()[1] for process in processes if process.poll() is not None])


def saved_steps(run_dir) -> list[int]:
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit())


def finish(processes) -> list[tuple[int, str]]:
    return [(p.wait(timeout=120), p.communicate()[1]) for p in processes]


def test_a_killed_and_preempted_run_ends_as_an_uninterrupted_one(tmp_path, launch):
    run_dir = tmp_path / "run"

    def start(mesh: dict[str, int], *, processes: int, delay: float = 0.0):
        flags = [f"--run_dir={run_dir}", f"--mesh={json.dumps(mesh)}", f"--delay={delay}", "--devices=4"]
        return launch("life_worker.py", *flags, processes=processes, JAXIR_HEARTBEAT_SECONDS="10")

    # One of two processes is killed: the other ends, soon and with a sentence.
    two = start({"slices": 2, "data": 2, "fsdp": 2}, processes=2, delay=0.1)
    wait_for_step(two, run_dir, 9)
    two[1].kill()
    began = time.monotonic()
    (code, errors), (killed, _) = finish(two)
    assert killed == -signal.SIGKILL and code != 0
    assert time.monotonic() - began < 30
    assert "run the same command again to resume" in errors or "another task died" in errors
    assert 7 in saved_steps(run_dir)

    # One of two is preempted: both save the same step, on another mesh than before.
    two = start({"fsdp": 8}, processes=2, delay=0.1)
    wait_for_step(two, run_dir, 12)
    two[1].send_signal(signal.SIGTERM)
    (code, errors), (preempted, other) = finish(two)
    assert (code, preempted) == (143, 143), errors + other
    last = saved_steps(run_dir)[-1]
    assert 12 <= last < STEPS
    assert [x["step"] for x in log(run_dir) if "loss" in x] == list(range(1, last + 1))
    assert f"step {last}/{STEPS}" in errors and "step" not in other  # only the first process tells

    # One process with half the devices ends the run.
    [(code, errors)] = finish(start({"data": 2, "fsdp": 2}, processes=1))
    assert code == 0 and f"resuming {run_dir} at step {last}" in errors, errors
    assert (run_dir / "COMPLETE").exists()

    tiny_run.run(tmp_path / "uninterrupted", mesh={"data": 1})
    lines = [[x for x in log(run) if "checkpoint" not in x] for run in (run_dir, tmp_path / "uninterrupted")]
    for ours, theirs in zip(*lines, strict=True):
        names = [n for n in theirs if n not in ("time", "examples_per_second")]
        expected = {n: theirs[n] for n in names}
        assert {n: ours[n] for n in names} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len({x["loss"] for x in lines[1] if "loss" in x}) == STEPS


def test_a_process_that_fails_takes_the_others_with_it(tmp_path, launch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("not a run")
    mesh = json.dumps({"fsdp": 2})
    flags = [f"--run_dir={tmp_path / 'run'}", f"--mesh={mesh}", "--devices=1"]
    for code, errors in finish(launch("life_worker.py", *flags, processes=2)):
        assert code == 1 and "is not a training run" in errors
    assert jax.process_count() == 1

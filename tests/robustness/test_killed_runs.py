import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.robustness.same_runs import assert_same_results
from tests.training.saved_run import log, saved_steps

pytestmark = pytest.mark.slow

STEPS = 30
TINY_RUN = ["-m", "tests.training.tiny_run"]


def start(run_dir) -> subprocess.Popen:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *TINY_RUN, f"--run_dir={run_dir}"], **streams)


def finish(process) -> tuple[int, str]:
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def wait_for_step(process, run_dir, step):
    while process.poll() is None:
        if any(line["step"] >= step and "loss" in line for line in log(run_dir)):
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    code, errors = finish(start(run_dir))
    assert code == 0, errors
    losses = [x["loss"] for x in log(run_dir) if "loss" in x]
    assert len(losses) == STEPS and np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    dev = {x["step"]: x["dev/nDCG@10"] for x in log(run_dir) if "dev/nDCG@10" in x}
    assert sorted(dev) == [10, 20, 30]
    best = max(dev, key=lambda step: (dev[step], -step))
    assert json.loads((run_dir / "checkpoints" / "best.json").read_text())["step"] == best
    assert saved_steps(run_dir) == sorted({28, 30, best})
    return run_dir


def assert_resumes_to_the_same_end(run_dir, uninterrupted, at):
    """Checks that a stopped run saved the step in which it was stopped, and resumes there."""
    last = saved_steps(run_dir)[-1]
    assert at <= last < STEPS
    assert [x["step"] for x in log(run_dir) if "loss" in x] == list(range(1, last + 1))
    code, errors = finish(start(run_dir))
    assert code == 0 and f"resuming {run_dir} at step {last}" in errors
    assert_same_results(run_dir, uninterrupted, STEPS)


def test_sigterm_saves_the_current_step_and_the_run_resumes(tmp_path, uninterrupted):
    at = random.SystemRandom().randint(2, 25)
    print("SIGTERM after step", at)
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_for_step(process, run_dir, at)
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    assert code == 143, errors
    assert_resumes_to_the_same_end(run_dir, uninterrupted, at)


def test_a_closed_terminal_saves_the_current_step_and_the_run_resumes(tmp_path, uninterrupted):
    run_dir = tmp_path / "run"
    ours, theirs = os.openpty()
    # `env` restores SIGHUP, which children of tests under nohup would ignore.
    command = ["env", "--default-signal=HUP", "setsid", "--ctty", sys.executable, *TINY_RUN]
    process = subprocess.Popen([*command, f"--run_dir={run_dir}"], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while b"step 5" not in said:
        said += os.read(ours, 10000)
    os.close(ours)
    assert process.wait(100) == 143
    assert_resumes_to_the_same_end(run_dir, uninterrupted, at=5)


def test_sigkill_at_any_moment_loses_no_more_than_since_the_last_checkpoint(tmp_path, uninterrupted):
    run_dir = tmp_path / "run"
    seed = random.SystemRandom().randint(0, 10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for low in (1, 11, 21):
        at, delay = rng.randint(low, low + 5), rng.uniform(0, 0.05)
        process = start(run_dir)
        wait_for_step(process, run_dir, at)
        time.sleep(delay)
        process.kill()
        finish(process)
        print("killed after step", at, "with checkpoints", saved_steps(run_dir))
    code, errors = finish(start(run_dir))
    assert code == 0, errors
    assert_same_results(run_dir, uninterrupted, STEPS)
    assert not list((run_dir / "checkpoints").glob("*tmp*"))

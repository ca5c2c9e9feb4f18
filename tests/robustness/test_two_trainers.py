import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxir.core.errors import UserError
from jaxir.storage.locks import locked
from tests import bucket_server
from tests.training.tiny_run import Hooked, pairs, run

TINY_RUN = ["-m", "tests.training.tiny_run"]
STEPS = '--settings={"steps": 40}'


def test_a_locked_directory_is_neither_read_nor_written(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("not a run of jaxir's, which would be reported first")
    with (
        locked(tmp_path / "run", "held by this test"),
        pytest.raises(UserError, match=f"^another process trains in {tmp_path}/run: wait for it"),
    ):
        run(tmp_path / "run")
    with pytest.raises(UserError, match="is not a training run"):
        run(tmp_path / "run")


def test_a_run_whose_directory_is_replaced_ends_and_is_never_marked_complete(tmp_path):
    """A checkpoint that Orbax wrote there would be no model: config, tokenizer and log are missing."""
    place = tmp_path / "run"

    def before(step: int) -> None:
        while step == 11 and not (place / "checkpoints" / "7").exists():
            time.sleep(0.02)
        if step == 12:
            place.rename(tmp_path / "trash")
            place.mkdir()

    with pytest.raises(UserError, match=f"^{place} was removed or replaced while this process worked in it"):
        run(place, data=Hooked(pairs(64), before), dev=None)
    assert not (place / "COMPLETE").exists() and not (place / "checkpoints").exists()


@pytest.fixture
def start():
    started = []

    def process(run_dir: str, **environment: str) -> subprocess.Popen:
        command = [sys.executable, *TINY_RUN, f"--run_dir={run_dir}", STEPS]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | environment, **streams))
        return started[-1]

    yield process
    for one in started:
        one.kill()
        one.communicate()


def wait_for(there, process: subprocess.Popen) -> None:
    while not there():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_second_of_two_trainers_is_refused_and_the_first_finishes(tmp_path, start):
    run_dir = tmp_path / "run"
    first = start(str(run_dir))
    wait_for((run_dir / "checkpoints" / "7").is_dir, first)
    first.send_signal(signal.SIGSTOP)  # pause the first, so that it does not finish before the second begins
    second = start(str(run_dir))
    _, said = second.communicate(timeout=280)
    assert second.returncode == 1 and f"error: another process trains in {run_dir}: wait for it, or" in said
    first.send_signal(signal.SIGCONT)
    _, said = first.communicate(timeout=280)
    assert first.returncode == 0, said
    assert (run_dir / "COMPLETE").read_text() == "40 steps\n" and not (run_dir / "broken").exists()
    steps = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in steps if "loss" in x] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_suspended_trainer_loses_its_bucket_to_another_and_destroys_nothing(start):
    with bucket_server.serve() as bucket:
        sleeper = start("gs://bucket/run", **bucket.environment)
        wait_for(lambda: bucket.names("run/checkpoints/7/"), sleeper)
        sleeper.send_signal(signal.SIGSTOP)
        other = start("gs://bucket/run", **bucket.environment)
        _, said = other.communicate(timeout=280)
        assert other.returncode == 0, said
        assert "gs://bucket/run is leased (" in said and "this process takes over gs://bucket/run" in said
        before = {name: bucket.get(name) for name in bucket.names()}
        assert "run/COMPLETE" in before and "run/LEASE" not in before
        sleeper.send_signal(signal.SIGCONT)
        _, said = sleeper.communicate(timeout=280)
        assert sleeper.returncode == 1 and "this process no longer trains in gs://bucket/run" in said, said
        # Parts of a checkpoint that the sleeping process had begun to write may still arrive.
        assert {name: bucket.get(name) for name in before} == before

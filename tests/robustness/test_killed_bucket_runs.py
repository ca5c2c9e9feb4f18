import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxir.interop import model_dir
from tests import bucket_server
from tests.beir_folder import WORDS
from tests.robustness.same_runs import assert_same_results
from tests.training.saved_run import saved_steps

pytestmark = pytest.mark.slow
MODEL = Path(__file__).parent.parent / "golden" / "bert"
TINY_RUN = ["-m", "tests.training.tiny_run"]
COMMITTED = "commit_success.txt"
RECIPE = """
from __gin__ import dynamic_registration
from jaxir import train
from jaxir.data.sets import pair_sources
from jaxir.interop import build
from jaxir.objectives import contrastive

train.train.model = @build.Pretrained()
build.Pretrained.source = "hf:{model}"
build.Pretrained.query_max_length = 8
build.Pretrained.passage_max_length = 8
train.train.objective = @contrastive.Contrastive()
train.train.data = @pair_sources.JsonlPairs()
train.train.dev = @pair_sources.JsonlPairs()
pair_sources.JsonlPairs.path = "{data}/pairs.jsonl"
train.train.steps = 8
train.train.batch_size = 8
train.train.checkpoint_every = 2
train.train.eval_every = 4
train.train.log_every = 1
"""


@pytest.fixture
def bucket():
    with bucket_server.serve() as served:
        yield served


@pytest.fixture
def start(bucket):
    environment = os.environ | bucket.environment | {"XLA_FLAGS": ""}
    started = []

    def process(*arguments: str) -> subprocess.Popen:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([sys.executable, *arguments], env=environment, **streams))
        return started[-1]

    yield process
    for one in started:
        if one.poll() is None:
            one.kill()
            one.communicate()


@pytest.fixture
def recipe(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    rows = [rng.choice(WORDS, 4) for _ in range(24)]
    lines = [{"query": f"{a} {b} {i}", "passage": f"{a} {b} {c} {i}"} for i, (a, b, c, _) in enumerate(rows)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "recipe.gin"
    path.write_text(RECIPE.format(model=MODEL, data=tmp_path))
    return path


def download(bucket, prefix: str, directory: Path) -> Path:
    for name in bucket.names(f"{prefix}/"):
        path = directory / name.removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket[name])
    return directory


def assert_same_run(ours: Path, theirs: Path, step: int) -> None:
    # A stopped run has also saved the step where it stopped, and kept it in place of an older one.
    assert saved_steps(ours)[-1] == saved_steps(theirs)[-1] == step
    assert_same_results(ours, theirs, step)
    one, other = (json.loads((run / "run.json").read_text()) for run in (ours, theirs))
    assert one["settings"] == other["settings"] and one["run"] != other["run"]
    assert list((ours / "tensorboard").glob("events.*"))


def test_a_bucket_run_killed_while_saving_resumes_and_is_a_model(bucket, start, recipe, tmp_path):
    train = f"train --gin_file={recipe} --output_dir="

    # From the first array of checkpoint 6 on, the bucket refuses writes; then the process is killed.
    amid_saving = threading.Event()

    def admit(name: str) -> bool:
        if name.startswith("runs/a/checkpoints/6/params/ocdbt.process_0/d/"):
            amid_saving.set()
        return not amid_saving.is_set()

    bucket.admit = admit
    process = start("-c", bucket_server.COMMANDS, f"{train}gs://bucket/runs/a")
    while not amid_saving.wait(0.05):
        assert process.poll() is None, process.communicate()[0]
    process.kill()
    process.communicate()
    bucket.admit = lambda name: True
    half_written = bucket.names("runs/a/checkpoints/6/")
    assert half_written and f"runs/a/checkpoints/6/{COMMITTED}" not in half_written
    kept = {name.split("/")[3] for name in bucket.names("runs/a/checkpoints/") if name.endswith(COMMITTED)}
    assert kept == {"2", "4"}
    # Damage checkpoint 4, which its mark calls whole.
    damaged = [name for name in bucket.names("runs/a/checkpoints/4/params/") if "/d/" in name]
    assert damaged
    for name in damaged:
        bucket.put(name, bytes(len(bucket[name])))

    commands = [f"{train}{place}" for place in ("gs://bucket/runs/a", f"{tmp_path}/local")]
    commands.append(f"convert --source=gs://bucket/runs/a --output={tmp_path}/model")
    process = start("-c", bucket_server.COMMANDS, *commands)
    output, _ = process.communicate()
    assert output.count("exit status 0") == 3, output
    assert output.splitlines()[-1] == "False", "TensorFlow was imported"
    for said in (
        "warning: checkpoint 4 is damaged",
        "moved to gs://bucket/runs/a/broken/4; an earlier checkpoint is used",
        "resuming gs://bucket/runs/a at step 2",
        "gs://bucket/runs/a is complete: 8 steps; best nDCG@10",
    ):
        assert said in output
    assert set(bucket.names("runs/a/broken/")) >= {n.replace("/checkpoints/", "/broken/") for n in damaged}
    ours, local = download(bucket, "runs/a", tmp_path / "copy"), tmp_path / "local"
    assert_same_run(ours, local, step=8)
    assert saved_steps(ours) == saved_steps(local)
    for name in ("jaxir.json", "config.gin", "tokenizer/tokenizer.json"):
        assert (ours / name).read_bytes() == (local / name).read_bytes()
    assert model_dir.load(f"{tmp_path}/model").fingerprint == model_dir.load(f"{local}").fingerprint


@pytest.mark.timeout(600)
def test_bucket_run_stopped_by_signals_ends_with_the_same_bits(bucket, start, tmp_path):
    seed = random.SystemRandom().randint(0, 10**6)
    print("seed", seed)
    rng = random.Random(seed)

    def run(run_dir: str) -> subprocess.Popen:
        return start(*TINY_RUN, f"--run_dir={run_dir}", '--settings={"steps": 20}')

    output, _ = (process := run(f"{tmp_path}/local")).communicate()
    assert process.returncode == 0, output
    for number, after in ((signal.SIGKILL, 7), (signal.SIGTERM, 14)):
        process = run("gs://bucket/run")
        while not bucket.names(f"run/checkpoints/{after}/") and process.poll() is None:
            time.sleep(0.005)
        # A resumed run knows the earlier steps only from this log.
        assert f'"step": {after}, '.encode() in bucket["run/log.jsonl"]
        time.sleep(rng.uniform(0, 0.5))
        process.send_signal(number)
        output, _ = process.communicate()
        assert process.returncode in (0, 143, -9), output
        print(number.name, process.returncode, bucket.names("run/checkpoints/")[-1:])
    output, _ = (process := run("gs://bucket/run")).communicate()
    assert process.returncode == 0, output
    assert_same_run(download(bucket, "run", tmp_path / "copy"), tmp_path / "local", step=20)

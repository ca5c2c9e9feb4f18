"""`python -m jaxir.train` in two processes: interrupted, resumed on other meshes, stopped by one process."""

import json
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxir import cli
from tests.training.saved_run import arrays, log, saved_steps

# The limit is for a busy machine.
pytestmark = pytest.mark.timeout(900)
STEPS, PAIRS = 30, 64
RECIPE = """
from __gin__ import dynamic_registration
from jaxir.runtime import partitioning
from jaxir import train
from jaxir.data.sets import pair_sources
from jaxir.interop import build
from jaxir.models import bert
from jaxir.models import dual_encoder
from jaxir.training.step import optimizers
from tests.sharding import paced
from tests.training import beside
{imports}

train.train.model = @build.FromScratch()
build.FromScratch.tokenizer = "{tokenizer}"
build.FromScratch.query_max_length = 8
build.FromScratch.passage_max_length = 12
build.FromScratch.config = @dual_encoder.DualEncoderConfig()
dual_encoder.DualEncoderConfig.backbone = @bert.BertConfig()
bert.BertConfig.vocab_size = 100
bert.BertConfig.embed_dim = 16
bert.BertConfig.num_layers = 1
bert.BertConfig.num_heads = 2
bert.BertConfig.mlp_dim = 32
bert.BertConfig.max_positions = 12
train.train.objective = @beside.Sigmoid()
beside.Sigmoid.width = 16
train.train.data = @paced.Paced()
paced.Paced.source = {source}
train.train.dev = @dev/pair_sources.JsonlPairs()
dev/pair_sources.JsonlPairs.path = "{data}"
train.train.optimizer = @optimizers.AdamW()
optimizers.AdamW.learning_rate = 3e-4
optimizers.AdamW.warmup_steps = 3
train.train.mesh = @partitioning.MeshConfig()
train.train.batch_size = 8
train.train.steps = {steps}
train.train.log_every = 1
train.train.eval_every = 10
train.train.checkpoint_every = 7
"""
JSONL = """@train/pair_sources.JsonlPairs()
train/pair_sources.JsonlPairs.path = "{data}"
"""
SEQIO = """@seqio_pairs.SeqioPairs()
seqio_pairs.SeqioPairs.mixture = @local_files.jsonl_pairs()
local_files.jsonl_pairs.path = "{data}"
"""
TOKENIZER = Path(__file__).parent.parent / "golden" / "bert"


@pytest.fixture
def pairs(tmp_path) -> Path:
    """A file of pairs."""
    words = ["apple", "banana", "cherry", "dune", "ember", "fjord", "grove", "harbour", "iris", "jade"]
    rng = np.random.default_rng(0)
    rows = [rng.choice(words, 4) for _ in range(PAIRS)]
    lines = [{"query": f"{' '.join(r[:2])} {i}", "passage": f"{' '.join(r)} {i}"} for i, r in enumerate(rows)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(directory: Path, data: str | Path, *, source: str = JSONL, imports: str = "") -> str:
    """Writes a recipe and returns the flag that names it."""
    path = directory / "recipe.gin"
    filled = {"data": data, "source": source.format(data=data), "imports": imports}
    path.write_text(RECIPE.format(**filled, tokenizer=TOKENIZER, steps=STEPS))
    return f"--gin_file={path}"


def command(recipe: str, run_dir: Path, mesh: dict[str, int]) -> list[str]:
    sizes = [f"--gin.MeshConfig.{axis}={size}" for axis, size in mesh.items()]
    return ["-m", "jaxir.train", recipe, f"--output_dir={run_dir}", *sizes]


def wait_for_step(processes, run_dir, step):
    while all(process.poll() is None for process in processes):
        if any(line["step"] >= step and "loss" in line for line in log(run_dir)):
            return
        time.sleep(0.01)
    raise AssertionError([process.communicate()[1] for process in processes if process.poll() is not None])


def assert_same_course(ours: Path, theirs: Path, tolerance: float):
    """Compares the losses, dev metrics and parameters of two finished runs."""
    lines = [[x for x in log(run) if "checkpoint" not in x] for run in (ours, theirs)]
    assert [len({line["run"] for line in course if "run" in line}) for course in lines] == [1, 1]
    for line, expected in zip(*lines, strict=True):
        own = ("run", "time", "examples_per_second", "step_seconds", "planned/memory_gib")
        names = [n for n in expected if n not in own]
        near = pytest.approx({n: expected[n] for n in names}, rel=tolerance, abs=tolerance)
        assert {n: line[n] for n in names} == near
    assert len({x["loss"] for x in lines[1] if "loss" in x}) == STEPS
    found, expected = (arrays(run, STEPS) for run in (ours, theirs))
    assert found.keys() == expected.keys() >= {"statistics['norm']['mean']", "auxiliary['scale']"}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=tolerance, err_msg=name)


@pytest.mark.slow
def test_a_killed_and_preempted_run_ends_as_an_uninterrupted_one(tmp_path, launch, finish, pairs, capfd):
    run_dir, flag = tmp_path / "run", recipe(tmp_path, pairs)

    def start(mesh: dict[str, int]):
        settings = {"PACE": "0.1", "JAXIR_HEARTBEAT_SECONDS": "10"}
        return launch(*command(flag, run_dir, mesh), processes=2, devices=2, **settings)

    # One of two processes is killed: the other ends soon, with an error message.
    two = start({"slices": 2, "fsdp": 2})
    wait_for_step(two, run_dir, 9)
    two[1].kill()
    began = time.monotonic()
    (code, errors), (killed, _) = finish(two)
    assert killed == -signal.SIGKILL and code != 0
    assert time.monotonic() - began < 30
    assert "run the same command again to resume" in errors or "another task died" in errors
    assert 7 in saved_steps(run_dir)

    # One of two is preempted: both save the same step, on another mesh than before.
    two = start({"fsdp": 4})
    wait_for_step(two, run_dir, 12)
    two[1].send_signal(signal.SIGTERM)
    (code, errors), (preempted, other) = finish(two)
    assert (code, preempted) == (143, 143), errors + other
    last = saved_steps(run_dir)[-1]
    assert 12 <= last < STEPS
    assert [x["step"] for x in log(run_dir) if "loss" in x] == list(range(1, last + 1))
    assert f"step {last}/{STEPS}" in errors and "step" not in other  # only the first process logs steps

    # A single process, the test's own, finishes the run.
    assert cli.main("jaxir.train:train", command(flag, run_dir, {"data": 2, "fsdp": 2})[2:]) == 0
    assert f"resuming {run_dir} at step {last}" in capfd.readouterr().err
    assert (run_dir / "COMPLETE").exists()

    whole = tmp_path / "uninterrupted"
    assert cli.main("jaxir.train:train", command(flag, whole, {"data": jax.device_count()})[2:]) == 0
    assert_same_course(run_dir, whole, 1e-5)


@pytest.mark.slow
def test_processes_stop_early_after_the_same_step(tmp_path, launch, finish, pairs):
    flags = command(recipe(tmp_path, pairs), tmp_path / "run", {"fsdp": 2})
    # At learning rate 0 no evaluation is better than the first.
    flags += ["--eval_every=2", "--learning_rate=0", "--early_stopping=2"]
    for _ in range(2):  # trains, then finds the run complete
        (first, told), (second, own) = finish(launch(*flags, processes=2, devices=1))
        assert (first, second) == (0, 0), told + own
        assert saved_steps(tmp_path / "run") == [2, 6]
        assert (tmp_path / "run/COMPLETE").read_text().startswith(f"stopped early at step 6 of {STEPS}, ")


@pytest.mark.slow
def test_a_preempted_run_on_seqio_data_ends_as_an_uninterrupted_one(tmp_path, launch, finish, pairs):
    imports = "from jaxir.data.seqio import seqio_pairs\nfrom jaxir.tasks import local_files"
    flag = recipe(tmp_path, pairs, source=SEQIO, imports=imports)

    def start(run_dir: Path, pace: float = 0.0):
        return launch(*command(flag, run_dir, {"fsdp": 2}), processes=2, devices=1, PACE=str(pace))

    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    two = start(run_dir, pace=0.1)
    wait_for_step(two, run_dir, 9)
    two[0].send_signal(signal.SIGTERM)
    assert [status for status, _ in finish(two)] == [143, 143]
    assert 9 <= saved_steps(run_dir)[-1] < STEPS
    (alone,) = finish(launch(*command(flag, run_dir, {"fsdp": 2}), processes=1, devices=2))
    assert alone[0] == 1 and "was trained with data_parts=2, not 1; give the settings" in alone[1]
    for directory in (run_dir, whole):
        ended = finish(start(directory))
        assert [status for status, _ in ended] == [0, 0], ended
    assert_same_course(run_dir, whole, 1e-7)


@pytest.mark.slow
def test_missing_input_of_one_process_ends_all(tmp_path, launch, finish, pairs):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    pairs.rename(folders[0] / pairs.name)
    flags = command(recipe(tmp_path, pairs.name), tmp_path / "run", {"fsdp": 2})
    (first, told), (second, own) = finish(launch(*flags, processes=2, devices=1, folders=folders))
    assert (first, second) == (1, 1)
    assert own == "error: pairs.jsonl: no such file or directory\n"
    assert told.count("error: ") == 1 and "process 1 stopped (pairs.jsonl: no such file or directory)" in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("pairs.jsonl", "process 1 has data=64 pairs of 160 + 160 tokens with other content than process 0"),
        pytest.param(
            "recipe.gin", "1 has optimizer.learning_rate=0.001, not 0.0003 as", marks=pytest.mark.slow
        ),
        pytest.param("model", "process 1 has weights with other content than", marks=pytest.mark.slow),
    ],
)
def test_differing_inputs_end_all_processes_before_training(tmp_path, launch, finish, pairs, other, sentence):
    """Regression: replicas were trained on different inputs without an error."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(TOKENIZER, folder / "model")
        shutil.copy(pairs, folder)
        recipe(folder, pairs.name)
        with (folder / "recipe.gin").open("a") as file:
            file.write('train.train.model = @build.Pretrained()\nbuild.Pretrained.source = "hf:model"\n')
    changed = folders[1] / other
    if other == "model":
        weights = load_file(changed / "model.safetensors")
        weights["embeddings.LayerNorm.weight"] += 0.01
        save_file(weights, changed / "model.safetensors")
    else:
        changed.write_text(changed.read_text().replace("apple", "jade").replace("3e-4", "1e-3"))
    flags = command("--gin_file=recipe.gin", tmp_path / "run", {"data": 2})
    for status, told in finish(launch(*flags, processes=2, devices=1, folders=folders)):
        assert status == 1
        *_, last = told.splitlines()  # the slower process may report "process 0 stopped (...)"
        assert told.count("error: ") == 1 and last.startswith("error: ") and sentence in last
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        ("RuntimeError('a bug')", 70, "internal: RuntimeError: a bug"),
        ("Terminated()", 143, "SIGTERM"),
    ],
)
def test_failure_of_one_process_ends_the_other(error, status, reason, launch, finish):
    code = f"""
import jax, time
from jaxir.runtime.distributed import maybe_initialize_distributed, together
from jaxir.core.errors import Terminated
maybe_initialize_distributed()
with together():
    if jax.process_index() == 1:
        raise {error}
    time.sleep(300)
"""
    (other, errors), (own, failure) = finish(launch("-c", code, processes=2, devices=1))
    assert (own, other) == (status, 75 if status == 143 else 1)
    assert failure.splitlines()[-1] == f"error: {reason}"
    assert ("Traceback" in failure) == (status == 70)
    assert errors.startswith(f"error: process 1 stopped ({reason}), so process 0 ends too")


def test_waiting_for_other_processes_is_reported(launch):
    code = (
        "import jaxir.runtime.distributed as d\nd.WAITING_MESSAGE_SECONDS = 0.5\n"
        "d.maybe_initialize_distributed()"
    )
    first, other = launch("-c", code, processes=2, devices=1)
    other.kill()
    assert "start the same command on each machine" in first.stderr.readline()
    first.kill()

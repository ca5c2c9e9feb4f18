"""Traces of steps, and the figures of time and memory in the log."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxir.core.errors import UserError
from jaxir.costs import chips
from jaxir.training.run.profiling import peak_memory, planned, steps_to_trace
from tests.training.saved_run import log
from tests.training.tiny_run import Hooked, pairs, run

SETTINGS = {"steps": 6, "dev": None, "checkpoint_every": 6}


@pytest.mark.slow
def test_the_log_has_the_time_of_a_step_and_its_share_of_the_peak(tmp_path, monkeypatch):
    def logged(name):
        run(tmp_path / name, **SETTINGS, log_every=3)
        return [line for line in log(tmp_path / name) if "loss" in line]

    for line in logged("unknown"):
        assert line["step_seconds"] * line["examples_per_second"] == pytest.approx(8)
        assert "mfu" not in line
    slow = dataclasses.replace(chips.CHIPS["l4"], flops=1e6)
    monkeypatch.setattr(chips, "of_kind", {"cpu": slow}.get)
    # The matrix times both texts of 8 pairs, and logits of queries by passages and queries. Each product has
    # two more for its gradients.
    flops = 3 * 2 * (2 * 8 * 32 * 32 + 2 * 8 * 8 * 32)
    for line in logged("known"):
        assert line["mfu"] * line["step_seconds"] == pytest.approx(flops / 2e6)  # the peak of two devices


def test_chips_are_known_by_jax_s_names():
    kinds = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
    kinds |= {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L40S": "l40s"}
    for kind, name in kinds.items():
        assert chips.of_kind(kind) is chips.CHIPS[name]
    assert chips.of_kind("cpu") is None


@pytest.mark.slow
def test_chosen_steps_are_traced(tmp_path, capsys):
    assert run(tmp_path / "run", **SETTINGS, profile_steps="3:4").step == 6
    told = f"steps 3 to 4 are traced; open them with: xprof {tmp_path / 'run' / 'tensorboard'}\n"
    assert told in capsys.readouterr().err
    (file,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert file.parent == tmp_path / "run" / "tensorboard" / "plugins" / "profile" / "steps_3_to_4"
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    names = [event.name for line in lines for event in line.events]
    assert names.count("CommonPjRtLoadedExecutable::Execute (jit_step)") == 2


def test_log_has_planned_memory_and_no_unknown_figures(tmp_path):
    run(tmp_path / "run", **SETTINGS, log_every=3)
    lines = log(tmp_path / "run")
    logged = [line for line in lines if "loss" in line]
    (memory,) = {line["planned/memory_gib"] for line in logged}
    # Two devices share the parameters and Adam's two moments of them; a batch of 8 pairs is small.
    parameters = 4 * (64 * 32 + 32 * 32 + 32)
    assert 3 * parameters / 2 < memory * 2**30 < 60 * parameters
    # CPUs count no memory, and no plan has times for them.
    named = {name for line in logged for name in line if name.startswith(("planned/", "peak_memory", "mfu"))}
    assert named == {"planned/memory_gib"}


def test_peak_memory_is_the_largest_of_all_devices():
    """CPUs do not count their memory, so these objects replace devices that do."""
    counts = [None, {"peak_bytes_in_use": 3 * 2**30}, {"bytes_limit": 1}, {"peak_bytes_in_use": 2**29}]
    devices = [types.SimpleNamespace(memory_stats=lambda count=count: count) for count in counts]
    assert peak_memory(devices) == {"peak_memory_gib": 3.0}
    assert peak_memory(devices[::2]) == peak_memory(jax.devices()) == {}


def test_a_program_that_cannot_be_read_does_not_end_the_run(capsys):
    compiled = jax.jit(jnp.sum).lower(jnp.ones([3])).compile()
    assert planned(compiled, None) == {}  # no mesh
    assert capsys.readouterr().err.startswith(
        "warning: the log has no planned/ figures: the step's program cannot be read: AttributeError"
    )


# Prints a run's logged figures and the plan's figures of the same program.
PLANNED_TWICE = """
import json, sys
from jaxir.runtime import compile_cache
from jaxir.costs import targets
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.t5 import T5Config
from jaxir.objectives.contrastive import Contrastive
from jaxir.runtime.partitioning import MeshConfig
from jaxir.planning import devices, program, run_plan
from jaxir.training.run import profiling
from jaxir.training.step.optimizers import Adafactor
from jaxir.training.run.recipe import Recipe

target = targets.parse("v5e:2x4*2")
chips = devices.get(target)
backbone = T5Config(vocab_size=256, embed_dim=128, num_layers=1, num_heads=2, head_dim=64, mlp_dim=128)
settings = {"optimizer": Adafactor(), "steps": 10, "batch_size": 64}
planned = program.Planned(
    recipe=Recipe(model=object(), objective=Contrastive(), data=None, **settings),
    config=DualEncoderConfig(backbone=backbone),
    settings=EncoderSettings(query_max_length=8, passage_max_length=16),
    partitioner=MeshConfig(slices=2, fsdp=2).build(chips),
)
kept = []
compile_cache.aside = lambda compile: kept.append(compile()) or kept[-1]
made = run_plan.make(target, planned)
costs = made.costs
print(json.dumps([
    targets.of_devices(chips).name,
    profiling.planned(*kept, planned.partitioner),
    [made.memory.total / 2**30, costs.roofline.overlapped, costs.overlap.seconds, costs.roofline.in_turn],
]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(__file__).parents[2] / ".plan-tools").exists(), reason="no TPU compiler (make plan-tools)"
)
def test_logged_figures_equal_the_plan():
    quick = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0", "JAX_OPTIMIZATION_LEVEL": "O1"}
    quick |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # plans are made anew
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | quick
    done = subprocess.run([sys.executable, "-c", PLANNED_TWICE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, logged, (memory, overlapped, scheduled, in_turn) = json.loads(done.stdout.splitlines()[-1])
    assert name == "v5e:2x4*2"
    assert logged == {
        "planned/memory_gib": pytest.approx(memory, rel=0.01),
        "planned/all_at_once_seconds": overlapped,
        "planned/as_scheduled_seconds": scheduled,
        "planned/one_after_another_seconds": in_turn,
    }
    assert in_turn >= scheduled >= overlapped > 0


@pytest.mark.slow
def test_run_stopped_within_traced_steps_reports_that_there_is_no_trace(tmp_path, capsys):
    sent = Hooked(pairs(64), lambda step: step == 8 and os.kill(os.getpid(), 15))
    stopped = run(tmp_path / "run", data=sent, **SETTINGS | {"steps": 12}, profile_steps="2:11")
    assert stopped.stopped_by == 15 and 2 < stopped.step < 11
    assert run(tmp_path / "run", **SETTINGS | {"steps": 12}, profile_steps="2:11").step == 12
    told = capsys.readouterr().err
    assert f"steps 2:11 are not traced: the run resumes after step {stopped.step}\n" in told
    assert " are traced; open" not in told and not list(tmp_path.rglob("*.xplane.pb"))


def test_steps_outside_the_run_cannot_be_traced():
    assert steps_to_trace("1:6", 6) == (1, 6)
    for wrong in ("4", "5:4", "0:3", "3:7", "-1:2", "1:2:3", "a:b", "1.5:2"):
        with pytest.raises(UserError, match=f"of the run's 6 steps, such as 10:13, not '{wrong}'$"):
            steps_to_trace(wrong, 6)

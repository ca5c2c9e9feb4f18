"""Traces of steps: written whole, of these steps alone, and never in a run's way."""

import dataclasses
import json
import os

import jax
import pytest
from tiny_run import Hooked, pairs, run

from jaxir.costs import chips
from jaxir.errors import UserError
from jaxir.training.profiling import steps_to_trace

SETTINGS = {"steps": 6, "dev": None, "checkpoint_every": 6}


@pytest.mark.slow
def test_the_log_has_the_time_of_a_step_and_its_share_of_the_peak(tmp_path, monkeypatch):
    def logged(name):
        run(tmp_path / name, **SETTINGS, log_every=3)
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "loss" in line]

    for line in logged("unknown"):
        assert line["step_seconds"] * line["examples_per_second"] == pytest.approx(8)
        assert "mfu" not in line
    slow = dataclasses.replace(chips.CHIPS["l4"], flops=1e6)
    monkeypatch.setattr(chips, "of_kind", {"cpu": slow}.get)
    # The matrix of both texts of 8 pairs; logits of queries by passages and queries. Each has two gradients.
    flops = 3 * 2 * (2 * 8 * 32 * 32 + 2 * 8 * 8 * 32)
    for line in logged("known"):
        assert line["mfu"] * line["step_seconds"] == pytest.approx(flops / 2e6)  # of two devices


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            ("TPU v4", "v4"),
            ("TPU v5 lite", "v5e"),
            ("TPU v5p", "v5p"),
            ("TPU v5", "v5p"),
            ("TPU v6 lite", "v6e"),
        ),
        *(("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA L40S", "l40s")),
        ("cpu", None),
    ],
)
def test_jax_names_chips_otherwise(kind, name):
    assert chips.of_kind(kind) is chips.CHIPS.get(name)


def test_a_run_traces_the_steps_it_is_told_to(tmp_path, capsys):
    assert run(tmp_path / "run", **SETTINGS, profile_steps="3:4").step == 6
    assert f"steps 3 to 4 are traced: xprof {tmp_path / 'run' / 'tensorboard'}\n" in capsys.readouterr().err
    (file,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert file.parent == tmp_path / "run" / "tensorboard" / "plugins" / "profile" / "steps_3_to_4"
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    names = [event.name for line in lines for event in line.events]
    assert names.count("CommonPjRtLoadedExecutable::Execute (jit_step)") == 2


def test_a_run_that_stops_within_or_goes_on_after_has_no_trace_and_says_so(tmp_path, capsys):
    sent = Hooked(pairs(64), lambda step: step == 8 and os.kill(os.getpid(), 15))
    stopped = run(tmp_path / "run", data=sent, **SETTINGS | {"steps": 12}, profile_steps="2:11")
    assert stopped.stopped_by == 15 and 2 < stopped.step < 11
    assert run(tmp_path / "run", **SETTINGS | {"steps": 12}, profile_steps="2:11").step == 12
    told = capsys.readouterr().err
    assert f"no trace of steps 2:11: the run goes on after step {stopped.step}\n" in told
    assert "are traced" not in told and not list(tmp_path.rglob("*.xplane.pb"))


def test_steps_that_the_run_does_not_have_are_refused_before_it_begins(tmp_path):
    assert steps_to_trace("1:6", 6) == (1, 6)
    for wrong in ("4", "5:4", "0:3", "3:7", "-1:2", "1:2:3", "a:b", "1.5:2"):
        with pytest.raises(UserError, match=f"of the 6 steps, such as 10:13, not '{wrong}'$"):
            steps_to_trace(wrong, 6)
    with pytest.raises(UserError, match="profile_steps must be"):
        run(tmp_path / "run", **SETTINGS, profile_steps="5:9")
    assert not (tmp_path / "run").exists()

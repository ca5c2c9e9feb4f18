"""run.json and log.jsonl that are damaged, gone or another run's: told, kept, and the run goes on."""

import json
import os
import shutil
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.training.run.logs import own_lines
from jaxir.training.run.marker import check_run_dir, go_on
from tests.training.tiny_run import Hooked, pairs, run

SETTINGS = {"steps": 12, "checkpoint_every": 3, "eval_every": 4}


def stop_at(run_dir: Path, step: int, **settings) -> Path:
    sent = Hooked(pairs(64), lambda at: at == step and os.kill(os.getpid(), 15))
    assert run(run_dir, data=sent, **(SETTINGS | settings)).stopped_by == 15
    return run_dir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was told to stop after some steps."""
    return stop_at(tmp_path_factory.mktemp("stopped") / "run", 6)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Another run, with another seed, that got further."""
    return stop_at(tmp_path_factory.mktemp("other") / "run", 9, seed=3)


def copy(run_dir: Path, place: Path) -> Path:
    shutil.copytree(run_dir, place)
    return place


def resumed(run_dir: Path, capsys, **settings) -> list[str]:
    """Resumes a run to its end; returns the warnings."""
    newest = max(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit())
    capsys.readouterr()
    result = run(run_dir, **(SETTINGS | settings))
    assert (result.started_at, result.step) == (newest, 12)
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


def changed(content: dict, **values) -> bytes:
    return json.dumps({k: v for k, v in (content | values).items() if v is not ...}).encode()


def test_a_damaged_run_json_is_told_and_written_anew(tmp_path, stopped, capsys):
    whole = (stopped / "run.json").read_bytes()
    run_dir = copy(stopped, tmp_path / "run")
    path, kept = run_dir / "run.json", run_dir / "broken" / "run.json"
    path.write_bytes(whole[: len(whole) // 2])
    (told,) = resumed(run_dir, capsys)
    assert told.startswith(f"warning: {path}: not valid JSON (")
    assert told.endswith(f"; it is kept as {kept}, and written anew")
    assert path.read_bytes() == whole and kept.read_bytes() == whole[: len(whole) // 2]
    run(run_dir, **SETTINGS)  # which is complete
    assert capsys.readouterr().err == ""


def test_whatever_the_damage_of_a_run_json_it_is_told(tmp_path, stopped, capsys):
    whole = (stopped / "run.json").read_bytes()
    content = json.loads(whole)
    flipped = bytearray(whole)
    flipped[whole.index(b'"seed": 0') + 8] = ord("7")
    path = tmp_path / "run.json"
    for number, (damage, reason) in enumerate(
        {
            b"": "not valid JSON",
            b"\xff\xfe\x00": "not valid JSON",
            b"null": "is damaged",
            b"[" * 100_000: "not valid JSON",
            changed(content, settings=...): "'settings'",
            changed(content, settings=[1]): "'settings'",
            changed(content, run=7): "'run'",
            bytes(flipped): "not what was written there",
            changed(content, run="0123"): "not what was written there",
            changed(content, sha256=[]): "not what was written there",
        }.items()
    ):
        path.write_bytes(damage)
        assert go_on(tmp_path, content["run"], content["settings"]) == content["run"]
        kept = tmp_path / "broken" / f"run{f'-{number + 1}' if number else ''}.json"
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith(f"warning: {path}") and reason in told and str(kept) in told
        assert kept.read_bytes() == damage and path.read_bytes() == whole
    assert go_on(tmp_path, content["run"], content["settings"]) == content["run"]
    assert capsys.readouterr().err == "" and len(list((tmp_path / "broken").iterdir())) == number + 1


def test_settings_tell_a_run_json_of_an_earlier_version(tmp_path, stopped, capsys):
    settings = json.loads((stopped / "run.json").read_text())["settings"]
    (tmp_path / "run.json").write_bytes(changed({"settings": settings | {"seed": 3}}))
    name = go_on(tmp_path, None, settings)
    said = f"warning: {tmp_path}/run.json is of another run than the checkpoints: it was trained with seed=3,"
    assert capsys.readouterr().err.startswith(f"{said} not 0; it is kept as")
    # Killed before its next checkpoint, it keeps the name that run.json, and its log, have by now.
    assert go_on(tmp_path, None, settings) == name == json.loads((tmp_path / "run.json").read_text())["run"]
    assert capsys.readouterr().err == ""


def test_a_run_json_of_another_run_is_told_and_kept(tmp_path, stopped, other, capsys):
    content = json.loads((stopped / "run.json").read_text())
    twin = json.dumps({"run": "f" * 16, "settings": content["settings"]})  # of the same settings
    for number, (foreign, reason) in enumerate(
        (((other / "run.json").read_text(), "another run"), (twin, "another run"))
    ):
        run_dir = copy(stopped, tmp_path / str(number))
        (run_dir / "run.json").write_text(foreign)
        (told,) = resumed(run_dir, capsys)
        assert (
            f"{run_dir}/run.json is of {reason} than the checkpoints; it is kept as {run_dir}/broken" in told
        )
        assert (run_dir / "broken" / "run.json").read_text() == foreign
        assert json.loads((run_dir / "run.json").read_text()) == content


def test_a_run_json_that_is_gone_costs_no_run(tmp_path, stopped, capsys):
    run_dir = copy(stopped, tmp_path / "run")
    before = (run_dir / "run.json").read_bytes()
    (run_dir / "run.json").unlink()
    assert resumed(run_dir, capsys) == [f"warning: {run_dir}/run.json is missing; it is written anew"]
    assert (run_dir / "run.json").read_bytes() == before


def test_a_run_of_an_earlier_version_goes_on_without_a_word(tmp_path, stopped, capsys):
    run_dir = copy(stopped, tmp_path / "run")
    settings = json.loads((run_dir / "run.json").read_text())["settings"]
    (run_dir / "run.json").write_text(json.dumps({"settings": settings}, indent=2))
    log = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    unnamed = [json.dumps({k: v for k, v in line.items() if k != "run"}) + "\n" for line in log]
    (run_dir / "log.jsonl").write_text("".join(unnamed))
    for step in (run_dir / "checkpoints").glob("*/run/metadata"):
        record = json.loads(step.read_text())
        step.write_text(
            json.dumps({k: v for k, v in record.items() if k in ("step", "dev_value", "settings")})
        )
    stop_at(run_dir, 9)
    assert "warning" not in capsys.readouterr().err
    assert resumed(run_dir, capsys) == []
    assert not (run_dir / "broken").exists()
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, 13))
    assert {x["run"] for x in lines if "run" in x} == {json.loads((run_dir / "run.json").read_text())["run"]}


def test_a_directory_with_a_run_json_of_something_else_is_not_written_to(tmp_path, stopped):
    for number, content in enumerate(('{"name": "my sweep"}', "", '{"settings": {"a": 1}, "sha256": ""}')):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "run.json").write_text(content)
        with pytest.raises(UserError, match=rf"^{place}/run.json.* there is no checkpoint either"):
            run(place)
        assert (place / "run.json").read_text() == content and len(list(place.iterdir())) == 1


def test_checkpoints_of_something_else_mark_no_run(tmp_path):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "3" / "model.pt").touch()
    with pytest.raises(UserError, match=r"is not empty and is not a training run \(it has no run\.json\)"):
        check_run_dir(tmp_path)
    (tmp_path / "checkpoints" / "4" / "run").mkdir(parents=True)
    record = {"step": 4, "dev_value": None, "settings": {}}
    (tmp_path / "checkpoints" / "4" / "run" / "metadata").write_text(json.dumps(record))
    check_run_dir(tmp_path)  # whose newest is one of ours


def test_a_run_that_was_killed_before_it_was_marked_begins_again(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert run(tmp_path / "run", **(SETTINGS | {"steps": 4})).step == 4


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_its_name(tmp_path, capsys):
    run_dir = tmp_path / "run"
    broken = Hooked(pairs(64), lambda step: step == 2 and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(run_dir, data=broken, **SETTINGS)
    name = json.loads((run_dir / "run.json").read_text())["run"]
    assert name in (run_dir / "log.jsonl").read_text()
    run(run_dir, **SETTINGS)
    assert json.loads((run_dir / "run.json").read_text())["run"] == name
    assert "warning" not in capsys.readouterr().err and not (run_dir / "broken").exists()


def test_the_log_of_another_run_is_told_and_kept(tmp_path, stopped, other, capsys):
    foreign, own = ((place / "log.jsonl").read_text() for place in (other, stopped))
    for number, (log, left) in enumerate(((foreign, ""), (foreign + own, own), (own + foreign, own))):
        run_dir = copy(stopped, tmp_path / str(number))
        path, kept = run_dir / "log.jsonl", run_dir / "broken" / "log.jsonl"
        path.write_text(log)
        (told,) = resumed(run_dir, capsys)
        count = len(foreign.splitlines())
        expected = f"{path} has lines of another run ({count}); as it was it is kept as {kept}"
        assert told == f"warning: {expected}"
        assert kept.read_text() == log and path.read_text().startswith(left)
        name = json.loads((run_dir / "run.json").read_text())["run"]
        assert own_lines(path.read_bytes(), 12, name)[1] == ""


def test_a_log_that_tells_of_a_checkpoint_that_is_gone_is_kept(tmp_path, stopped, capsys):
    run_dir = copy(stopped, tmp_path / "run")
    log, steps = (
        (run_dir / "log.jsonl").read_text(),
        sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()),
    )
    shutil.rmtree(run_dir / "checkpoints" / str(steps[-1]))
    (told,) = resumed(run_dir, capsys)
    assert f"log.jsonl tells of checkpoint {steps[-1]}, which is not there; as it was it is kept" in told
    assert (run_dir / "broken" / "log.jsonl").read_text() == log


def test_a_best_json_that_is_no_text_is_written_anew(tmp_path, stopped, capsys):
    run_dir = copy(stopped, tmp_path / "run")
    (run_dir / "checkpoints" / "best.json").write_bytes(b"\xff\xfe")
    assert resumed(run_dir, capsys) == []
    assert json.loads((run_dir / "checkpoints" / "best.json").read_text())["step"] > 0

"""run.json, which marks a run's directory: what is wrong with it costs no run, and what is no run stays."""

import json
import shutil
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.training.run.marker import check_run_dir, go_on
from tests.training.saved_run import log, saved_steps
from tests.training.tiny_run import STOPPED, Hooked, pairs, run, stop_at


def resumed(run_dir: Path, capsys) -> list[str]:
    """Resumes a run to its end; returns the warnings."""
    newest = saved_steps(run_dir)[-1]
    capsys.readouterr()
    result = run(run_dir, **STOPPED)
    assert (result.started_at, result.step) == (newest, 12)
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


def changed(content: dict, **values) -> bytes:
    return json.dumps({k: v for k, v in (content | values).items() if v is not ...}).encode()


def test_a_damaged_or_foreign_run_json_is_written_anew(tmp_path, stopped, capsys):
    whole = (stopped / "run.json").read_bytes()
    content = json.loads(whole)
    flipped = bytearray(whole)
    flipped[whole.index(b'"seed": 0') + 8] = ord("7")
    path = tmp_path / "run.json"
    for damage, reason in {
        None: "is missing",
        b"": "not valid JSON",
        b"\xff\xfe\x00": "not valid JSON",
        b"null": "is damaged",
        changed(content, settings=...): "'settings'",
        changed(content, run=7): "'run'",
        bytes(flipped): "not what was written there",
        changed({"settings": content["settings"]}, run="f" * 16): "",  # another run's, and whole
        whole: "",
    }.items():
        path.write_bytes(damage) if damage is not None else path.unlink(missing_ok=True)
        assert go_on(tmp_path, content["run"], content["settings"]) == content["run"]
        told = capsys.readouterr().err.splitlines()
        assert len(told) == bool(reason) and path.read_bytes() == whole
        assert not reason or (told[0].startswith(f"warning: {path}") and reason in told[0])


def test_a_run_json_that_is_gone_costs_no_run(tmp_path, stopped, capsys):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    before = (run_dir / "run.json").read_bytes()
    (run_dir / "run.json").unlink()
    (run_dir / "checkpoints" / "best.json").write_bytes(b"\xff\xfe")
    assert resumed(run_dir, capsys) == [f"warning: {run_dir}/run.json is missing; it is written anew"]
    assert (run_dir / "run.json").read_bytes() == before
    assert json.loads((run_dir / "checkpoints" / "best.json").read_text())["step"] > 0


def test_a_run_of_an_earlier_version_goes_on_without_a_word(tmp_path, stopped, capsys):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    settings = json.loads((run_dir / "run.json").read_text())["settings"]
    (run_dir / "run.json").write_text(json.dumps({"settings": settings}, indent=2))
    unnamed = [json.dumps({k: v for k, v in x.items() if k != "run"}) + "\n" for x in log(run_dir)]
    (run_dir / "log.jsonl").write_text("".join(unnamed))
    for step in (run_dir / "checkpoints").glob("*/run/metadata"):
        record = json.loads(step.read_text())
        step.write_text(
            json.dumps({k: v for k, v in record.items() if k in ("step", "dev_value", "settings")})
        )
    stop_at(run_dir, 10)
    assert "warning" not in capsys.readouterr().err
    assert resumed(run_dir, capsys) == []
    assert not (run_dir / "broken").exists()
    lines = log(run_dir)
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, 13))
    assert {x["run"] for x in lines if "run" in x} == {json.loads((run_dir / "run.json").read_text())["run"]}


def test_a_directory_with_a_run_json_of_something_else_is_not_written_to(tmp_path):
    for number, content in enumerate(('{"name": "my sweep"}', "", '{"settings": {"a": 1}, "sha256": ""}')):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "run.json").write_text(content)
        with pytest.raises(UserError, match=rf"^{place}/run.json.* may be no training run: give another"):
            check_run_dir(place)


def test_checkpoints_of_something_else_mark_no_run(tmp_path):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "3" / "model.pt").touch()
    with pytest.raises(UserError, match=r"is not empty and is not a training run \(it has no run\.json\)"):
        check_run_dir(tmp_path)
    (tmp_path / "checkpoints" / "4" / "run").mkdir(parents=True)
    record = {"step": 4, "dev_value": None, "settings": {}}
    (tmp_path / "checkpoints" / "4" / "run" / "metadata").write_text(json.dumps(record))
    check_run_dir(tmp_path)  # whose newest is a checkpoint of jaxir's


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_its_name(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)  # killed before it was marked
    broken = Hooked(pairs(64), lambda step: step == 2 and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(run_dir, data=broken, **STOPPED)
    name = json.loads((run_dir / "run.json").read_text())["run"]
    assert name in (run_dir / "log.jsonl").read_text()
    run(run_dir, **STOPPED)
    assert json.loads((run_dir / "run.json").read_text())["run"] == name

"""run.json marks a run's directory: a damaged one is replaced, and other directories stay as they are."""

import json
import shutil
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.training.run.marker import check_run_dir, mark
from tests.training.saved_run import log, saved_steps
from tests.training.tiny_run import STOPPED, Hooked, pairs, run, stop_at


def resumed(run_dir: Path, capsys) -> None:
    """Resumes a run to its end, without a warning."""
    newest = saved_steps(run_dir)[-1]
    capsys.readouterr()
    result = run(run_dir, **STOPPED)
    assert (result.started_at, result.step) == (newest, 12)
    assert "warning" not in capsys.readouterr().err


def test_damaged_or_foreign_run_json_is_replaced(tmp_path, stopped):
    whole = (stopped / "run.json").read_bytes()
    content, path = json.loads(whole), tmp_path / "run.json"
    of_another_run = json.dumps({"settings": content["settings"], "run": "f" * 16}).encode()
    changed = whole.replace(b'"seed": 0', b'"seed": 7')
    for damage in (None, b"", b"\xff\xfe\x00", b"null", changed, of_another_run, whole):
        path.write_bytes(damage) if damage is not None else path.unlink(missing_ok=True)
        assert mark(tmp_path, content["settings"], content["run"]) == content["run"]
        assert path.read_bytes() == whole


def test_run_resumes_without_run_json_and_with_a_damaged_best_json(tmp_path, stopped, capsys):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    before = (run_dir / "run.json").read_bytes()
    (run_dir / "run.json").unlink()
    (run_dir / "checkpoints" / "best.json").write_bytes(b"\xff\xfe")
    resumed(run_dir, capsys)
    assert (run_dir / "run.json").read_bytes() == before
    assert json.loads((run_dir / "checkpoints" / "best.json").read_text())["step"] > 0


def test_run_of_an_earlier_version_resumes(tmp_path, stopped, capsys):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    settings = json.loads((run_dir / "run.json").read_text())["settings"]
    (run_dir / "run.json").write_text(json.dumps({"settings": settings}, indent=2))
    unnamed = [json.dumps({k: v for k, v in x.items() if k != "run"}) + "\n" for x in log(run_dir)]
    (run_dir / "log.jsonl").write_text("".join(unnamed))
    for step in (run_dir / "checkpoints").glob("*/run/metadata"):
        record = json.loads(step.read_text())
        kept = {k: v for k, v in record.items() if k in ("step", "dev_value", "settings")}
        step.write_text(json.dumps(kept))
    stop_at(run_dir, 10)
    resumed(run_dir, capsys)
    assert not (run_dir / "broken").exists()
    lines = log(run_dir)
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, 13))
    assert {x["run"] for x in lines if "run" in x} == {json.loads((run_dir / "run.json").read_text())["run"]}


def test_directories_of_other_programs_are_refused(tmp_path):
    for number, content in enumerate(('{"name": "my sweep"}', "", '{"settings": {"a": 1}, "sha256": ""}')):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "run.json").write_text(content)
        with pytest.raises(UserError, match=rf"^{place}/run.json is damaged or was not written by"):
            check_run_dir(place)
    (place := tmp_path / "model" / "checkpoints" / "3").mkdir(parents=True)
    (place / "model.pt").touch()
    with pytest.raises(UserError, match=r"is not empty and is not a training run \(it has no run\.json\)"):
        check_run_dir(tmp_path / "model")
    (tmp_path / "model" / "checkpoints" / "4" / "run").mkdir(parents=True)
    record = {"step": 4, "dev_value": None, "settings": {}}
    (tmp_path / "model" / "checkpoints" / "4" / "run" / "metadata").write_text(json.dumps(record))
    check_run_dir(tmp_path / "model")  # its newest checkpoint is jaxir's


def test_run_killed_before_its_first_checkpoint_keeps_its_name(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)  # killed before run.json was written
    with pytest.raises(ZeroDivisionError):
        run(run_dir, data=Hooked(pairs(64), lambda step: step == 2 and 1 / 0), **STOPPED)
    name = json.loads((run_dir / "run.json").read_text())["run"]
    assert name in (run_dir / "log.jsonl").read_text()
    run(run_dir, **STOPPED)
    assert json.loads((run_dir / "run.json").read_text())["run"] == name

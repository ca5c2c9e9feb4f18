"""Weights & Biases and trackio get a run's metrics; the tests read the files of these libraries."""

import json
import sqlite3
import struct
from pathlib import Path

import pytest

from jaxir.training.run.trackers import plain
from jaxir.training.step.optimizers import AdamW
from tests.training.saved_run import log
from tests.training.tiny_run import Hooked, ToOne, pairs, run
from tests.training.wandb_server import serving

pytestmark = pytest.mark.slow
SETTINGS = {"objective": ToOne(), "steps": 12, "eval_every": 6, "checkpoint_every": 6}
BLOCK = 1 << 15  # size in bytes of the blocks of a .wandb file, which is a log of LevelDB


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory for the files of the libraries; trackio reads its name once, when it is imported."""
    found = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(found))
        patch.setenv("WANDB_DIR", str(found))
        patch.setenv("HOME", str(found))
        patch.delenv("WANDB_API_KEY", raising=False)
        yield found


def records_of(file: Path) -> list:
    """The records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, found, parts = file.read_bytes(), [], b""
    at = 7  # the length of the header
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(parts))
            parts = b""
    return found


def values_of(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def add_row(rows: dict, row: dict) -> None:
    """Adds one of wandb's rows to {step: its metrics}."""
    step = row.pop("step")
    rows[step] = {name: value for name, value in row.items() if not name.startswith("_")}


def expected_rows(run_dir: Path) -> dict[int, dict[str, float]]:
    """Each step's metrics in log.jsonl under the names that trackers show."""
    found = {}
    for line in log(run_dir):
        if "checkpoint" not in line:
            named = {k: v for k, v in line.items() if k not in ("step", "run", "time")}
            row = {k if "/" in k else f"train/{k}": v for k, v in named.items()}
            found.setdefault(line["step"], {}).update(row)
    return found


def without_times(rows: dict) -> dict:
    times = ("train/examples_per_second", "train/step_seconds")
    return {step: {k: v for k, v in row.items() if k not in times} for step, row in rows.items()}


def test_trackers_get_every_row_once_from_a_run_that_is_resumed(tmp_path, place, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ZeroDivisionError):
        broken = Hooked(pairs(64), lambda at: at == 10 and 1 / 0)
        run(tmp_path / "my-run", data=broken, trackers=["wandb"], **SETTINGS)
    both = SETTINGS | {"trackers": ["wandb", "trackio"]}  # trackio is added
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "my-run", data=broken, **both)
    assert run(tmp_path / "my-run", **both).step == 12
    assert "warning" not in capsys.readouterr().err

    expected = without_times(expected_rows(tmp_path / "my-run"))
    name = json.loads((tmp_path / "my-run/run.json").read_text())["run"]
    assert {"dev/nDCG@10", "train/loss"} < expected[12].keys() and "dev/nDCG@10" not in expected[11]

    rows, configs = {}, []
    # A run that starts in the same second as another has "-1" after its name.
    for file in sorted(place.glob(f"wandb/offline-run-*-{name}*/run-{name}.wandb")):
        for record in records_of(file):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.display_name) == (name, "my-run")
                assert record.run.project == "jaxir"
                configs.append(values_of(record.run.config.update))
            if record.HasField("history"):
                add_row(rows, values_of(record.history.item))
    assert len({config["batch_size"] for config in configs}) == 1
    assert configs[-1]["optimizer"] == plain(AdamW(learning_rate=3e-4, warmup_steps=3))
    assert without_times(rows) == {step: pytest.approx(row) for step, row in expected.items()}

    with sqlite3.connect(place / "jaxir.db") as database:
        stored = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert {shown for shown, _, _ in stored} == {f"my-run-{name}"}
    assert [step for _, step, _ in stored] == list(range(7, 13))  # trackio was added when resuming at step 6
    rows = without_times({step: json.loads(metrics) for _, step, metrics in stored})
    assert rows == {step: pytest.approx(expected[step]) for step in range(7, 13)}


def test_a_resumed_run_sends_wandb_the_rows_that_are_missing(tmp_path, place, monkeypatch, capsys):
    import wandb

    with serving() as server:
        for name, value in {"MODE": "online", "BASE_URL": server.url, "API_KEY": "a" * 40}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        wandb.teardown()  # wandb reads the environment once
        broken = Hooked(pairs(64), lambda at: at == 10 and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "run", data=broken, trackers=["wandb"], **SETTINGS)
        sent = len(server.rows)
        assert run(tmp_path / "run", trackers=["wandb"], **SETTINGS).started_at == 6 < sent
        wandb.teardown()
        assert server.resumed == 1
    assert "warning" not in capsys.readouterr().err.lower()
    rows = {}
    for line in server.rows:
        add_row(rows, json.loads(line))
    assert len(server.rows) == len(rows) == 12  # no row is sent twice
    expected = without_times(expected_rows(tmp_path / "run"))
    assert without_times(rows) == {step: pytest.approx(row) for step, row in expected.items()}


def test_a_tracker_that_fails_costs_one_warning(tmp_path, place, monkeypatch, capsys):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    assert run(tmp_path / "run", **SETTINGS, trackers=["wandb"]).step == 12
    errors = capsys.readouterr().err
    assert errors.count("warning: wandb failed (No API key configured") == errors.count("warning") == 1

"""Incomplete outputs are resumed only with the same inputs and settings."""

import json
from types import SimpleNamespace

import pytest

from jaxir.core.errors import UserError
from jaxir.retrieval.encoding import windowed_file
from jaxir.retrieval.encoding.unfinished import MADE
from jaxir.retrieval.encoding.windowed_file import OutputsReport, summary, write_windows

TEXTS = [SimpleNamespace(id=f"t{i}") for i in range(5)]


def written(output, model: str, made: list[str] | None = None) -> OutputsReport:
    def make(batch, done):
        made.extend(text.id for text in batch)
        return ({"outputs": [model]} for _ in batch)

    return write_windows(output, {"model": model}, TEXTS, make, count=len(TEXTS), what="writing", window=2)


def write(output, model: str) -> list[str]:
    made = []
    written(output, model, made)
    assert not list(output.parent.glob(".*.unfinished"))
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["_id"] for line in lines] == [text.id for text in TEXTS]
    assert {tuple(line["outputs"]) for line in lines} == {(model,)}
    return made


@pytest.mark.parametrize("order", ["its description first", "a window first"])
def test_windows_left_by_a_killed_run_are_not_used_for_other_settings(tmp_path, monkeypatch, order):
    output = tmp_path / "out.jsonl"

    def killed(directory):
        (directory / (MADE if order == "its description first" else "outputs-00001.jsonl")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(windowed_file, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            write(output, "first")
    assert output.exists() and len(list(tmp_path.glob(".out.jsonl.unfinished/outputs-*"))) >= 2
    if order == "a window first":
        with pytest.raises(UserError, match="was started with another model"):
            write(output, "second")
        assert write(output, "first") == []
    else:
        assert write(output, "second") == [text.id for text in TEXTS]


def test_complete_output_is_made_again_only_if_changed(tmp_path):
    output, every = tmp_path / "out.jsonl", [text.id for text in TEXTS]
    assert write(output, "first") == every
    before = output.stat()
    assert write(output, "first") == [] and output.stat() == before
    report = written(output, "first")
    assert report == OutputsReport(was_complete=True)
    assert summary(output, report) == f"{output} is complete, nothing to do"
    # With other settings, a changed file or a damaged description, all windows are made again.
    assert write(output, "second") == every
    assert write(output, "first") == every
    output.write_text(output.read_text().replace("first", "other"))
    assert write(output, "first") == every
    windowed_file._note_of(output).write_text("{")
    assert write(output, "first") == every
    output.unlink()
    assert write(output, "first") == every
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"], "no other files"


def test_output_without_a_window_may_change_settings(tmp_path):
    output = tmp_path / "out.jsonl"

    def fail(batch, done):
        raise UserError("the model gives numbers that are not finite")

    with pytest.raises(UserError, match="not finite"):
        write_windows(output, {"model": "0" * 64}, TEXTS, fail, count=len(TEXTS), what="x", window=2)
    assert write(output, "second") == [text.id for text in TEXTS]


def test_run_killed_before_its_description_only_joins_windows_again(tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    assert len(write(output, "first")) == 5
    real = windowed_file.atomic_file

    def killed(path, *args):
        if path == windowed_file._note_of(output):
            raise KeyboardInterrupt
        return real(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(windowed_file, "atomic_file", killed)
        with pytest.raises(KeyboardInterrupt):
            write(output, "second")
    assert "second" in output.read_text(), "written, but still with the description of the first"
    assert write(output, "second") == []
    assert written(output, "second").was_complete

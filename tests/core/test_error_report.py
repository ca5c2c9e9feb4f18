"""Errors are reported as sentences: whose code is blamed, where tracebacks are kept, errors of the system."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxir.core import error_report
from jaxir.core.errors import UserError
from jaxir.storage.temporary_outputs import temporary_directory


def test_error_is_blamed_on_the_innermost_line_of_user_code():
    def raised(filename, call=None):
        scope = {"call": call}
        exec(compile("def f():\n    if call: call()\n    raise KeyError('x')", filename, "exec"), scope)
        return scope["f"]

    def blame(function):
        with pytest.raises(KeyError) as caught:
            function()
        without_this_file = caught.value.__traceback__.tb_next
        return error_report.blame(caught.value.with_traceback(without_this_file))

    ours = raised(error_report.__file__)
    assert blame(ours) == ("internal", 70)
    assert blame(raised("<string>")) == ("internal", 70)
    assert blame(raised(np.__file__)) == ("internal", 70)
    assert blame(raised("/home/me/objective.py")) == ("/home/me/objective.py:3, in f", 1)
    assert blame(raised("/home/me/objective.py", ours)) == ("/home/me/objective.py:2, in f", 1)
    with pytest.raises(RuntimeError) as caught:
        try:
            raised("/home/me/evaluator.py")()
        except KeyError as error:
            raise RuntimeError("evaluator f") from error
    assert error_report.blame(caught.value) == ("/home/me/evaluator.py:3, in f", 1)


def test_traceback_is_printed_if_no_file_can_be_written(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    memory = jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 128000000000 bytes.")
    sentence, status = error_report.explain(memory)
    assert sentence.startswith("there is not enough memory (INTERNAL: Out of memory") and status == 1
    sentence, status = error_report.explain(RuntimeError("a bug"))
    assert status == 70 and "could not be written" in sentence
    assert sentence.endswith("RuntimeError: a bug\n")


def test_an_error_is_reported_though_no_directory_is_writable(monkeypatch):
    """In a container with a read-only root and no volumes, even `tempfile.gettempdir` fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/nowhere"])
    sentence, status = error_report.explain(RuntimeError("a bug"))
    assert status == 70 and "could not be written" in sentence
    with pytest.raises(UserError, match="set TMPDIR to one, or make /tmp writable"):
        temporary_directory().__enter__()


def test_only_the_newest_tracebacks_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = [error_report.explain(ZeroDivisionError()).sentence for _ in range(error_report.KEPT + 5)]
    assert len(list((tmp_path / "jaxir/tracebacks").iterdir())) == error_report.KEPT
    assert len(set(said)) == len(said)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (lambda: Path("none").read_text(), "none: no such file or directory"),
        (lambda: Path("n" * 300).touch(), f"'{'n' * 200}': file name too long"),
        (lambda: Path("folder").rename("folder/in"), "folder -> folder/in: invalid argument"),
        (lambda: os.fsdecode(b"caf\xe9").encode(), r"'caf\udce9' contains a byte that is not UTF-8"),
    ],
)
def test_system_error_is_reported_with_its_path(error, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises((OSError, UnicodeEncodeError)) as raised:
        error()
    explained = error_report.explain(raised.value)
    assert explained.sentence.startswith(sentence) and explained.status == 1

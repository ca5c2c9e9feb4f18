"""What is read: devices that fail, pipes with and without a writer, and files that are none."""

import os
import threading
import time

import pytest

from jaxir import cli
from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.lines import numbered_lines
from jaxir.storage import open_files
from jaxir.storage.json_files import read_json
from jaxir.storage.open_files import open_to_read


def test_a_pipe_that_nothing_fills_is_an_empty_file(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with open_to_read(tmp_path / "pipe") as file:
        assert file.read() == b""
    monkeypatch.setattr(open_files, "PIPE_SECONDS", 0.2)  # all wait in one place
    with pytest.raises(BadInputError, match="the file is empty"):
        list(numbered_lines(tmp_path / "pipe"))
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(tmp_path / "pipe")


def test_a_pipe_that_something_fills_slowly_is_read_to_its_end_and_again(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def write():
        with (tmp_path / "pipe").open("w") as file:
            for number in range(3):
                time.sleep(0.2)
                print(number, file=file, flush=True)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(2):  # as commands do, which count what they read first
        assert list(numbered_lines(tmp_path / "pipe")) == [(1, b"0"), (2, b"1"), (3, b"2")]
    writer.join()


@pytest.fixture
def folder_and_run(folder):
    answers = [f"q{n} Q0 d{n} 1 0.5 t\n" for n in range(40, 56)]
    (folder / "run").write_text("".join(answers))
    return folder


@pytest.mark.parametrize("kind", ["pipe", "loop", "directory"])
@pytest.mark.parametrize("name", ["run", "qrels/test.tsv"])
def test_a_command_says_which_file_it_cannot_read(folder_and_run, capsys, monkeypatch, kind, name):
    monkeypatch.setattr(open_files, "PIPE_SECONDS", 0.2)
    path = folder_and_run / name
    flags = [f"--run={folder_and_run / 'run'}", f"--qrels={folder_and_run / 'qrels/test.tsv'}"]
    assert cli.main("jaxir.evaluate:evaluate", flags) == 0
    capsys.readouterr()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path.name)
    assert cli.main("jaxir.evaluate:evaluate", flags) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert str(path) in said and "traceback" not in said

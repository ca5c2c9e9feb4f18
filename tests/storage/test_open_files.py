"""Pipes can be read twice; a command names the file that it cannot read."""

import os
import threading
import time

import pytest

from jaxir import cli
from jaxir.data.formats.lines import numbered_lines


def test_slow_pipe_is_read_to_its_end_twice(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def write():
        with (tmp_path / "pipe").open("w") as file:
            for number in range(3):
                time.sleep(0.2)
                print(number, file=file, flush=True)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(2):  # Commands count their input before they read it.
        assert list(numbered_lines(tmp_path / "pipe")) == [(1, b"0"), (2, b"1"), (3, b"2")]
    writer.join()


@pytest.mark.parametrize(("kind", "name"), [("loop", "run"), ("directory", "qrels/test.tsv")])
def test_command_names_the_file_that_it_cannot_read(folder, capsys, kind, name):
    (folder / "run").write_text("".join(f"q{n} Q0 d{n} 1 0.5 t\n" for n in range(40, 56)))
    path = folder / name
    path.unlink()
    path.mkdir() if kind == "directory" else path.symlink_to(path.name)
    flags = [f"--run={folder / 'run'}", f"--qrels={folder / 'qrels/test.tsv'}"]
    assert cli.main("jaxir.evaluate:evaluate", flags) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert str(path) in said and "traceback" not in said

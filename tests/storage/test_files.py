"""Outputs appear only when whole; names read from files never lead out of their directory; pipes."""

import os
import threading
import time

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.formats.lines import numbered_lines
from jaxir.storage.files import atomic_directory, atomic_file, inside, local_path


def test_file_appears_only_when_whole(tmp_path):
    target = tmp_path / "deep" / "run.trec"
    with atomic_file(target) as file:
        file.write("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    with pytest.raises(RuntimeError), atomic_file(target) as file:
        file.write("half")
        raise RuntimeError
    assert target.read_text() == "whole"
    assert [p.name for p in target.parent.iterdir()] == ["run.trec"]


def test_directory_appears_only_when_whole(tmp_path):
    target = tmp_path / "index"
    with pytest.raises(RuntimeError), atomic_directory(target) as aside:
        (aside / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_directory(target) as aside:
        (aside / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(UserError, match="already exists"), atomic_directory(target):
        pass
    with atomic_directory(target, overwrite=True) as aside:
        (aside / "b").write_text("2")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_output_that_appears_meanwhile_is_not_replaced(tmp_path):
    for number, make in enumerate((lambda p: p.touch(), lambda p: p.symlink_to("nowhere"))):
        target = tmp_path / str(number)
        with pytest.raises(UserError, match="another process wrote"), atomic_directory(target) as aside:
            (aside / "a").touch()
            make(target)
        assert target.is_symlink() or target.is_file()
        assert not [p for p in tmp_path.iterdir() if p.name.endswith(".part")]


def test_links_stay_links(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "run.trec").symlink_to("data/run.trec")
    with atomic_file(tmp_path / "run.trec") as file:
        file.write("1")
    (tmp_path / "index").symlink_to("data/index")
    for number in range(2):
        with atomic_directory(tmp_path / "index", overwrite=number == 1) as aside:
            (aside / "a").write_text(str(number))
    assert (tmp_path / "run.trec").is_symlink() and (tmp_path / "index").is_symlink()
    assert (tmp_path / "data" / "run.trec").read_text() == "1"
    assert (tmp_path / "data" / "index" / "a").read_text() == "1"
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["index", "run.trec"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "file") as file:
            file.write("1")
        for overwrite in (False, True):
            with atomic_directory(tmp_path / "directory", overwrite=overwrite):
                pass
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
        assert (tmp_path / "directory").stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def test_names_read_from_files_cannot_lead_outside(tmp_path):
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (tmp_path / "secret").touch()
    (folder / "out").symlink_to("../secret")
    (folder / "part" / "up").symlink_to("../..")
    (folder / "in").symlink_to("part")
    (tmp_path / "alias").symlink_to("model")
    for good in ("weights.bin", "part/weights.bin", "in/weights.bin", "a..b", "absent/file", "part/"):
        for place in (folder, tmp_path / "alias", "gs://bucket/model"):
            assert inside(place, good, said_by="index") == f"{place}/{good}"
    bad = {
        "is not the name of": ("", ".", "..", "/", "a\0b", 3, None),
        "lies outside": ("../model/a", "part/../../secret", "/etc/passwd"),
        "is a link out of": ("out", "part/up/secret"),
    }
    for said, names in bad.items():
        for name in names:
            with pytest.raises(UserError, match=f"^index: .* {said}"):
                inside(folder, name, said_by="index")


def test_bucket_paths_are_refused_where_only_local_ones_work():
    assert str(local_path("/a/b")) == "/a/b"
    for url in ("gs://bucket/index", "s3://bucket/index", "gs:/bucket/index"):
        with pytest.raises(UserError, match=f"{url}: this can be read from local paths only; copy it here"):
            local_path(url)


def test_slow_pipe_is_read_to_its_end_twice(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def write():
        with (tmp_path / "pipe").open("w") as file:
            for number in range(3):
                time.sleep(0.2)
                print(number, file=file, flush=True)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(2):  # a pipe can be read twice: commands count, then read
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

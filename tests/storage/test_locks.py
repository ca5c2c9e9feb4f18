"""One process at a time in a directory, on a disk and in a bucket."""

import errno
import fcntl
import subprocess
import sys

import pytest

from jaxir.core.errors import UserError
from jaxir.storage.locks import descriptors, leave_nothing_empty, locked, writing

HOLDER = """
import sys, time
from pathlib import Path
from jaxir.storage.locks import locked
with locked(Path(sys.argv[1]), "held"):
    print("mine", flush=True)
    time.sleep(60)
"""


WRITER = """
import sys, time
from pathlib import Path
from jaxir.storage.locks import writing
with writing(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_held_against_other_processes_until_they_are_killed(tmp_path):
    place = tmp_path / "a" / "b"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, place], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match="no"), locked(place, "no"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(place, "no"):
        pass
    assert place.is_dir(), "it was there before"


def test_a_directory_made_for_a_lock_goes_if_nothing_came_into_it(tmp_path):
    with (
        locked(tmp_path / "a" / "b", "no"),
        pytest.raises(UserError, match="no"),
        locked(tmp_path / "a/b", "no"),
    ):
        pass
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "a" / "b", "no"):
        (tmp_path / "a" / "b" / "file").touch()
    assert (tmp_path / "a" / "b" / "file").exists()
    with locked(tmp_path / "a" / "b", "held still"):
        pass
    with pytest.raises(UserError, match="file is not a directory"), locked(tmp_path / "a/b/file", "no"):
        pass


def test_a_lock_tells_when_its_directory_is_gone_or_another_and_is_forgotten_when_left(tmp_path):
    place, before = tmp_path / "a", descriptors()
    with locked(place, "no") as lock:
        lock.check()
        assert descriptors() == (*before, lock.descriptor)
        place.rmdir()
        with pytest.raises(UserError, match="a was removed or replaced while this process worked in it"):
            lock.check()
        place.mkdir()
        with pytest.raises(UserError, match="was removed or replaced"):
            lock.check()
    assert descriptors() == before


def test_a_directory_that_its_holder_removes_while_it_is_taken_is_made_again(tmp_path, monkeypatch):
    place, removed, real = tmp_path / "a", [], fcntl.flock

    def flock(descriptor, how):
        if not removed:
            removed.append(place.rmdir())
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(place, "no"):
        assert removed and place.is_dir()
        with pytest.raises(UserError, match=r"^no$"), locked(place, "no"):
            pass
    assert not place.exists()


def test_an_output_is_held_by_the_process_that_writes_it_and_no_longer(tmp_path):
    out = tmp_path / "a" / "out"
    (tmp_path / "link").symlink_to("a")
    with writing(out), writing(tmp_path / "link" / "out"):  # as parts of one command do
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["link"]
    holder = subprocess.Popen([sys.executable, "-c", WRITER, out], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "mine\n"
        for place in (out, tmp_path / "link" / "out"):
            with pytest.raises(UserError, match=f"another process is writing {place}"), writing(place):
                pass
    finally:
        holder.kill()
        holder.communicate()


def test_a_process_that_ends_without_unwinding_leaves_nothing_empty(tmp_path):
    with locked(tmp_path / "a" / "b", "no"), writing(tmp_path / "a" / "b" / "c" / "out"):
        for name in (p for p in (tmp_path / "a" / "b" / "c").iterdir() if p.name.startswith(".")):
            name.unlink()
        leave_nothing_empty()
        assert not list(tmp_path.iterdir())


def test_a_directory_that_the_system_cannot_lock_is_worked_in_with_a_warning(tmp_path, monkeypatch, capsys):
    """As on NFS, which there is none of here."""

    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path, "no") as lock:
        lock.check()
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path} cannot be locked there (no locks available): see to it")

"""One process at a time works in a local directory, and one writes an output."""

import contextlib
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
from jaxir.storage.locks import locked, writing
with {lock}:
    print("mine", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def other_process(lock, place):
    code = HOLDER.format(lock=lock)
    with subprocess.Popen([sys.executable, "-c", code, place], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "mine\n"
            yield
        finally:
            holder.kill()


def assert_locked(place):
    with pytest.raises(UserError, match=r"^no$"), locked(place, "no"):
        pass


def test_directory_is_locked_until_its_process_is_killed(tmp_path):
    place = tmp_path / "a" / "b"
    with other_process("locked(Path(sys.argv[1]), 'held')", place):
        assert_locked(place)
    with locked(place, "no"):
        pass
    assert place.is_dir(), "it existed before"


def test_directory_created_for_a_lock_is_removed_if_it_stays_empty(tmp_path):
    with locked(tmp_path / "a" / "b", "held"):
        assert_locked(tmp_path / "a/b")
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "a" / "b", "no"):
        (tmp_path / "a" / "b" / "file").touch()
    assert (tmp_path / "a" / "b" / "file").exists()
    with pytest.raises(UserError, match="file is not a directory"), locked(tmp_path / "a/b/file", "no"):
        pass


def test_lock_reports_that_its_directory_was_removed_or_replaced(tmp_path):
    # `descriptors` returns the file descriptors that a grid's commands inherit.
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


def test_directory_that_its_last_holder_removes_meanwhile_is_created_again(tmp_path, monkeypatch):
    place, removed, real = tmp_path / "a", [], fcntl.flock

    def flock(descriptor, how):
        if not removed:
            removed.append(place.rmdir())
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(place, "no"):
        assert removed and place.is_dir()
        assert_locked(place)
    assert not place.exists()


def test_output_is_locked_by_the_process_that_writes_it(tmp_path):
    out = tmp_path / "a" / "out"
    (tmp_path / "link").symlink_to("a")
    with writing(out), writing(tmp_path / "link" / "out"):  # parts of one command may lock the same output
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["link"]
    with other_process("writing(Path(sys.argv[1]))", out):
        for place in (out, tmp_path / "link" / "out"):
            with pytest.raises(UserError, match=f"another process is writing {place}"), writing(place):
                pass


def test_process_that_ends_without_unwinding_removes_its_empty_directories(tmp_path):
    with locked(tmp_path / "a" / "b", "no"), writing(tmp_path / "a" / "b" / "c" / "out"):
        for name in (p for p in (tmp_path / "a" / "b" / "c").iterdir() if p.name.startswith(".")):
            name.unlink()
        leave_nothing_empty()
        assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, capsys):
    """Imitates NFS without a lock service, which this machine does not have."""

    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path, "no") as lock:
        lock.check()
    message = capsys.readouterr().err
    assert message.startswith(f"warning: {tmp_path} cannot be locked (no locks available): make sure")

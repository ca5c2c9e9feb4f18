"""One process at a time in a directory, on a disk and in a bucket."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from jaxir.core.errors import UserError
from jaxir.storage import leases
from jaxir.storage.files import path_of
from jaxir.storage.locks import descriptors, leave_nothing_empty, locked, writing
from tests import bucket_server

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


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(leases, "RENEWED_EVERY", 0.1)
    monkeypatch.setattr(leases, "STALE_AFTER", 1.0)
    with bucket_server.serve() as served:
        for name, value in served.environment.items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)
        yield served


def lease() -> leases.Lease:
    return leases.Lease(path_of("gs://bucket/run"), "trains in")


def test_a_lease_that_is_renewed_is_respected_and_goes_with_its_process(bucket, capsys):
    with lease() as held:
        about = json.loads(bucket["run/LEASE"])
        first = bucket.get("run/LEASE").generation
        who = rf"\(.*, process {os.getpid()}, since {about['since'][:9]}"
        with pytest.raises(UserError, match=rf"another process trains in gs://bucket/run {who}"), lease():
            pass
        assert "waiting up to 1 s to see whether that process still lives" in capsys.readouterr().err
        held.check()
        assert bucket.get("run/LEASE").generation > first
    assert not bucket.names()


def test_a_lease_that_a_crash_left_is_taken_over_once(bucket, capsys):
    bucket.put("run/LEASE", json.dumps({"host": "gone", "process": 7, "since": "then"}).encode())
    outcomes = []

    def compete():
        try:
            with lease() as held:
                time.sleep(2.5)
                held.check()
                outcomes.append("held")
        except UserError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=compete) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(o == "held" for o in outcomes) == [False, False, True], outcomes
    assert all(o == "held" or o.startswith("another process trains in gs://bucket/run (") for o in outcomes)
    assert "gs://bucket/run is leased (gone, process 7, since then)" in capsys.readouterr().err
    assert not bucket.names()


def test_lost_lease_ends_the_holder_and_keeps_the_new_lease(bucket):
    with lease() as held:
        bucket.put("run/LEASE", b'{"host": "other", "process": 8, "since": "now"}')
        with pytest.raises(
            UserError, match=r"another process .* now \(other, process 8, since now\); this one ends"
        ):
            while True:
                time.sleep(0.05)
                held.check()
    assert json.loads(bucket["run/LEASE"])["host"] == "other"


def test_a_bucket_that_is_away_for_a_while_costs_no_lease_and_for_long_a_sentence(bucket, monkeypatch):
    monkeypatch.setattr(leases, "ATTEMPTS", 0.3)
    monkeypatch.setattr(leases, "STALE_AFTER", 6.0)
    with lease() as held:
        bucket.admit = lambda name: False
        time.sleep(0.3)
        held.check()
        with pytest.raises(
            UserError, match=r"the lease on gs://bucket/run could not be renewed \(.*\); run the same"
        ):
            while True:
                time.sleep(0.05)
                held.check()
        assert time.monotonic() - held._renewed < leases.STALE_AFTER, "before another may take it over"
        bucket.admit = lambda name: True
        held.check()
    bucket.admit = lambda name: False
    with pytest.raises(UserError, match="gs://bucket/run could not be leased"), lease():
        pass


def test_a_lease_that_another_took_over_unnoticed_is_left_to_it(bucket, monkeypatch):
    monkeypatch.setattr(leases, "RENEWED_EVERY", 60.0)
    with lease():
        bucket.put("run/LEASE", b'{"host": "other"}')
    assert bucket["run/LEASE"] == b'{"host": "other"}'


def test_a_lease_that_is_gone_meanwhile_is_not_held(bucket):
    with lease() as held:
        bucket.put("run/LEASE", b"{}")
        bucket.remove("run/LEASE")
        with pytest.raises(UserError, match=r"now \(it has come and gone\); this one ends"):
            for _ in range(60):
                time.sleep(0.05)
                held.check()
    assert not bucket.names()


def test_a_lease_whose_holder_ends_meanwhile_is_taken_at_once(bucket, monkeypatch):
    monkeypatch.setattr(leases, "STALE_AFTER", 60.0)
    bucket.put("run/LEASE", b"{}")
    said = []

    def told(text, file):
        said.append(text)
        bucket.remove("run/LEASE")

    monkeypatch.setattr(leases, "print", told, raising=False)
    with lease() as held:
        held.check()
    assert len(said) == 1 and "waiting up to 60 s" in said[0]


def test_a_lease_of_which_only_the_answer_was_lost_is_ones_own(bucket, monkeypatch, capsys):
    """The bucket has written it, and says on being asked again that it is there."""
    put, lost = bucket.put, []

    def put_and_lose_the_first_answer(name, content, condition=None):
        code = put(name, content, condition)
        if lost:
            return code
        lost.append(code)
        return 503

    monkeypatch.setattr(bucket, "put", put_and_lose_the_first_answer)
    with lease() as held:
        held.check()
    assert lost == [200] and "is leased" not in capsys.readouterr().err
    assert not bucket.names()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]"])
def test_a_lease_that_says_nothing_is_taken_over_too(bucket, monkeypatch, capsys, content):
    monkeypatch.setattr(leases, "STALE_AFTER", 0.2)
    monkeypatch.setattr(leases, "RENEWED_EVERY", 0.05)
    bucket.put("run/LEASE", content)
    with lease() as held:
        held.check()
    said = capsys.readouterr().err
    assert "gs://bucket/run is leased (?, process ?, since ?)" in said and "is taken over" in said

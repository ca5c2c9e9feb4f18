"""SHA256SUMS: every change to a directory is reported, and unchanged files are read once."""

import os
import shutil
import subprocess
import time

import pytest

from jaxir.core.errors import UserError
from jaxir.storage import checksums
from jaxir.storage.checksums import check, directory_with_checksums


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def written(tmp_path):
    place = tmp_path / "index"
    with directory_with_checksums(place, without=("engine.db",)) as aside:
        (aside / "part").mkdir()
        (aside / "part" / "vectors.npy").write_bytes(bytes(range(256)) * 40)
        (aside / "ids.json").write_text('["a"]')
        (aside / "engine.db").mkdir()
        (aside / "engine.db" / "rows").write_text("changes")
    check(place, without=("engine.db",))
    return place


def bytes_read(monkeypatch):
    """Returns a list to which the names of hashed files are added from now on."""
    names, real = [], checksums.digests

    def noted(directory, wanted):
        names.extend(wanted)
        return real(directory, wanted)

    monkeypatch.setattr(checksums, "digests", noted)
    return names


def flip(path, at=1000):
    time.sleep(0.02)  # file times tick every few milliseconds
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def test_sha256sum_reads_the_file_too(written):
    command = ["sha256sum", "--strict", "-c", "SHA256SUMS"]
    done = subprocess.run(command, cwd=written, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["ids.json: OK", "part/vectors.npy: OK"])


def test_verified_files_are_not_read_again(written, monkeypatch, tmp_path):
    read = bytes_read(monkeypatch)
    check(written, without=("engine.db",))
    assert read == []
    shutil.copytree(written, tmp_path / "copy")
    (tmp_path / "link").symlink_to("copy")
    check(tmp_path / "copy", without=("engine.db",))
    assert sorted(read) == ["ids.json", "part/vectors.npy"]
    read.clear()
    check(tmp_path / "link", without=("engine.db",))
    monkeypatch.chdir(tmp_path / "copy")
    check(checksums.Path(), without=("engine.db",))
    assert read == []


def test_flipped_bit_is_found_though_size_and_modification_time_are_unchanged(written):
    vectors = written / "part" / "vectors.npy"
    before = vectors.stat()
    flip(vectors)
    os.utime(vectors, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"index is damaged: part/vectors.npy has changed since it"):
        check(written, without=("engine.db",))
    flip(vectors)
    check(written, without=("engine.db",))


def truncated(place):
    with (place / "part" / "vectors.npy").open("r+b") as file:
        file.truncate(100)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "part/vectors.npy has changed since it was written"),
        (lambda place: (place / "ids.json").unlink(), "ids.json is missing"),
        (lambda place: (place / "part" / "more.npy").touch(), "part/more.npy was added"),
        (lambda place: (place / "SHA256SUMS").write_text("nothing\n"), "SUMS:1: expected a SHA-256"),
        (lambda place: (place / "SHA256SUMS").write_bytes(b"\xff" * 90), "cannot be read"),
    ],
)
def test_damage_is_reported_with_the_file(written, damage, said):
    damage(written)
    with pytest.raises(UserError, match=f"^{written}.*{said}"):
        check(written, without=("engine.db",))


def test_checksum_check_passes_excluded_hidden_and_unlisted_files(written):
    (written / "engine.db" / "rows").write_text("changed")
    (written / ".nfs0001").touch()
    (written / ".cache").mkdir()
    (written / ".cache" / "file").touch()
    check(written, without=("engine.db",))
    (written / "README").touch()
    check(written, without=("engine.db",), may_grow=True)
    (written / "SHA256SUMS").unlink()
    flip(written / "ids.json", 2)
    check(written)


def test_files_are_verified_each_time_if_the_cache_cannot_be_written(written, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    read = bytes_read(monkeypatch)
    for _ in range(2):
        check(written, without=("engine.db",))
    assert len(read) == 4


def test_file_with_a_known_hash_is_read_once(tmp_path):
    path, read = tmp_path / "weights", []
    path.write_bytes(b"weights")

    def digest(path):
        read.append(path)
        return path.read_text()

    assert checksums.is_intact(path, "weights", digest) and checksums.is_intact(path, "weights", digest)
    assert read == [path]
    assert not checksums.is_intact(path, "others", digest)
    flip(path)
    assert not any(checksums.is_intact(path, "weights", digest) for _ in range(2))
    flip(path)
    assert checksums.is_intact(path, "weights", digest)

"""What was written whole is checked where it is read: whole files, once, and any change is told."""

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
    """Returns a list that the names of hashed files are added to from now on."""
    names, real = [], checksums._digests

    def noted(directory, wanted):
        names.extend(wanted)
        return real(directory, wanted)

    monkeypatch.setattr(checksums, "_digests", noted)
    return names


def flip(path, at=1000):
    time.sleep(0.02)  # so that the times of the file change: they tick every few milliseconds
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def test_coreutils_check_it_too(written):
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=written, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["ids.json: OK", "part/vectors.npy: OK"]
    flip(written / "part" / "vectors.npy")
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=written, capture_output=True).returncode == 1


def test_verified_files_are_not_read_again(written, monkeypatch, tmp_path):
    read = bytes_read(monkeypatch)
    check(written, without=("engine.db",))
    assert read == []
    # A copy is checked once, by whatever name and from wherever it is opened.
    shutil.copytree(written, tmp_path / "copy")
    (tmp_path / "link").symlink_to("copy")
    check(tmp_path / "copy", without=("engine.db",))
    assert sorted(read) == ["ids.json", "part/vectors.npy"]
    read.clear()
    check(tmp_path / "link", without=("engine.db",))
    monkeypatch.chdir(tmp_path / "copy")
    check(checksums.Path(), without=("engine.db",))
    assert read == []


def test_a_flipped_bit_under_old_times_is_told(written):
    """A file of the same size and the time of before has yet another time of change, which nobody can set."""
    vectors = written / "part" / "vectors.npy"
    before = vectors.stat()
    flip(vectors)
    os.utime(vectors, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(UserError, match=r"index is damaged: part/vectors.npy is not what was written"):
            check(written, without=("engine.db",))
    flip(vectors)
    check(written, without=("engine.db",))


def truncated(place):
    with (place / "part" / "vectors.npy").open("r+b") as file:
        file.truncate(100)


def swapped(place):
    (place / "part" / "vectors.npy").write_bytes((place / "ids.json").read_bytes())


def with_other_sums(place):
    """The files are what they were when they were looked at, but not what they are said to be now."""
    checksums.write(place, dict.fromkeys(checksums.read(place), "0" * 64))


def with_a_folder_in_place_of_sums(place):
    (place / "SHA256SUMS").unlink()
    (place / "SHA256SUMS").mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "part/vectors.npy is not what was written"),
        (swapped, "part/vectors.npy is not what was written"),
        (lambda place: (place / "ids.json").unlink(), "ids.json is missing"),
        (lambda place: shutil.rmtree(place / "part"), "part/vectors.npy is missing"),
        (lambda place: (place / "part" / "more.npy").touch(), "part/more.npy was not there"),
        (with_other_sums, "ids.json is not what was written"),
        (lambda place: (place / "SHA256SUMS").write_text("nothing\n"), "is no line of such a file"),
        (lambda place: (place / "SHA256SUMS").write_bytes(b"\xff" * 90), "cannot be read"),
        (with_a_folder_in_place_of_sums, "cannot be read: .*directory"),
        (lambda place: (place / "SHA256SUMS").write_text(f"{'0' * 64}  ../other\n"), "outside"),
        (lambda place: (place / "SHA256SUMS").write_text(f"{'0' * 64}  /etc/passwd\n"), "outside"),
        (lambda place: (place / "SHA256SUMS").write_text(f"{'0' * 64}  ids.json\n"), "was not there"),
    ],
)
def test_damage_costs_a_sentence(written, damage, said):
    damage(written)
    with pytest.raises(UserError, match=said) as told:
        check(written, without=("engine.db",))
    assert str(written) in str(told.value)
    assert "\n" not in str(told.value)


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


def test_a_cache_that_cannot_be_written_costs_time_only(written, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    read = bytes_read(monkeypatch)
    for _ in range(2):
        check(written, without=("engine.db",))
    assert len(read) == 4
    flip(written / "ids.json", 2)
    with pytest.raises(UserError, match="damaged"):
        check(written, without=("engine.db",))


def test_a_new_one_that_takes_its_place_amid_the_check_is_no_damage(written, monkeypatch, tmp_path):
    shutil.rmtree(tmp_path / "cache")
    real = checksums._digests
    state = []

    def meanwhile(directory, names):
        if not state:
            state.append(1)
            with directory_with_checksums(directory, overwrite=True) as aside:
                (aside / "ids.json").write_text('["b"]')
                (aside / "part").mkdir()
                (aside / "part" / "vectors.npy").write_bytes(b"others")
        return real(directory, names)

    monkeypatch.setattr(checksums, "_digests", meanwhile)
    check(written, without=("engine.db",))


def test_a_file_whose_hash_is_known_is_read_once(tmp_path):
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

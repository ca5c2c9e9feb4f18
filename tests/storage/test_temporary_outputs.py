"""Temporary outputs: those of killed processes are removed, those of live ones are kept."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxir.storage.files import atomic_directory, atomic_file
from jaxir.storage.temporary_outputs import ABANDONED_AFTER

WRITER = """
import sys, time
from jaxir.storage.files import atomic_directory, atomic_file
with atomic_directory(sys.argv[1]) as aside, atomic_file(sys.argv[2]) as file:
    (aside / "half").write_text("half")
    file.write("half")
    print("begun", flush=True)
    time.sleep(100)
"""


def hidden(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.name.endswith(".part"))


@pytest.fixture
def writer(tmp_path):
    """Starts a process that writes a directory and a file in `tmp_path` and never ends."""
    started = []

    def start() -> subprocess.Popen:
        places = [str(tmp_path / "index"), str(tmp_path / "run.trec")]
        process = subprocess.Popen([sys.executable, "-c", WRITER, *places], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "begun\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_temporary_outputs_of_killed_writers_are_removed_and_of_live_ones_kept(tmp_path, writer):
    killed = writer()
    left = hidden(tmp_path)
    assert len(left) == 2
    killed.kill()
    killed.wait()
    writer()
    live = hidden(tmp_path)
    assert len(live) == 2 and not set(live) & set(left)
    with atomic_directory(tmp_path / "other") as aside:
        (aside / "a").touch()
    with atomic_file(tmp_path / "file") as file:
        file.write("whole")
    assert hidden(tmp_path) == live


MADE = ("TemporaryDirectory(", "mkdtemp(", "mkstemp(", "NamedTemporaryFile(")
TEMPORARY = """
import time
from jaxir.storage.temporary_outputs import temporary_directory
with temporary_directory() as place:
    (place / "log").write_text("half")
    print(place, flush=True)
    time.sleep(100)
"""


def test_temporary_directory_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", TEMPORARY]
    killed, living = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))
    left, held = (Path(p.stdout.readline().strip()) for p in (killed, living))
    assert left.parent == held.parent == tmp_path and left.stat().st_mode & 0o777 == 0o700
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    again = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    new = Path(again.stdout.readline().strip())
    assert hidden(tmp_path) == sorted([held, new]) and (held / "log").is_file()
    for process in (living, again):
        process.terminate()  # Python does not unwind on SIGTERM
        process.communicate()
    assert len(hidden(tmp_path)) == 2
    subprocess.run([sys.executable, "-c", TEMPORARY.replace("100", "0")], check=True)
    assert hidden(tmp_path) == []


def test_old_leftovers_of_other_machines_are_removed(tmp_path):
    there = [tmp_path / ".index.0123abcd.0123456789ab.part", tmp_path / ".index.0123456789ab.part"]
    foreign = [tmp_path / ".somebody.else.part", tmp_path / ".zip.0123456789ab.partial"]
    for place in there:
        place.mkdir()
        (place / "half").touch()
    for place in foreign:
        place.touch()
    with atomic_file(tmp_path / "file"):
        assert all(p.exists() for p in there)
    past = time.time() - 2 * ABANDONED_AFTER
    for place in (*there, *foreign, there[1] / "half"):
        os.utime(place, (past, past))
    with atomic_file(tmp_path / "file"):
        assert [p.exists() for p in there] == [True, False], "something in the first is new"
    assert all(p.exists() for p in foreign)


def test_no_module_makes_temporary_directories_by_tempfile():
    """Directories made by `tempfile` are never removed if the process is killed."""
    jaxir = Path(__file__).parent.parent.parent / "jaxir"
    found = {str(p.relative_to(jaxir)) for p in jaxir.rglob("*.py") for word in MADE if word in p.read_text()}
    assert found == {"core/error_report.py"}, "it keeps tracebacks"


def test_directory_is_removed_though_a_thread_still_writes_into_it(tmp_path):
    def write(directory: Path) -> None:
        for number in range(3_000):
            with contextlib.suppress(FileNotFoundError):
                (directory / str(number)).touch()

    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "index") as aside:
        thread = threading.Thread(target=write, args=[aside])
        thread.start()
        raise KeyboardInterrupt
    thread.join()
    assert not hidden(tmp_path)

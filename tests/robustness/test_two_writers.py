import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from jaxir import cli
from jaxir.storage.outputs import WHOLE
from tests.command_outputs import OUTPUTS, function_of

pytestmark = pytest.mark.slow
MODEL = f"hf:{Path(__file__).parent.parent / 'golden' / 'bert'}"
HOLDER = """
import sys, time
from pathlib import Path
from jaxir.storage.locks import writing
with writing(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(100)
"""


def hidden(directory: Path) -> list[Path]:
    return [p for p in directory.iterdir() if p.name.startswith(".")]


@contextlib.contextmanager
def working(command: str, *flags: str) -> Iterator[subprocess.Popen]:
    """Runs a command, which waits for input from a pipe."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-m", f"jaxir.{command}", *flags], **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def fed(pipe: Path, process: subprocess.Popen) -> Iterator[IO[str]]:
    """Opens a pipe for writing once a process reads it."""
    while True:
        assert process.poll() is None, process.communicate()
        with contextlib.suppress(OSError):  # opening fails until a process reads the pipe
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        time.sleep(0.01)
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "w") as file:
        yield file


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "out"], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"mine\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("command", "name", "kind"), [(c, n, k) for c, n, k in OUTPUTS if k in WHOLE])
def test_second_writer_is_refused_before_reading(command, name, kind, tmp_path, capsys, holder):
    module, function = function_of(command)
    needed = {
        n: "3" if n == "train" else "absent"
        for n, p in inspect.signature(function).parameters.items()
        if p.default is p.empty and n not in function.outputs
    }
    needed |= {"fuse": {"method": "rrf"}, "export": {"format": "st"}}.get(command, {})
    flags = [f"--{n}={value}" for n, value in needed.items()]
    (tmp_path / "link").symlink_to("out")
    for place in (tmp_path / "out", tmp_path / "link"):
        assert cli.main(module, [*flags, f"--{name}={place}"]) == 1
        assert capsys.readouterr().err == f"error: another process is writing {place}\n"
    assert not (tmp_path / "out").exists()
    holder.kill()
    holder.wait()
    if command != "pydocs":  # pydocs needs no input and would run for a minute
        assert cli.main(module, [*flags, f"--{name}={tmp_path}/out"]) == 1
        assert "another process" not in capsys.readouterr().err
        assert [p.name for p in tmp_path.iterdir()] == ["link"], "nothing is left of the lock"


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory) -> Path:
    """Embeddings of three passages, beside the corpus and an index."""
    folder = tmp_path_factory.mktemp("encoded")
    corpus = [{"_id": f"d{i}", "text": f"passage {i}"} for i in range(3)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in corpus))
    flags = [f"--model={MODEL}", f"--input={folder}/corpus.jsonl", f"--output={folder}/embeddings"]
    assert cli.main("jaxir.encode:encode", flags) == 0
    flags = [f"--embeddings={folder}/embeddings", "--backend=exact", f"--output={folder}/index"]
    assert cli.main("jaxir.index:index", flags) == 0
    return folder / "embeddings"


@pytest.mark.parametrize(
    ("command", "end"), [("index", None), ("index", signal.SIGKILL), ("search", signal.SIGTERM)]
)
def test_a_second_writer_is_refused_at_once_and_succeeds_after_a_kill(
    command, end, tmp_path, embeddings, capsys
):
    corpus, out, pipe = embeddings.with_name("corpus.jsonl"), tmp_path / "new" / "out", tmp_path / "pipe"
    os.mkfifo(pipe)
    content = corpus.read_text()
    if command == "index":
        flags = ["--backend=exact", f"--embeddings={embeddings}"]
        source, waiting = f"--corpus={corpus}", f"--corpus={pipe}"
    else:
        flags = [f"--index={embeddings.with_name('index')}"]
        source, waiting = f"--queries={corpus}", f"--queries={pipe}"
    flags, module = [*flags, f"--output={out}"], f"jaxir.{command}:{command}"
    with working(command, *flags, waiting) as first, fed(pipe, first) as file:
        assert cli.main(module, [*flags, source]) == 1
        assert capsys.readouterr().err == f"error: another process is writing {out}\n"
        assert not out.exists() and hidden(out.parent)
        if end is None:
            file.write(content)
        else:
            first.send_signal(end)
            first.wait()
        file.close()
        said = first.communicate(timeout=60)
    if end is None:
        assert first.returncode == 0, said
        assert out.exists()
    else:
        assert not out.exists()
        assert cli.main(module, [*flags, source]) == 0
    assert [p.name for p in out.parent.iterdir()] == ["out"]

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from tests.training.tiny_run import Hooked, pairs, run

pytestmark = pytest.mark.slow
MODEL = "--model=st:all-MiniLM-L6-v2"


def jaxir(*arguments: str, kilobytes: int | None = None) -> subprocess.CompletedProcess:
    """Runs a command, with files limited to so many kilobytes: writing more fails as on a full disk."""
    limit = f"ulimit -f {kilobytes}; " if kilobytes is not None else ""
    command = ["bash", "-c", f'{limit}exec "$@"', "bash", sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("full")
    texts = [f"text number {i} about the colour {i % 7} and the shape {i % 5}" for i in range(60)]
    for name in ("corpus", "queries"):
        rows = [{"_id": f"{name[0]}{i}", "text": t} for i, t in enumerate(texts)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    embeddings = f"{root}/embeddings"
    encoded = [MODEL, f"--input={root}/corpus.jsonl", f"--output={embeddings}"]
    assert cli.main("jaxir.encode:encode", encoded) == 0
    built = [f"--embeddings={embeddings}", "--backend=exact", f"--output={root}/index"]
    assert cli.main("jaxir.index:index", built) == 0
    return root


@pytest.mark.parametrize(
    "arguments",
    [
        ("jaxir.encode", MODEL, "--input={root}/corpus.jsonl"),
        ("jaxir.index", "--embeddings={root}/embeddings", "--backend=exact"),
        ("jaxir.search", "--index={root}/index", "--queries={root}/queries.jsonl", "--k=60"),
        ("jaxir.export", MODEL, "--format=sentence_transformers"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_file_that_cannot_be_written_is_one_sentence(folder, tmp_path, arguments):
    output = tmp_path / "output"
    flags = [a.format(root=folder) for a in arguments]
    done = jaxir(*flags, f"--output={output}", kilobytes=20)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert any(w in sentence for w in ("too large", "could not", "no space")), sentence
    # Encode resumes in its directory, which must hold only complete shards.
    if arguments[0] == "jaxir.encode":
        assert not list(output.glob("*.npy"))
        assert not list(output.glob(".*.part"))
    else:
        assert not list(tmp_path.iterdir())


def test_full_disk_loses_no_checkpoint(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run_dir, settings = tmp_path / "run", {"steps": 16, "dev": None, "log_every": 16}

    def fill_disk(step):
        if step == 12:
            while not (run_dir / "checkpoints" / "7").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))

    try:
        sentence = r"^checkpoint 14 could not be saved \(file too large\); the last good .*/7; remove"
        with pytest.raises(UserError, match=sentence):
            run(run_dir, data=Hooked(pairs(64), fill_disk), **settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["7"]
    assert run(run_dir, **settings).step == 16

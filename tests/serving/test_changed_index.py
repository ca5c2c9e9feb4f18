"""An index that is changed in place while it is served: its requests fail in a sentence, all else goes on."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.mark.slow
def test_a_served_index_that_is_cut_costs_a_sentence_and_the_others_go_on(tmp_path, world, start_over):
    for name in ("cut", "whole"):
        shutil.copytree(f"{world.root}/dense", tmp_path / name)
    path = tmp_path / "cut/embeddings.npy"
    told = {"detail": "the index was changed on disk; the service must be started again"}
    with start_over(tmp_path, f"--index={path.parent}", f"--index={tmp_path}/whole") as server:

        def asked(*systems: str) -> tuple[int, dict]:
            request = {"queries": ["joined arrays", "w7 w8"], "k": 5, "systems": systems}
            status, _, content = server.request("POST", "/search", request)
            return status, json.loads(content)

        status, before = asked("whole", "cut")
        assert status == 200
        os.truncate(path, 1000)
        for _ in range(3):
            assert asked("cut") == asked("hybrid") == (503, told)
        status, after = asked("whole")
        assert status == 200
        found = [[hits["hits"] for hits in each["systems"][:1]] for each in before["results"]]
        assert [[hits["hits"] for hits in each["systems"]] for each in after["results"]] == found
        assert server.request("GET", "/document/plain")[0] == 200
        assert server.request("GET", "/healthz")[0] == 200

        (tmp_path / "whole/documents-offsets.npy").write_bytes(b"")  # in memory by now
        assert server.request("GET", "/document/plain?index=whole")[0] == 200
        assert server.process.poll() is None
    assert server.process.returncode in (0, None)
    log = server.log.read_text()
    assert f"error: {path} was changed while it was in use" in log and "Traceback" not in log


@pytest.mark.slow
def test_requests_that_wait_together_fail_each_for_its_own_index(tmp_path, world, start_over):
    for name in ("cut", "whole"):
        shutil.copytree(f"{world.root}/dense", tmp_path / name)
    with start_over(tmp_path, f"--index={tmp_path}/cut", f"--index={tmp_path}/whole") as server:
        os.truncate(tmp_path / "cut/embeddings.npy", 1000)

        def status(number: int) -> int:
            system = ("cut", "whole")[number % 2]
            request = {"queries": [f"w{number}"], "k": 5, "systems": [system]}
            return server.request("POST", "/search", request)[0]

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(status, range(64))) == [503, 200] * 32

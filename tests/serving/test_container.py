"""The Containerfile and the Kubernetes manifest, as far as they can be tested without a container engine."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxir.serve import serve
from jaxir.serving.guard import OPEN_PATHS
from tests.serving.conftest import Server

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = (ROOT / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def command_of(instruction: str) -> list[str]:
    return json.loads(re.search(rf"^ *{instruction} (\[.*\])$", FILE, re.MULTILINE)[1])


def test_containerfile_agrees_with_the_project():
    bases = re.findall(r"^FROM python:(\d+)\.(\d+)-slim", FILE, re.MULTILINE)
    assert len(bases) == 2 and len(set(bases)) == 1  # the environment is copied from one to the other
    assert f"Programming Language :: Python :: {'.'.join(bases[0])}" in PROJECT["classifiers"]
    (extra,) = re.findall(r"jaxir-\*\.whl\)\[(\w+)\]", FILE)
    assert extra in PROJECT["optional-dependencies"]
    for name in re.findall(r"^COPY (?!--from)(.*) /build/$", FILE, re.MULTILINE)[0].split():
        assert (ROOT / name).exists() or name == "dist/jaxir-*.whl"
    python, _, module, *flags = command_of("ENTRYPOINT")
    assert (python, module) == ("python", "jaxir.serve")
    parameters = inspect.signature(serve).parameters
    assert flags and all(flag.removeprefix("--").partition("=")[0] in parameters for flag in flags)
    (user,) = re.findall(r"^USER (\d+)$", FILE, re.MULTILINE)
    assert int(user) > 0 and f"--uid {user} " in FILE


def test_probes_call_the_open_path_on_the_right_port():
    (port,) = re.findall(r"^EXPOSE (\d+)$", FILE, re.MULTILINE)
    assert f"--port={port}" in command_of("ENTRYPOINT")
    probe = command_of("CMD")[-1]
    ast.parse(probe)
    assert f"127.0.0.1:{port}/health" in probe and "/health" in OPEN_PATHS
    deployment, service = yaml.safe_load_all((ROOT / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": int(port)}
    assert container["ports"] == [{"containerPort": int(port)}]
    assert service["spec"]["ports"][0]["targetPort"] == int(port)
    names = {arg.removeprefix("--").partition("=")[0] for arg in container["args"]}
    assert names <= set(inspect.signature(serve).parameters)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}


@pytest.mark.slow
def test_server_runs_without_a_home_and_answers_probes(tmp_path, world):
    """The home is in /proc, where nobody can write, not even root."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/proc/home", "PYTHONPATH": str(ROOT)}
    environment |= {"XDG_CACHE_HOME": "/proc/cache", "JAX_PLATFORMS": "cpu", "JAXIR_API_KEY": "secret"}
    entry = [sys.executable, *command_of("ENTRYPOINT")[1:-1], "--port=0", f"--model={world.model}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            entry, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    with process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving on http://0.0.0.0:"), (tmp_path / "log").read_text()
            server = Server(process, line.split()[-1].replace("0.0.0.0", "127.0.0.1"), tmp_path / "log")
            # The request that kubelet sends.
            assert server.request("GET", "/health", host="10.244.1.7:8080")[0] == 200
            assert server.request("GET", "/v1/models")[0] == 401
            status, _, body = server.request(
                "POST", "/embed", {"inputs": "w1 w2"}, authorization="Bearer secret"
            )
            assert status == 200 and len(json.loads(body)[0]) == 32
        finally:
            process.terminate()
    assert "Traceback" not in (tmp_path / "log").read_text()

"""Starts processes that train together."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def launch():
    """Starts one process, or several that JAX connects, each with its own CPU devices; returns them."""
    started = []

    def start(
        *arguments: str, processes: int = 1, devices: int = 4, folders: Sequence[Path] = (), **settings: str
    ) -> list[subprocess.Popen]:
        env = os.environ | {
            "NPROC": "40",  # more threads than devices, because each device may wait in a collective
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
            " --xla_cpu_collective_call_terminate_timeout_seconds=300"  # for a busy machine
            + os.environ["JAXIR_QUICK_XLA_FLAGS"],
            "PYTHONPATH": str(ROOT),
            **settings,
        }
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
        started.extend(
            subprocess.Popen(
                [sys.executable, *arguments],
                env=env | ({"JAX_PROCESS_ID": str(i)} if processes > 1 else {}),
                cwd=folders[i] if folders else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(processes)
        )
        return started[-processes:]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def finish():
    """Waits for processes, and returns the status and standard error of each."""

    def wait(processes: Sequence[subprocess.Popen]) -> list[tuple[int, str]]:
        return [(process.communicate(timeout=400)[1], process.returncode)[::-1] for process in processes]

    return wait

"""How the tests of this folder start processes that train together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def launch():
    """Starts a script in one process or in several that JAX joins, and returns them."""
    started = []

    def start(script: str, *arguments: str, processes: int = 1, **settings: str) -> list[subprocess.Popen]:
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        # On few cores, each device's thread may wait in another collective: there must be more threads.
        env |= {"NPROC": "40", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **settings}
        env["PYTHONPATH"] = str(HERE.parent.parent)
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
        started.extend(
            subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments],
                env=env | ({"JAX_PROCESS_ID": str(i)} if processes > 1 else {}),
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

"""A small training run as one process of several; run by test_processes.py.

usage: life_worker.py --run_dir=DIR --mesh='{"fsdp": 8}' --devices=4 --delay=0.03
       with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID: one of several processes
"""

import os
import sys

if __name__ == "__main__":
    devices = next(a.partition("=")[2] for a in sys.argv if a.startswith("--devices="))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

import json
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))
import tiny_run

from jaxir import cli
from jaxir.training.distributed import maybe_initialize_distributed, together


def main(*, run_dir: str, mesh: str, devices: int, delay: float = 0.0) -> int:
    """Trains a bag of words.

    Args:
      run_dir: the run's directory.
      mesh: sizes of the mesh, in JSON.
      devices: devices of this process.
      delay: seconds that each batch takes.
    """
    maybe_initialize_distributed()
    with together():
        return train(run_dir, json.loads(mesh), delay)


def train(run_dir: str, mesh: dict[str, int], delay: float) -> int:
    slow = tiny_run.Hooked(tiny_run.pairs(64), lambda step: time.sleep(delay))
    result = tiny_run.run(run_dir, data=slow, mesh=mesh)
    return 128 + result.stopped_by if result.stopped_by else 0


if __name__ == "__main__":
    sys.modules["life_worker"] = sys.modules["__main__"]
    raise SystemExit(cli.main("life_worker:main"))

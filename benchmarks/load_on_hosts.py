"""Measures each host's memory while an encoder of 8 billion parameters is loaded onto a mesh of hosts.

    python benchmarks/load_on_hosts.py [--hosts=8] [--layers=36]

Each process stands for a host with one device, and the parameters are split over all devices (FSDP). The
folder has Qwen3-8B's shape, in bfloat16. Its file of weights is sparse, so it takes no disk space. One
process loads at a time, so that this machine only needs the memory of one host.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
GIB = 1 << 30


def write_folder(folder: Path, layers: int) -> int:
    """Writes a folder of transformers with Qwen3-8B's shape and zeros; returns the bytes of its weights."""
    import ml_dtypes
    import numpy as np

    from jaxir.interop.huggingface import hf, hf_config
    from jaxir.interop.model import stored
    from jaxir.models.llama import LlamaConfig

    config = LlamaConfig(
        vocab_size=151_665, embed_dim=4096, mlp_dim=12_288, num_layers=layers, num_heads=32, num_kv_heads=8
    )
    zero = np.zeros((), ml_dtypes.bfloat16)
    shapes = stored.encoder_shapes(config)
    tensors = hf.tensors_of(config, {n: np.broadcast_to(zero, s) for n, s in shapes.items()}, pad_id=0)
    header, end = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [end, end + 2 * x.size]}
        end += 2 * x.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    hf.write_json(folder / "config.json", hf_config.describe(config, 0))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((GOLDEN / "bert" / file).read_bytes())
    return end


def load(folder: Path) -> None:
    """Loads the folder as one of the hosts; prints the bytes of its parameters and its peak memory."""
    import jax
    from flax import nnx

    from jaxir.interop.build import Pretrained
    from jaxir.runtime.distributed import maybe_initialize_distributed, together
    from jaxir.runtime.partitioning import MeshConfig

    maybe_initialize_distributed()
    mesh = MeshConfig(data=1, fsdp=jax.device_count()).build()

    def build(source: str) -> int:
        model = Pretrained(source=f"hf:{source}", dtype="bfloat16", scan_layers=True, lora_rank=16)
        arrays = jax.tree.leaves(nnx.state(model.build(seed=0, partitioner=mesh).model, nnx.Param))
        return sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards)

    with together(), (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        build(str(GOLDEN / "bert"))  # imports all modules before memory is measured
        before, peak, done = memory(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                peak[0] = max(peak[0], memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        held = build(str(folder))
        done.set()
        watcher.join()
        print(json.dumps({"held": held, "most": peak[0] - before}), flush=True)


def memory() -> int:
    """Returns this process's bytes of memory, without mapped files, which the system can drop when needed."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # only passed to the processes of the hosts
    flags = parser.parse_args()
    if flags.folder:
        load(Path(flags.folder))
        return 0
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        size = write_folder(Path(folder), flags.layers)
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        env = os.environ | {"JAXIR_HEARTBEAT_SECONDS": "600"}
        env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(flags.hosts)}
        hosts = [
            subprocess.Popen(
                [sys.executable, __file__, f"--folder={folder}"],
                env=env | {"JAX_PROCESS_ID": str(i)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(flags.hosts)
        ]
        outputs = [host.communicate()[0] for host in hosts]
    if any(host.returncode for host in hosts):
        return 1
    lines = [next(line for line in output.splitlines() if line.startswith("{")) for output in outputs]
    found = [json.loads(line) for line in lines]
    print(f"{size / 2e9:.2f} billion parameters, {size / GIB:.2f} GiB in bfloat16, {flags.hosts} hosts")
    print(f"a host holds at most {max(f['held'] for f in found) / GIB:.2f} GiB")
    print(f"while loading, a host takes at most {max(f['most'] for f in found) / GIB:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

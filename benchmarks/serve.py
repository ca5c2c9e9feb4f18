"""Measures latency and throughput of `python -m jaxir.serve` under concurrent clients.

Two servers search the same exact index with the same model and compiled programs, and return ids and scores:

    jaxir   jaxir.serve: waiting queries are encoded and searched together
    plain   FastAPI as in its tutorial: an endpoint that answers each query by itself, in a thread

If the sidecar is installed, a third server also has a BM25 index. It returns three columns (dense, sparse,
hybrid), titles and highlighted snippets, as the search page requests them. Servers are warm and take turns. A
client sends its next query when it has received the previous answer. No query is repeated.

    python benchmarks/serve.py [--corpus=FILE] [--documents=2000] [--clients=1,16,200] [--seconds=10]
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

SERVE = ("-m", "jaxir.serve", "--port=0", f"--access_log={os.devnull}")


@dataclasses.dataclass
class Load:
    """The measurements of the clients.

    Attributes:
      seconds: the seconds of each successful answer, in any order.
      failures: the error of each request that was not answered with status 200.
      wall: wall seconds of all requests together.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    wall: float = 0.0

    def percentile(self, share: float) -> float:
        """Returns the time in milliseconds that `share` of the answers took at most."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def __str__(self) -> str:
        if not self.seconds:
            return f"no answer; {len(self.failures)} failed"
        return (
            f"{len(self.seconds) / self.wall:8.1f} answers/s   p50 {self.percentile(0.5):8.1f} ms   "
            f"p99 {self.percentile(0.99):8.1f} ms   {len(self.seconds)} answered, {len(self.failures)} failed"
        )


async def hammer(
    url: str, queries: Sequence[str], *, clients: int, seconds: float, options: dict | None = None
) -> Load:
    """Lets clients send one query after the other for some seconds, each on its own connection.

    Args:
      url: the address of the server.
      queries: the queries to send; each client starts at a different one.
      clients: number of clients.
      seconds: time after which clients start no further request.
      options: fields of a request besides its query.
    """
    load = Load()
    host, port = urlsplit(url).hostname, urlsplit(url).port
    started = time.perf_counter()

    async def client(number: int) -> None:
        turn = itertools.count(number * 7919)
        reader, writer = await asyncio.open_connection(host, port)
        with contextlib.closing(writer):
            while time.perf_counter() - started < seconds:
                body = json.dumps(
                    {"queries": [queries[next(turn) % len(queries)]], **(options or {})}
                ).encode()
                begun = time.perf_counter()
                writer.write(
                    f"POST /search HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = next(h for h in head.split("\r\n") if h.startswith("content-length:"))
                answer = await reader.readexactly(int(length.split(":")[1]))
                if head.startswith("http/1.1 200 "):
                    load.seconds.append(time.perf_counter() - begun)
                else:
                    load.failures.append(answer.decode(errors="replace")[:200])

    outcomes = await asyncio.gather(*map(client, range(clients)), return_exceptions=True)
    load.failures += [repr(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
    load.wall = time.perf_counter() - started
    return load


@contextlib.contextmanager
def server(*command: str) -> Iterator[str]:
    """Runs a server that prints `serving on URL` when it is ready; yields the URL."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line.startswith("serving on "):
                    yield line.split()[-1]
                    break
            else:
                raise SystemExit(f"{' '.join(command)} ended before it served")
        finally:
            process.send_signal(signal.SIGTERM)


def serve_plainly(index: str) -> None:
    """Runs the plain server."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    from jaxir.runtime.compile_cache import keep_compiled_programs
    from jaxir.serving import server as serving
    from jaxir.serving.engines import Question
    from jaxir.serving.limits import Limits
    from jaxir.serving.service import Service

    keep_compiled_programs()
    limits = Limits()
    service = Service.open([index], limits=limits)
    (name,) = service.systems
    engine = service.engines[name]
    engine.compile_rest()

    class Request(BaseModel):
        queries: list[str]
        k: int = 10

    app = FastAPI()

    @app.post("/search")
    def search(request: Request) -> list:
        results = []
        for query in request.queries:
            found = engine.answer(engine.read([Question(query, frozenset([name]))]))[0].found[name]
            hits = zip(found.ids[: request.k], found.scores[: request.k], strict=True)
            results.append([{"id": doc_id, "score": score} for doc_id, score in hits])
        return results

    with serving.listen("127.0.0.1", 0) as listener:
        print(f"serving on {serving.url_of(listener)}", flush=True)
        uvicorn.Server(uvicorn.Config(app, http="h11", access_log=False, log_level="error")).run([listener])


def prepare(directory: Path, model: str, corpus: str | None, documents: int) -> tuple[list[str], list[str]]:
    """Makes indexes in `directory`; returns their paths, dense first, and queries."""
    from jaxir import DualEncoder, ExactIndex
    from jaxir.data.formats.sources import read_corpus
    from jaxir.retrieval.indexes.lucene_index import build_lucene_index
    from jaxir.runtime.compile_cache import keep_compiled_programs
    from jaxir.sidecar import environment

    keep_compiled_programs()
    if corpus is not None:
        records = list(read_corpus(corpus))
    else:
        from jaxir.data.sets import package_docs

        records = [entry.document for entry in package_docs.collect()]
    random.Random(0).shuffle(records)
    records = records[:documents]
    with (directory / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for record in records:
            line = {"_id": record.id, "title": record.title, "text": record.text}
            file.write(json.dumps(line) + "\n")
    encoder = DualEncoder.load(model)
    vectors = encoder.encode_passages([record.contents for record in records])
    ids = [record.id for record in records]
    built = ExactIndex.build(
        vectors,
        ids,
        similarity=encoder.similarity_fn_name,
        fingerprint=encoder.fingerprint,
        model=encoder.spec,
    )
    built.save(directory / "dense", corpus=directory / "corpus.jsonl")
    indexes = [str(directory / "dense")]
    if environment.installed() is not None:
        build_lucene_index(directory / "corpus.jsonl", directory / "bm25")
        indexes.append(str(directory / "bm25"))
    # Distinct queries as long as a person's: consecutive words from the documents.
    chooser = random.Random(1)
    queries = []
    for number in range(20_000):
        words = chooser.choice(records).contents.split()
        start = chooser.randrange(max(1, len(words) - 8))
        queries.append(" ".join([*words[start : start + chooser.randint(3, 9)], str(number)])[:200])
    return indexes, queries


def main() -> int:
    """Parses flags, makes an index, starts the servers, queries them in turns, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", default="st:all-MiniLM-L6-v2", help="a jaxir model, or st: and a directory"
    )
    parser.add_argument("--corpus", help="a BEIR corpus.jsonl[.gz] (default: installed Python documentation)")
    parser.add_argument(
        "--documents", type=int, default=2000, help="how many of them, drawn at random (seed 0)"
    )
    parser.add_argument("--clients", default="1,16,200", help="numbers of clients, separated by commas")
    parser.add_argument("--seconds", type=float, default=10, help="how long each number of clients asks")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each server")
    parser.add_argument("--plain", metavar="INDEX", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.plain:
        serve_plainly(flags.plain)
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        indexes, queries = prepare(Path(name), flags.model, flags.corpus, flags.documents)
        dense, ids_only = indexes[0], {"documents": False}
        servers = {
            "jaxir": (
                stack.enter_context(server(*SERVE, f"--index={dense}")),
                ids_only,
            ),
            "plain": (stack.enter_context(server(__file__, f"--plain={dense}")), {}),
        }
        if len(indexes) > 1:
            both = ",".join(indexes)
            url = stack.enter_context(server(*SERVE, f"--index={both}"))
            servers["jaxir, 3 columns"] = (url, {})
        print(f"{flags.documents} documents of {flags.corpus or 'installed Python documentation'}, k = 10")
        for clients in map(int, flags.clients.split(",")):
            for repeat, (system, (url, options)) in itertools.product(range(flags.repeats), servers.items()):
                work = hammer(url, queries, clients=clients, seconds=flags.seconds, options=options)
                load = asyncio.run(work)
                print(f"{clients:4d} clients, repeat {repeat + 1}, {system:16}: {load}", flush=True)
                failed += len(load.failures)
                if load.failures:
                    print(f"     first failure: {load.failures[0]}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

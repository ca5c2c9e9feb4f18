"""Measures seconds per query to expand, rerank and retrieve, and the time and size of the indexes.

The table has the columns and rows of table 3.11 of Chuang 2024: DPR, BM25, GAR (a greedy output), EAR-RI and
EAR-RD (the best of many samples). As in the paper, queries are taken one by one. Every stage runs once on the
same queries before it is timed, so that nothing is compiled meanwhile.

    python benchmarks/expansion.py --dataset=DIR --answers=FILE --generator=MODEL --ri=MODEL --rd=MODEL
                                   --model=DENSE [--split=test] [--queries=20] [--num_outputs=50]
                                   [--max_new_tokens=32] [--backend=exact]

DIR is a BEIR folder. BM25 runs in the sidecar, which is installed on first use. Nothing else is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxir.data.expanded.candidates import expanded
from jaxir.data.formats.answers import read_answers
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.evaluation.answer_match import joined_tokens, tokens_of
from jaxir.models.decoding import Decoding
from jaxir.retrieval.encoding.generator import Generator
from jaxir.retrieval.encoding.query_reranker import QueryReranker
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.searcher import Searcher

DEPTH = 100


def main() -> None:
    """Parses flags, builds the indexes, times the stages and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dataset", required=True, help="a BEIR folder")
    parser.add_argument("--answers", required=True, help="lines of _id and answers")
    parser.add_argument("--generator", required=True, help="of expansions")
    parser.add_argument("--ri", required=True, help="a reranker by gin/ear_ri.gin")
    parser.add_argument("--rd", required=True, help="a reranker by gin/ear_rd.gin")
    parser.add_argument("--model", required=True, help="a dense retriever")
    parser.add_argument("--split", default="test")
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--num_outputs", type=int, default=50)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--backend", default="exact", help="of the index of vectors")
    flags = parser.parse_args()
    folder = BeirFolder(flags.dataset)
    judged = {judgement.query_id for judgement in folder.qrels(flags.split)}
    questions = [query for query in folder.queries() if query.id in judged][: flags.queries]
    known = read_answers(flags.answers)
    with tempfile.TemporaryDirectory() as place:
        corpus, bm25, dense = folder.corpus_path, f"{place}/bm25", f"{place}/dense"
        built = {bm25: command("index", "--backend=lucene", f"--corpus={corpus}", f"--output={bm25}")}
        encode = ["encode", f"--model={flags.model}", f"--input={corpus}", f"--output={place}/vectors"]
        index = [f"--embeddings={place}/vectors", f"--corpus={corpus}", f"--output={dense}"]
        built[dense] = command(*encode) + command("index", f"--backend={flags.backend}", *index)
        sizes = {path: size(path) for path in built}
        by_words, by_vectors = (Searcher.open(load_index(Path(path))) for path in built)
        generator = Generator.load(flags.generator)
        greedy = Decoding(max_new_tokens=flags.max_new_tokens)
        sampled = dataclasses.replace(greedy, num_outputs=flags.num_outputs, temperature=1.0)
        rows = {
            "DPR": (dense, Stages(by_vectors)),
            "BM25": (bm25, Stages(by_words)),
            "GAR": (bm25, Stages(by_words, generator, greedy)),
            "EAR-RI": (bm25, Stages(by_words, generator, sampled, QueryReranker.load(flags.ri))),
            "EAR-RD": (bm25, Stages(by_words, generator, sampled, QueryReranker.load(flags.rd))),
        }
        print(f"{len(questions)} questions, one by one; {flags.num_outputs} samples; seconds, medians\n")
        print("| | build index | expand | rerank | retrieve | index size | top-5 |\n|---|" + "---:|" * 6)
        for name, (path, stages) in rows.items():
            for query in questions:
                stages(query.text)
            stages.seconds.clear()
            right = [holds(stages(query.text)[:5], known[query.id]) for query in questions]
            told = [stages.told("expand"), stages.told("rerank"), stages.told("retrieve")]
            cells = [f"{built[path]:.0f}", *told, f"{sizes[path] / 1e6:.1f} MB"]
            cells += [f"{100 * sum(right) / len(right):.1f}"]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


class Stages:
    """Answers a question by some of the stages, and records the seconds of each stage."""

    def __init__(
        self,
        searcher: Searcher,
        generator: Generator | None = None,
        how: Decoding | None = None,
        reranker: QueryReranker | None = None,
    ):
        self.searcher, self.generator, self.how, self.reranker = searcher, generator, how, reranker
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, question: str) -> list[str]:
        """Returns the texts of the passages found."""
        queries = [question]
        if self.generator is not None:
            outputs = self.timed("expand", lambda: self.generator.generate([question], self.how)[0])
            queries = [expanded(question, output) for output in outputs] or queries
        if self.reranker is not None:
            queries = [self.timed("rerank", lambda: self.best(queries))]
        found = self.timed("retrieve", lambda: self.found(queries[:1], DEPTH))[0]
        return [self.searcher.index.documents[i].contents for i in found]

    def best(self, queries: Sequence[str]) -> str:
        """Returns the query with the highest score; EAR-RD first searches for each query's first passage."""
        passages = [""] * len(queries)
        if self.reranker.reads_passages:
            documents = self.searcher.index.documents
            firsts = [ids[0] if ids else None for ids in self.found(queries, 1)]
            passages = [documents[first].contents if first else "" for first in firsts]
        scores = self.reranker.score(list(zip(queries, passages, strict=True)))
        return queries[int(scores.argmax())]

    def found(self, queries: Sequence[str], depth: int) -> list[list[str]]:
        """Returns the ids of the passages that each query finds."""
        return self.searcher.search(list(queries), depth)[1]

    def timed(self, stage: str, work: Callable[[], object]):
        """Returns the result of `work`, and records how long it took."""
        start = time.perf_counter()
        done = work()
        self.seconds.setdefault(stage, []).append(time.perf_counter() - start)
        return done

    def told(self, stage: str) -> str:
        """Returns the median of a stage's seconds."""
        return f"{statistics.median(self.seconds[stage]):.3f}" if stage in self.seconds else "-"


def holds(passages: Sequence[str], answers: Sequence[str]) -> bool:
    """Returns whether one of the passages contains one of the answers."""
    wanted = [joined_tokens(answer) for answer in answers if tokens_of(answer)]
    return any(answer in joined_tokens(passage) for passage in passages for answer in wanted)


def command(name: str, *flags: str) -> float:
    """Runs a command of jaxir and returns its wall seconds."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", f"jaxir.{name}", *flags], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - start


def size(directory: str) -> int:
    """Returns the bytes of a directory's files."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


if __name__ == "__main__":
    main()

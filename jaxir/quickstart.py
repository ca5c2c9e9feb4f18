"""Command: trains, indexes and searches on real text, by the same commands that a user would run."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.storage.outputs import writes

BASE = "st:sentence-transformers/all-MiniLM-L6-v2"
RECIPE = "gin/quickstart.gin"
METRICS = "P@1 RR@10 nDCG@10 R@100"
QUESTIONS = (
    "find the minimum of a function of several variables",
    "learning rate that warms up and then decays with a cosine",
    "draw a table with borders in the terminal",
    "how different are two probability distributions",
)


@writes(output="quickstart directory")
def quickstart(*, output: str = "quickstart") -> int:
    """Fine-tunes MiniLM on the documentation installed with Python, indexes it, and compares searches.

    The documentation of some packages is never trained on: their summary lines are the queries, the rest of
    each docstring is the passage to be found. Each step prints the command that it runs. A step whose output
    exists is skipped, so an interrupted quickstart continues where it stopped.

    Args:
      output: directory for all outputs.
    """
    from jaxir.experiments.cell_runner import Interrupted
    from jaxir.storage.locks import locked

    out = Path(output)
    try:
        with locked(out, f"another process works in {out}"):
            run_all(out)
    except Interrupted as stop:
        return stop.report(out)
    return 0


def run_all(out: Path) -> None:
    """Runs the steps that are not done yet."""
    docs, before, tuned, after = out / "pydocs", out / "before", out / "model", out / "after"
    started = time.monotonic()
    title(1, "Collect the documentation of the installed Python packages")
    step("pydocs", makes=docs, output=docs)
    title(2, "MiniLM as it comes: encode the packages held out for testing, index them, search")
    make_run(BASE, docs, before)
    title(3, "Fine-tune MiniLM with SamToNe on the other packages")
    step("train", makes=None, gin_file=RECIPE, output_dir=tuned, data=docs)
    title(4, "The fine-tuned model: encode, index, search")
    make_run(tuned, docs, after)
    title(5, "Compare them on the packages that were never trained on")
    runs = {"run": f"{after}.trec", "baseline": f"{before}.trec"}
    step("evaluate", makes=None, **runs, qrels=docs / "qrels" / "test.tsv", metrics=METRICS)
    title(6, "Ask it")
    step("search", makes=None, index=after / "index", questions=QUESTIONS)
    print(f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes. Ask your own questions:")
    print(f"  {sys.executable} -m jaxir.search --index={after / 'index'}")


def make_run(model: str | Path, docs: Path, out: Path) -> None:
    """Encodes and indexes the held-out passages, and searches them for the held-out queries."""
    backend = "scann" if importlib.util.find_spec("scann") else "exact"  # scann is an optional extra
    corpus, queries = docs / "test" / "corpus.jsonl", docs / "test" / "queries.jsonl"
    embeddings, index, run = out / "embeddings", out / "index", out.with_suffix(".trec")
    step("encode", makes=index, model=model, input=corpus, tower="passage", output=embeddings)
    step("index", makes=index, embeddings=embeddings, corpus=corpus, backend=backend, output=index)
    step("search", makes=run, index=index, queries=queries, k=100, output=run)


def title(number: int, what: str) -> None:
    print(f"\n== {number} of 6: {what}", flush=True)


def step(command: str, *, makes: Path | None, questions: tuple[str, ...] = (), **flags: object) -> None:
    """Runs `python -m jaxir.COMMAND` in a process of its own, unless its output exists.

    Args:
      command: the command's name, such as "encode".
      makes: the command's output; None to run the command always.
      questions: lines for the command's standard input.
      **flags: the command's flags.
    """
    from jaxir.experiments.cell_runner import run_attended

    arguments = [f"--{name}={value}" for name, value in flags.items()]
    if makes is not None and makes.exists():
        print(f"({command} is done: {makes})", flush=True)
        return
    shown = " ".join(f'"{a}"' if " " in a else a for a in arguments)
    print(f"$ python -m jaxir.{command} {shown}", flush=True)
    started = time.monotonic()
    typed = "".join(q + "\n" for q in questions)
    if run_attended(["-m", f"jaxir.{command}", *arguments], typed=typed):
        raise UserError(f"the quickstart stopped at jaxir.{command}; run it again to continue from there")
    print(f"  ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    cli.start("jaxir.quickstart:quickstart", "--output=quickstart")

"""The main job on real text, as the commands a user would type: see `quickstart`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from jaxir import cli
from jaxir.errors import UserError

BASE = "st:all-MiniLM-L6-v2"
METRICS = "P@1 RR@10 nDCG@10 R@100"
QUESTIONS = (
    "find the minimum of a function of several variables",
    "learning rate schedule that decays with a cosine",
    "draw a table with borders in the terminal",
    "distance between two probability distributions",
)


def quickstart(*, output: str = "quickstart", gin_file: str = "gin/quickstart.gin") -> None:
    """Fine-tunes MiniLM on the documentation installed with Python, then indexes, searches and compares.

    The documentation of some packages is never trained on: their summary lines are the queries, the rest of each
    docstring is the passage to be found. Each step is a command that you could type; a step whose output is there
    is not run again, so an interrupted quickstart continues where it stopped.

    Args:
      output: directory for everything that is made.
      gin_file: recipe of the fine-tuning.
    """
    out = Path(output)
    docs, tuned = out / "pydocs", out / "model"
    started = time.monotonic()
    step(1, "Collect the documentation of the installed Python packages", "pydocs", docs, f"--output={docs}")
    search_with(2, "as it comes", BASE, docs, out / "before")
    step(
        3,
        "Fine-tune it with SamToNe",
        "train",
        tuned / "COMPLETE",
        f"--gin_file={gin_file}",
        f"--output_dir={tuned}",
    )
    search_with(4, "fine-tuned", str(tuned), docs, out / "after")
    title(5, "Compare on packages that were never trained on")
    compare = [f"--run={out}/after/run.trec", f"--baseline={out}/before/run.trec"]
    run("evaluate", *compare, f"--qrels={docs}/qrels/test.tsv", f"--metrics={METRICS}")
    title(6, "Ask")
    run("search", f"--index={out}/after/index", "--k=5", questions=QUESTIONS)
    minutes = (time.monotonic() - started) / 60
    print(f"\nDone in {minutes:.1f} minutes. Ask more:\n  python -m jaxir.search --index={out}/after/index")


def search_with(number: int, how: str, model: str, docs: Path, out: Path) -> None:
    """Encodes the held-out passages, builds a ScaNN index over them and searches the held-out queries."""
    corpus, queries = docs / "test" / "corpus.jsonl", docs / "test" / "queries.jsonl"
    embeddings, index, found = out / "embeddings", out / "index", out / "run.trec"
    encode = [f"--model={model}", f"--input={corpus}", "--tower=passage", f"--output={embeddings}"]
    step(number, f"Encode the held-out passages with MiniLM {how}, index, search", "encode", index, *encode)
    step(
        None,
        "",
        "index",
        index,
        f"--embeddings={embeddings}",
        f"--corpus={corpus}",
        "--backend=scann",
        f"--output={index}",
    )
    step(
        None, "", "search", found, f"--index={index}", f"--queries={queries}", "--k=100", f"--output={found}"
    )


def step(number: int | None, what: str, command: str, makes: Path, *flags: str) -> None:
    """Runs one command unless what it makes is there already."""
    if number is not None:
        title(number, what)
    if makes.exists():
        print(f"(already done: {makes})", flush=True)
    else:
        run(command, *flags)


def title(number: int, what: str) -> None:
    print(f"\n== {number}/6 {what}", flush=True)


def run(command: str, *flags: str, questions: tuple[str, ...] = ()) -> None:
    """Runs `python -m jaxir.COMMAND` in a process of its own, so that its memory is given back.

    Raises:
      UserError: the command failed; it has said why.
    """
    print(f"$ python -m jaxir.{command} {shlex.join(flags)}", flush=True)
    typed = "".join(q + "\n" for q in questions) or None
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"jaxir.{command}", *flags], input=typed, text=True, check=False
    )
    if done.returncode:
        raise UserError(
            f"the quickstart stopped at jaxir.{command} (exit {done.returncode}); run it again to continue"
        )
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    raise SystemExit(
        cli.main("jaxir.quickstart:quickstart", example="python -m jaxir.quickstart --output=quickstart")
    )

"""Checks whether a change of the code changes the step's program: compares two commits' input to XLA.

    .venv/bin/python benchmarks/same_programs.py --before=COMMIT

Lowers the training step of each shipped recipe for its TPU slice (or this CPU), by the command line, with the
code of COMMIT and with that of this checkout. If the texts of StableHLO are equal, the compiler makes the
same program, so compile time, step time, memory and traffic are equal, too. The exit status is 1 if a text
differs. Run `make plan-tools` first.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIRS = ("--gin_file=gin/pairs.gin", "--gin.BATCH_SIZE=256", "--gin.DATA=none", "--steps=100")
MINED = ("--gin_file=gin/experiments/mined.gin", "--gin.NEGATIVES=2")
BASE, LARGE, XXL = (f"--gin_file=gin/samtone_{size}.gin" for size in ("base", "large", "xxl"))
ADE, CHUNKED = "--gin.SHARING=ade_spl", ("--gin.CHUNKS=4", "--gin.BLOCK_SIZE=64")
RECIPES = {
    "base SDE, v5e:2x2": (BASE,),
    "base SDE, v5e:4x4": (BASE,),
    "base ADE-SPL, v5e:4x4": (BASE, ADE),
    "base SDE, hard negatives, v5e:4x4": (BASE, *MINED),
    "base SDE, caching and blocks, v5e:4x4": (BASE, *CHUNKED),
    "large SDE, v5e:4x4": (LARGE,),
    "large ADE-SPL, v5e:4x4": (LARGE, ADE),
    "xxl SDE, v5p:4x4x4": (XXL,),
    "xxl ADE-SPL, v5p:4x4x4": (XXL, ADE),
    "xxl SDE, v6e:8x8": (XXL,),
    "xxl SDE, TENSOR=4, v5p:4x4x4": (XXL, "--gin.TENSOR=4"),
    "MiniLM, v5e:2x2": PAIRS,
    "MiniLM, hard negatives, v5e:2x2": (*PAIRS, *MINED),
    "MiniLM, caching and blocks, v5e:2x2": (*PAIRS, *CHUNKED),
    "MiniLM, bfloat16, v5e:2x2": (*PAIRS, "--gin.DTYPE='bfloat16'"),
}
# Code that runs a command of jaxir up to the first program that it would compile.
WORKER = """
import os, runpy, sys
import jax

output = sys.argv.pop()

def write(self, *_, **__):
    with open(output, "w") as file:
        file.write(self.as_text())
    os._exit(0)

jax.stages.Lowered.compile = write
runpy.run_module("jaxir.train", run_name="__main__")
"""


def main() -> int:
    """Lowers, compares, prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="COMMIT")
    before = parser.parse_args().before
    with tempfile.TemporaryDirectory(prefix="same-programs-") as name:
        tree = Path(name) / "before"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", tree, before], check=True
        )
        (tree / ".plan-tools").symlink_to(ROOT / ".plan-tools")
        try:
            same = [compare(Path(name), tree, recipe, flags) for recipe, flags in RECIPES.items()]
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    return 0 if all(same) else 1


def compare(place: Path, tree: Path, recipe: str, flags: tuple[str, ...]) -> bool:
    """Lowers a recipe with both commits' code, prints a line, and returns whether the texts are equal."""
    flags = (*flags, f"--plan={recipe.rpartition(' ')[2]}")
    old, new = (lower(place / "program", code, flags) for code in (tree, ROOT))
    lines = old.splitlines(), new.splitlines()
    differing = 0 if old == new else sum(line[0] in "+-" for line in difflib.unified_diff(*lines, n=0))
    verdict = "the same program" if old == new else f"{differing} LINES DIFFER"
    print(f"{recipe:40} {len(lines[1]):6} lines  {verdict}", flush=True)
    return old == new


def lower(output: Path, code: Path, flags: tuple[str, ...]) -> str:
    """Returns the StableHLO of the step that a plan by `code` would compile."""
    output.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(code), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *flags, "--output_dir=none", output],
        cwd=code,
        env=environment,
        capture_output=True,
        text=True,
    )
    if not output.exists():
        raise SystemExit(f"{' '.join(flags)} in {code}:\n{done.stderr[-2000:]}")
    return output.read_text()


if __name__ == "__main__":
    raise SystemExit(main())

"""Checks that a change of the code does not change training: compares two commits' parameters bit by bit.

    .venv/bin/python benchmarks/same_parameters.py --before=COMMIT

Trains small dual encoders (shared and separate towers, BERT and T5) for 20 steps on its own texts, by the
command line, with the code of COMMIT and with the code of this checkout. This checkout then opens both runs.
Training is done on one device, and on eight with hard negatives, gradient caching and a blockwise loss. The
exit status is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxir import DualEncoder
from jaxir.interop.model import stored

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
BACKBONES = {
    "BERT": ("gin/models/minilm.gin", f"st:{GOLDEN / 'bert'}", "gin/runs/few_steps.gin"),
    "T5": ("gin/models/t5_1_1/base.gin", f"hf:{GOLDEN / 't5_1_1'}", "gin/runs/samtone_paper.gin"),
}
TOWERS = {"SDE": (), "ADE-SPL": ("--gin.SHARING=ade_spl", "--gin.PROJECTION=16")}
EIGHT = "8 devices, negatives, caching, blocks"
MESHES = {
    "1 device": (),
    EIGHT: (
        "--gin_file=gin/experiments/mined.gin",
        "--gin.NEGATIVES=2",
        "--gin.CHUNKS=2",
        "--gin.BLOCK_SIZE=4",
        "--gin.FSDP=2",
        "--gin.TENSOR=2",
    ),
}
STEPS = 20


def main() -> int:
    """Trains, compares, prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="COMMIT")
    before = parser.parse_args().before
    with tempfile.TemporaryDirectory(prefix="same-parameters-") as name:
        place = Path(name)
        write_pairs(place / "data")
        tree = place / "before"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", tree, before], check=True
        )
        try:
            same = [compare(place, tree, *names) for names in itertools.product(BACKBONES, TOWERS, MESHES)]
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    return 0 if all(same) else 1


def compare(place: Path, tree: Path, backbone: str, towers: str, mesh: str) -> bool:
    """Trains with the code of both commits, prints a line, and returns whether all bits are equal."""
    runs = [train(place, code, backbone, towers, mesh) for code in (tree, ROOT)]
    old, new = (parameters(run) for run in runs)
    begun = parameters(train(place, ROOT, backbone, towers, mesh, steps=1))
    moved = sum(not np.array_equal(begun[name], x) for name, x in new.items())
    losses = [[r["loss"] for r in map(json.loads, (run / "log.jsonl").open()) if "loss" in r] for run in runs]
    same = old.keys() == new.keys() and all(old[name].tobytes() == x.tobytes() for name, x in new.items())
    same = same and losses[0] == losses[1] and moved == len(new)
    verdict = "the same bits" if same else "NOT THE SAME"
    print(f"{backbone:5} {towers:8} {mesh:40} {moved} of {len(new)} arrays trained  {verdict}", flush=True)
    return same


def train(place: Path, code: Path, backbone: str, towers: str, mesh: str, steps: int = STEPS) -> Path:
    """Trains a model by the command line with the code of a checkout; returns the run's directory."""
    recipe, model, run = BACKBONES[backbone]
    output = place / "-".join(("run", code.name, backbone, towers, "8" if mesh == EIGHT else "1", str(steps)))
    flags = [
        f"--gin_file={recipe}",
        "--gin_file=gin/objectives/samtone.gin",
        f"--gin_file={run}",
        f"--gin.DATA={place / 'data'}",
        f"--gin.MODEL={model}",
        f"--output_dir={output}",
        "--gin.TEMPERATURE=0.05",
        "--gin.SAME_TOWER=both",
        "--gin.DROPOUT=0.1",
        "--gin.DTYPE=float32",
        "--gin.QUERY_LENGTH=16",
        "--gin.PASSAGE_LENGTH=24",
        "--gin.BATCH_SIZE=32",
        f"--gin.STEPS={steps}",
        "--gin.EVAL_EVERY=10",
        "--gin.LOG_EVERY=1",
        *TOWERS[towers],
        *MESHES[mesh],
    ]
    flags += [f"--gin.MINED={place / 'data' / 'mined.jsonl'}"] if mesh == EIGHT else []
    devices = f"--xla_force_host_platform_device_count={8 if mesh == EIGHT else 1}"
    environment = os.environ | {"PYTHONPATH": str(code), "XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxir.train", *flags],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"training with {code} failed:\n{done.stderr}")
    return output


def parameters(run: Path) -> dict[str, np.ndarray]:
    """Returns a run's parameters by name."""
    return stored.params_of(DualEncoder.load(str(run)).model)


def write_pairs(folder: Path) -> None:
    """Writes a BEIR folder of 64 pairs, and a file of the same pairs with two hard negatives each."""
    draw = np.random.default_rng(0)
    words = [f"{a}{b}" for a in "dhlmnrst" for b in "aeio"]

    def text(count: int) -> str:
        return " ".join(draw.choice(words, count))

    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{i}", "title": "", "text": text(12)} for i in range(192)]
    queries = [{"_id": f"q{i}", "text": text(5)} for i in range(64)]
    for name, records in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = [f"q{i}\td{i}\t1\n" for i in range(64)]
    for split in ("train", "dev"):
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))

    def passage(i: int) -> dict[str, str]:
        return {"docid": f"d{i}", "title": "", "text": documents[i]["text"]}

    mined = [
        {
            "query_id": f"q{i}",
            "query": queries[i]["text"],
            "positive_passages": [passage(i)],
            "negative_passages": [passage(64 + i), passage(128 + i)],
        }
        for i in range(64)
    ]
    (folder / "mined.jsonl").write_text("".join(json.dumps(m) + "\n" for m in mined))


if __name__ == "__main__":
    sys.exit(main())

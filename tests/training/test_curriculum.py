"""Runs on expanded documents: the curriculum depends on the step only, also in a resumed run."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxir import fit
from jaxir.core.errors import UserError
from jaxir.data.expanded.expanded_pairs import ExpandedPairs, dev_pairs
from jaxir.data.expanded.selection import Curriculum, Gold
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.interop.build import Pretrained
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.objectives.contrastive import Contrastive
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.step.optimizers import AdamW
from tests.training.saved_run import arrays, log
from tests.training.tiny_run import Hooked, pairs
from tests.training.tiny_run import run as tiny_run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


def write_expansions(folder: Path) -> str:
    """Writes queries of each document: each has more of its first words, which are its gold query's."""
    records = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    outputs = [[" ".join(["what", *r["text"].split()[:n]]) for n in range(5)] for r in records]
    content = [{"_id": r["_id"], "outputs": texts} for r, texts in zip(records, outputs, strict=True)]
    (folder / "expansions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))
    return str(folder / "expansions.jsonl")


def run(folder: Path, run_dir: Path, selection=None) -> list[float]:
    """Trains the golden BERT on one device; returns the loss of each step."""
    pairs, files = (
        BeirPairs(directory=str(folder)),
        {"expansions": write_expansions(folder), "corpus": str(folder)},
    )
    lengths = {"query_max_length": 10, "passage_max_length": 24}
    fit(
        Pretrained(source=f"st:{ROOT / 'tests/golden/bert'}", dropout_rate=0.1, **lengths),
        ExpandedPairs(pairs=pairs, **files, selection=selection or Curriculum(3)),
        dev=dev_pairs(BeirPairs(directory=str(folder), split="dev"), **files),
        objective=Contrastive(loss=functools.partial(in_batch_softmax, temperature=0.1)),
        optimizer=AdamW(learning_rate=1e-3),
        partitioner=MeshConfig().build(jax.devices()[:1]),
        output_dir=run_dir,
        steps=STEPS,
        batch_size=8,
        log_every=1,
        eval_every=STEPS,
        checkpoint_every=3,
    )
    return [row["loss"] for row in log(run_dir) if "loss" in row]


def test_data_get_the_length_of_the_run(tmp_path):
    told = []

    class Told(Hooked):
        def scheduled(self, steps):
            told.append(steps)
            return self

    tiny_run(tmp_path / "run", data=Told(pairs(64), lambda _: None), steps=None, epochs=0.5, dev=None)
    assert told == [4]


@pytest.mark.slow
def test_run_resumes_in_the_same_stage_of_the_curriculum(folder, tmp_path):
    whole = run(folder, tmp_path / "whole")
    assert len(whole) == STEPS
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    shutil.rmtree(resumed / "checkpoints" / str(STEPS))
    (resumed / "COMPLETE").unlink()
    assert run(folder, resumed) == whole
    for name, value in arrays(tmp_path / "whole", STEPS).items():
        assert np.array_equal(arrays(resumed, STEPS)[name], value), name
    with pytest.raises(UserError, match="was trained on other data"):
        run(folder, resumed, Gold())
    # Guard: the selection of queries changes training.
    others = run(folder, tmp_path / "gold", Gold())
    assert np.abs(np.array(others) - whole).max() > 0.01 and whole[-1] < whole[0]

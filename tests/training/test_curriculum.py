"""Runs on expanded documents: the curriculum depends on the step only, also in a resumed run."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.data.expanded.expanded_dataset import ExpandedDataset
from jaxir.data.expanded.expanded_pairs import ExpandedPairs, dev_pairs
from jaxir.data.expanded.selection import Curriculum, Gold
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.interop.build import Pretrained
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.objectives.contrastive import Contrastive
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training import trainer
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.optimizers import AdamW
from tests.training.saved_run import arrays, log
from tests.training.tiny_run import Hooked, pairs
from tests.training.tiny_run import run as tiny_run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


def write_expansions(folder: Path) -> str:
    """Queries of each document: more and more of its first words, which are its gold query's."""
    records = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    outputs = [[" ".join(["what", *r["text"].split()[:n]]) for n in range(5)] for r in records]
    content = [{"_id": r["_id"], "outputs": texts} for r, texts in zip(records, outputs, strict=True)]
    (folder / "expansions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))
    return str(folder / "expansions.jsonl")


def run(folder: Path, run_dir: Path, *, selection=None) -> list[float]:
    """Trains the golden BERT; returns the loss of each step."""
    pairs = BeirPairs(directory=str(folder))
    data = ExpandedPairs(
        pairs=pairs,
        expansions=write_expansions(folder),
        corpus=str(folder),
        selection=selection or Curriculum(3),
    )
    dev = dev_pairs(BeirPairs(directory=str(folder), split="dev"), data.expansions, data.corpus)
    recipe = Recipe(
        model=Pretrained(
            source=f"st:{ROOT / 'tests/golden/bert'}",
            dropout_rate=0.1,
            query_max_length=10,
            passage_max_length=24,
        ),
        objective=Contrastive(loss=functools.partial(in_batch_softmax, temperature=0.1)),
        data=data,
        dev=dev,
        steps=STEPS,
        batch_size=8,
        optimizer=AdamW(learning_rate=1e-3),
        mesh=MeshConfig().build(jax.devices()[:1]),
        log_every=1,
        eval_every=STEPS,
        checkpoint_every=3,
    )
    trainer.train(recipe, run_dir)
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
def test_interrupted_run_resumes_in_the_same_stage_of_the_curriculum(folder, tmp_path, monkeypatch):
    whole = run(folder, tmp_path / "whole")
    assert len(whole) == STEPS
    steps, usual = [], ExpandedDataset._expanded

    def expanded(self, batch, *, step, **how):
        if self._steps is not None:
            steps.append(step)
            if step == 8 and len(steps) > 5:
                raise RuntimeError("the power is gone")
        return usual(self, batch, step=step, **how)

    monkeypatch.setattr(ExpandedDataset, "_expanded", expanded)
    with pytest.raises(RuntimeError, match="the power is gone"):
        run(folder, tmp_path / "broken")
    begun = len([row for row in log(tmp_path / "broken") if "loss" in row])
    monkeypatch.undo()
    assert 3 <= begun <= 8
    run(folder, tmp_path / "broken")
    losses = {row["step"]: row["loss"] for row in log(tmp_path / "broken") if "loss" in row}
    assert [losses[step + 1] for step in range(STEPS)] == whole
    for name, value in arrays(tmp_path / "whole", STEPS).items():
        assert np.array_equal(arrays(tmp_path / "broken", STEPS)[name], value), name
    with pytest.raises(UserError, match="was trained on other data"):
        run(folder, tmp_path / "broken", selection=Gold())
    # Guard: the selection of queries changes training.
    others = run(folder, tmp_path / "gold", selection=Gold())
    assert np.abs(np.array(others) - whole).max() > 0.01 and whole[-1] < whole[0]

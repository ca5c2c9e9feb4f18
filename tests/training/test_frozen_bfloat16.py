"""Frozen parameters that were stored in bfloat16 stay bfloat16 on the device, and a run gives the same."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorstore

from jaxir import Pairs
from jaxir.interop import model_dir
from jaxir.interop.build import Pretrained
from jaxir.interop.weights import stores
from jaxir.objectives.contrastive import Contrastive
from jaxir.training import loop, trainer
from jaxir.training.run.recipe import Recipe
from jaxir.training.step import train_state
from jaxir.training.step.optimizers import AdamW

GOLDEN = Path(__file__).parents[1] / "golden"
FROZEN = ["encoder.embed*", "encoder.layers.0.*"]


@pytest.fixture(scope="module")
def rounded_bert(tmp_path_factory):
    """golden/bert with weights that are bfloat16 numbers, except for one kernel."""
    folder = Path(shutil.copytree(GOLDEN / "bert", tmp_path_factory.mktemp("rounded") / "bert"))
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    rounded = {
        name: x if "layer.0.output" in name else x.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, x in weights.items()
    }
    safetensors.numpy.save_file(rounded, folder / "model.safetensors")
    return folder


def run(folder, output_dir, monkeypatch, steps=4):
    """Trains; returns {name: parameter} of the state after the last step, in the parameters' own types."""
    recipe = Recipe(
        model=Pretrained(
            source=f"hf:{folder}",
            dtype="bfloat16",
            query_max_length=8,
            passage_max_length=8,
            scan_layers=False,
        ),
        objective=Contrastive(),
        data=Pairs([f"text {i}" for i in range(16)], [f"other {i}" for i in range(16)]),
        steps=steps,
        batch_size=8,
        optimizer=AdamW(learning_rate=1e-2),
        checkpoint_every=2,
        frozen=FROZEN,
    )
    seen = {}
    save = loop.train_state.Plan.saved

    def record(plan, state):
        flat = train_state.traverse_util.flatten_dict(state.params)
        seen.update({train_state.name_of(path): x for path, x in flat.items()})
        return save(plan, state)

    with monkeypatch.context() as patch:
        patch.setattr(train_state.Plan, "saved", record)
        trainer.train(recipe, output_dir)
    return seen


@pytest.mark.slow
def test_frozen_bfloat16_weights_change_neither_steps_nor_checkpoints(rounded_bert, tmp_path, monkeypatch):
    halved = run(rounded_bert, tmp_path / "halved", monkeypatch)
    types = {name: x.dtype for name, x in halved.items()}
    assert types["encoder.layers.0.attention.query.kernel"] == jnp.bfloat16
    assert types["encoder.layers.0.wo.kernel"] == jnp.float32, "its values need float32"
    assert types["encoder.layers.1.attention.query.kernel"] == jnp.float32, "it is trained"
    monkeypatch.setattr(train_state, "halve_frozen", lambda model, plan, state: (plan, state))
    run(rounded_bert, tmp_path / "whole", monkeypatch)
    one, other = (model_dir.read(str(tmp_path / name))[0].params for name in ("halved", "whole"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other[name]), err_msg=name)
    for spec in stores.orbax_specs(tmp_path / "halved/checkpoints/4/params").values():
        assert tensorstore.open(spec).result().dtype == np.float32, spec["kvstore"]


@pytest.mark.slow
def test_run_with_halved_weights_resumes_exactly(rounded_bert, tmp_path, monkeypatch):
    run(rounded_bert, tmp_path / "whole", monkeypatch)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/4")
    (tmp_path / "resumed/COMPLETE").unlink()
    run(rounded_bert, tmp_path / "resumed", monkeypatch)
    one, other = (model_dir.read(str(tmp_path / name))[0].params for name in ("resumed", "whole"))
    for name, value in one.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other[name]), err_msg=name)

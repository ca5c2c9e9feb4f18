"""Outlines: models with shapes in place of values, made without a trace."""

import dataclasses
from pathlib import Path

import jax
import pytest
from flax import nnx

from jaxir.interop.huggingface import hf
from jaxir.interop.model.stored import abstract_model
from jaxir.models import layers, outlines
from jaxir.models.adapters import Adapters
from jaxir.models.dual_encoder import DualEncoderConfig

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if (path / "model.safetensors").is_file())
DUAL = [name for name in FAMILIES if not name.startswith(("cross_", "granite", "mlm_", "seq2seq_"))]


def described(module: nnx.Module) -> dict:
    """Returns {path: (shape, type, names of the dimensions)} of each parameter."""
    variables = nnx.to_flat_state(nnx.state(module))
    return {
        path: (p.get_value().shape, p.get_value().dtype, p.get_metadata()["logical_axes"])
        for path, p in variables
    }


@pytest.mark.parametrize(("name", "scan"), [("bert", False), *((name, True) for name in DUAL)])
def test_outline_has_the_parameters_of_a_traced_model(name, scan, monkeypatch):
    backbone = dataclasses.replace(hf.read_architecture(GOLDEN / name).config, scan_layers=scan)
    config = DualEncoderConfig(backbone=backbone, adapters=Adapters(rank=2, alpha=4.0))
    traced = nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0)))
    monkeypatch.setattr(nnx, "eval_shape", None)  # make a fallback to a trace fail
    outline = abstract_model(config)
    assert described(outline) == described(traced)
    assert nnx.split(outline)[0] == nnx.split(traced)[0]


def test_outline_of_a_module_of_flax_is_traced():
    class Mixed(nnx.Module):
        def __init__(self, *, rngs):
            self.norm = layers.LayerNorm(3, epsilon=1e-6, dtype="float32")
            self.dense = nnx.Linear(3, 5, rngs=rngs)

    outline = outlines.outline(lambda rngs: Mixed(rngs=rngs))
    leaves = jax.tree.leaves(nnx.state(outline))
    assert {x.shape for x in leaves} == {(3,), (5,), (3, 5)}
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    assert not outlines.outlining()

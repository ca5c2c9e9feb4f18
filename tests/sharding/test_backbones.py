"""Backbones on a mesh of eight devices have the outputs and gradients of one device."""

import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
WORKER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jaxir.interop import model_dir
from jaxir.runtime.partitioning import MeshConfig

golden = np.load(sys.argv[1] + "/golden.npz")
found = {}
for scan in (False, True):
    results = []
    for mesh in (MeshConfig(data=2, fsdp=2, tensor=2), None):
        partitioner = (mesh or MeshConfig()).build(jax.devices() if mesh else jax.devices()[:1])
        loaded = model_dir.load("hf:" + sys.argv[1], mesh=partitioner, scan_layers=scan, remat=scan)
        graph, state = nnx.split(loaded.model.encoder)
        ids = np.tile(golden["padded_ids"][:, :48], (4, 1))[:8]
        if loaded.tokenizer.pad_swap:
            ids = np.where(ids == 1, 0, np.where(ids == 0, 1, ids))
        weights = np.random.default_rng(0).normal(size=(*ids.shape, 32)).astype(np.float32)

        def total(state, ids):
            hidden = nnx.merge(graph, state)(ids)
            return jnp.where((ids != 0)[..., None], hidden * weights, 0.0).sum(), hidden

        with partitioner():
            gradient = jax.jit(jax.value_and_grad(total, has_aux=True))
            (_, hidden), gradients = gradient(state, jnp.asarray(ids))
        results.append((np.asarray(hidden), jax.tree.map(np.asarray, nnx.to_pure_dict(gradients))))
        split = {str(x.sharding.spec) for x in jax.tree.leaves(state)} if mesh else split
    (hidden, gradients), (alone, own) = results
    real = (ids != 0)[..., None]
    error = lambda a, b: float(np.abs(a - b).max() / np.abs(b).max())
    found[f"scan {scan}"] = {
        "devices": len(jax.devices()),
        "split": sorted(split),
        "outputs": error(np.where(real, hidden, 0), np.where(real, alone, 0)),
        "gradients": max(map(error, jax.tree.leaves(gradients), jax.tree.leaves(own))),
    }
open(sys.argv[2], "w").write(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deberta", "modernbert"])
def test_eight_devices_equal_one(name, tmp_path, launch, finish):
    report = tmp_path / "report.json"
    ended = finish(launch("-c", WORKER, str(GOLDEN / name), str(report), devices=8))
    assert [status for status, _ in ended] == [0], ended
    found = json.loads(report.read_text())
    assert found.keys() == {"scan False", "scan True"}
    for case, result in found.items():
        assert result["devices"] == 8
        assert any("fsdp" in spec and "tensor" in spec for spec in result["split"]), result["split"]
        assert result["outputs"] < 1e-5 and result["gradients"] < 1e-4, (case, result)

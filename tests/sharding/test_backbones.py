"""Backbones, readers and multi-vector encoders compute on eight devices what they compute on one."""

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# Family -> the golden folder whose tokenizer fits its padding id; None: its own.
FAMILIES = {
    "deberta": None,
    "modernbert": None,
    "mpnet": "roberta",
    "nomic_bert": "bert",
    "qwen3": "bert",
    "gemma3": "bert",
    "embedding_gemma2": "bert",
}
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
        width = loaded.model.config.backbone.output_dim
        weights = np.random.default_rng(0).normal(size=(*ids.shape, width)).astype(np.float32)

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
    # The gradient of keys' biases is 0 but for rounding, so its own size is no measure.
    largest = max(float(np.abs(b).max()) for b in jax.tree.leaves(own))
    error = lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-2 * largest))
    found[f"scan {scan}"] = {
        "devices": len(jax.devices()),
        "split": sorted(split),
        "outputs": error(np.where(real, hidden, 0), np.where(real, alone, 0)),
        "gradients": max(map(error, jax.tree.leaves(gradients), jax.tree.leaves(own))),
    }
open(sys.argv[2], "w").write(json.dumps(found))
"""


@pytest.mark.parametrize(("name", "tokenizer"), FAMILIES.items())
def test_backbone_is_the_same_on_eight_devices(name, tokenizer, tmp_path, launch, finish):
    report, folder = tmp_path / "report.json", Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    for file in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(GOLDEN / tokenizer / file, folder / file)
    ended = finish(launch("-c", WORKER, str(folder), str(report), devices=8))
    assert [status for status, _ in ended] == [0], ended
    found = json.loads(report.read_text())
    assert found.keys() == {"scan False", "scan True"}
    for case, result in found.items():
        assert result["devices"] == 8
        assert any("fsdp" in spec and "tensor" in spec for spec in result["split"]), result["split"]
        assert result["outputs"] < 1e-5 and result["gradients"] < 1e-4, (case, result)


@pytest.mark.timeout(600)
def test_reader_is_the_same_on_eight_devices(tmp_path, launch, finish):
    worker = Path(__file__).with_name("reader_worker.py")
    ended = finish(launch(str(worker), str(tmp_path / "report.json"), devices=8))
    assert [status for status, _ in ended] == [0], ended
    reports = json.loads((tmp_path / "report.json").read_text())
    assert len(reports) == 2
    for name, report in reports.items():
        one, eight = report["losses"]
        assert eight == pytest.approx(one, rel=1e-5), name
        assert report["difference"] < 1e-5 < 1e-4 < report["least"], name
        assert report["same"], name


@pytest.mark.timeout(600)
def test_late_interaction_is_the_same_on_eight_devices(tmp_path, launch, finish):
    worker = Path(__file__).with_name("late_worker.py")
    ended = finish(launch(str(worker), str(tmp_path / "report.json"), devices=8))
    assert [status for status, _ in ended] == [0], ended
    reports = json.loads((tmp_path / "report.json").read_text())
    assert len(reports) == 4
    for name, report in reports.items():
        one, eight = report["losses"]
        assert eight == pytest.approx(one, rel=1e-5), name
        assert report["difference"] < 1e-5 * max(1, report["largest"]), name
        assert report["array"] <= 16 * 48 * 8 * 12 / 4, name  # no device holds the similarities of all tokens

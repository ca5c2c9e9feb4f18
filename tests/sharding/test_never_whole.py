"""Making, saving, restoring and reading a split model never holds all of it on a device or in a process."""

import json
import math
import re

import jax
import pytest
from flax import nnx

from jaxir.costs import collectives, hlo
from jaxir.models import layers
from jaxir.models.dual_encoder import DualEncoderModel
from jaxir.runtime.partitioning import MeshConfig
from tests.sharding import memory_worker as worker

pytestmark = pytest.mark.slow

MESH = MeshConfig(data=1, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def reports(tmp_path_factory, launch, finish):
    output = tmp_path_factory.mktemp("memory")
    ended = finish(launch(worker.__file__, str(output), processes=2, devices=2))
    assert [status for status, _ in ended] == [0, 0], ended
    return [json.loads((output / f"memory-{i}.json").read_text()) for i in range(2)]


def test_a_process_holds_writes_and_reads_its_half(reports):
    assert reports[0]["fingerprint"] == reports[1]["fingerprint"] and len(reports[0]["fingerprint"]) == 64
    for report in reports:
        assert report["model"] > 12e6
        assert report["held"] == pytest.approx(report["model"] / 2, rel=0.01)
        assert report["held state"] == pytest.approx(report["state"] / 2, rel=0.01)
        # Compression saves a tenth of random numbers, and all of the new moments, which are zero.
        assert report["written"] < 0.6 * report["model"]
        assert 0.35 * report["model"] < report["restored"] < 0.6 * report["model"]
        assert report["same after restoring"] and report["laid out as planned"]
        # Reading from safetensors.
        assert report["read"] == pytest.approx(report["model"] / 2, rel=0.01)
        assert report["largest read"] < report["model"] / 30
        assert report["as in the file"]
        # Writing a model directory.
        assert 0.3 * report["model"] < report["written of the model"] < 0.6 * report["model"]
        assert report["same after loading"]


def test_new_parameters_are_computed_part_by_part():
    partitioner = MESH.build()
    _, abstract = nnx.split(nnx.eval_shape(lambda: DualEncoderModel(worker.CONFIG, rngs=nnx.Rngs(0))))
    layout = layers.param_shardings(abstract, partitioner)

    def make():
        return nnx.split(DualEncoderModel(worker.CONFIG, rngs=nnx.Rngs(0)))[1]

    text = jax.jit(make, out_shardings=layout).lower().compile().as_text()
    assert not collectives.read(hlo.parse(text), partitioner.mesh)
    shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"(?:f32|u32)\[([\d,]+)\]", text)]
    whole = max(math.prod(x.shape) for x in jax.tree.leaves(nnx.to_pure_dict(abstract)))
    assert max(map(math.prod, shapes)) <= whole / 4

"""A batch split over a mesh trains like the same batch on one device, and activations do not travel.

The worker trains on eight devices, in one process and in two, and reads the compiled programs.
"""

import fcntl
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.runtime.partitioning import MeshConfig, constrain, gather_weight, look_up
from tests.sharding import shard_worker as worker
from tests.sharding.collectives import collectives

# One fixture takes most of the time; the limit is for a busy machine.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
DATA_AXES = {"slices", "data", "fsdp"}
RUNS = [
    (processes, f"{name} on " + " x ".join(f"{axis} {n}" for axis, n in sizes.items()))
    for processes, plan in ((1, worker.ONE_PROCESS), (2, worker.TWO_PROCESSES))
    for name, meshes in plan.items()
    for sizes in meshes
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory, launch, finish):
    """The reports of all processes, by number of processes, and the reference on one device."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one for all of pytest's workers
    output = root / "shards"
    with (root / "shards.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / "done").exists():
            output.mkdir(exist_ok=True)
            for count in (1, 2):
                started = launch(worker.__file__, str(output), processes=count, devices=8 // count)
                ended = finish(started)
                assert [status for status, _ in ended] == [0] * count, ended
            (output / "done").touch()
    found = {
        count: [json.loads((output / f"report-{count}-{i}.json").read_text()) for i in range(count)]
        for count in (1, 2)
    }
    return found, worker.read_reference(output / "reference.npz")


@pytest.mark.parametrize(("processes", "run"), RUNS)
def test_losses_gradients_and_parameters_equal_those_of_one_device(reports, processes, run):
    found, reference = reports
    for report in found[processes]:
        losses = [name for name in report[run] if name != "collectives"]
        assert losses == (list(worker.LOSSES) if run.startswith("bag") else ["samtone both"])
        for loss in losses:
            expected = reference[f"{run.split()[0]} {loss}"]["losses"]
            np.testing.assert_allclose(report[run][loss]["losses"], expected, atol=1e-5)
            assert report[run][loss]["gradients"] < 1e-5
            assert report[run][loss]["params"] < 1e-5


def test_the_reference_trains_every_parameter(reports):
    """All parameters have gradients and change, and all losses differ."""
    _, reference = reports
    for name, run in reference.items():
        for key in (k for k in run if k.startswith("gradients")):
            assert np.abs(run[key]).max() > 1e-4, (name, key)
            path = key.removeprefix("gradients")
            assert np.abs(run["params" + path] - run["start" + path]).max() > 1e-4, (name, key)
    assert len({float(run["losses"][0]) for run in reference.values()}) == len(reference)


def allowed(kind: str, shape: tuple[int, ...], axes: set[str], weights: set, gradients: set) -> bool:
    """Whether a collective over an axis that holds data may carry an array of this shape."""
    rows = {worker.BATCH, worker.BATCH * worker.NEGATIVES}
    embeddings = {(n, worker.DIMENSION) for n in rows} | {(worker.DIMENSION, n) for n in rows}
    keys = {(n, 2) for n in rows} | {(worker.BATCH, worker.NEGATIVES, 2)}
    statistics = {(n,) for n in rows} | {()}
    if kind == "all-gather":
        return shape in embeddings | keys | statistics or (axes == {"fsdp"} and shape in weights)
    if kind in ("all-reduce", "reduce-scatter"):
        return shape in embeddings | statistics | gradients
    # A gradient moves from one order of the devices to another.
    return kind == "collective-permute" and shape in gradients


def shapes_of(name: str, sizes: dict[str, int]) -> tuple[set, set]:
    """Returns the shapes in which weights are gathered and in which gradients (or their means) travel."""
    weights, gradients = set(), set()
    fsdp, tensor = sizes.get("fsdp", 1), sizes.get("tensor", 1)
    for p in jax.tree.leaves(
        nnx.state(nnx.eval_shape(worker.MODELS[name][0])), is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        axes, shape = p.get_metadata()["logical_axes"], p.get_value().shape
        if axes[0] == "layers":
            gradients |= {(shape[0],), *((shape[0], n) for n in shape[1:])}
            gradients |= {(shape[0], n // k) for n in shape[1:] for k in (fsdp, tensor)}
            axes, shape = axes[1:], shape[1:]
        split = [tensor if axis in ("mlp", "heads", "joined_kv", "vocab") else 1 for axis in axes]
        used = tuple(n // k for n, k in zip(shape, split, strict=True))
        rest = tuple(n // (fsdp if axis == "embed" else 1) for n, axis in zip(used, axes, strict=True))
        weights |= {used, used[::-1]}
        gradients |= {used, used[::-1], rest, rest[::-1], *((n,) for n in (*shape, *used, *rest))}
        if axes == ("heads", "relpos_buckets"):
            gradients |= {(used[0], n, n) for n in (worker.QUERY_LENGTH, worker.PASSAGE_LENGTH)}
    return weights, gradients


@pytest.mark.parametrize(("processes", "run"), RUNS)
def test_only_embeddings_weights_and_gradients_travel_between_rows_of_the_batch(reports, processes, run):
    name, _, mesh = run.partition(" on ")
    sizes = {axis: int(n) for axis, n in (part.split() for part in mesh.split(" x "))}
    weights, gradients = shapes_of(name, sizes)
    for report in reports[0][processes]:
        found = [(k, dtype, tuple(s), set(a)) for k, dtype, s, a in report[run]["collectives"]]
        over_data = [c for c in found if c[3] & DATA_AXES]
        wrong = [c for c in over_data if not allowed(c[0], c[2], c[3], weights, gradients)]
        assert not wrong
        lengths = {worker.QUERY_LENGTH, worker.PASSAGE_LENGTH}
        activations = [c for c in over_data if len(c[2]) > 1 and lengths & set(c[2])]
        assert all(c[0] == "all-reduce" and c[2][-1] == c[2][-2] for c in activations)  # of position biases
        if set(sizes) != {"data", "tensor"}:
            assert any(c[0] == "all-gather" and c[2] == (worker.BATCH, worker.DIMENSION) for c in over_data)
        if sizes.get("fsdp", 1) > 1:
            assert any(c[0] == "all-gather" and c[2] in weights and c[3] == {"fsdp"} for c in over_data)


def test_look_up_exchanges_no_activations():
    """A plain lookup would; this also shows that `collectives` detects it."""
    partitioner = MeshConfig(fsdp=4).build()
    at_rest = partitioner.sharding(("vocab", "embed"))
    ids = jax.ShapeDtypeStruct((8, 7), jnp.int32, sharding=partitioner.sharding(("batch", None)))
    shape = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=at_rest)

    def plain(table, ids):
        return jnp.take(gather_weight(table, ("vocab", "embed")), ids, axis=0)

    def ours(table, ids):
        return look_up(table, ids, ("vocab", "embed"), "float32")

    kinds = []
    for find in (plain, ours):

        def loss(table, ids, find=find):
            return (constrain(find(table, ids), ("batch", None, None)) ** 2).sum()

        with partitioner():
            compiled = jax.jit(jax.grad(loss), out_shardings=at_rest).lower(shape, ids).compile()
        kinds.append({(c.kind, c.shape) for c in collectives(compiled.as_text(), partitioner.mesh)})
    assert any(7 in shape for _, shape in kinds[0])
    assert kinds[1] == {("all-gather", (64, 32)), ("reduce-scatter", (64, 8))}

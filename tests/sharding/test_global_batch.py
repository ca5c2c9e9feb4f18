"""A batch split over a mesh trains like the same batch on one device, and activations do not travel."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from tests.sharding import shard_worker as worker

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]  # the limit is for a busy machine
DATA_AXES = {"slices", "data", "fsdp"}


def test_meshes_train_like_one_device_and_exchange_no_activations(tmp_path, launch, finish):
    """Eight devices, in one process and in two."""
    for count, plan in ((1, worker.ONE_PROCESS), (2, worker.TWO_PROCESSES)):
        ended = finish(launch(worker.__file__, str(tmp_path), processes=count, devices=8 // count))
        assert [status for status, _ in ended] == [0] * count, ended
        reference = worker.read_reference(tmp_path / "reference.npz")
        for i in range(count):
            report = json.loads((tmp_path / f"report-{count}-{i}.json").read_text())
            for name, sizes in [(name, sizes) for name, meshes in plan.items() for sizes in meshes]:
                found = report.pop(f"{name} on " + " x ".join(f"{axis} {n}" for axis, n in sizes.items()))
                assert_only_rows_weights_and_gradients_travel(name, sizes, found.pop("collectives"))
                assert_equal_to_one_device(name, found, reference)
            assert not report
    assert_trains_every_parameter(reference)


def assert_equal_to_one_device(name, found, reference):
    assert list(found) == (list(worker.LOSSES) if name == "bag" else ["samtone both"])
    for loss, run in found.items():
        np.testing.assert_allclose(run["losses"], reference[f"{name} {loss}"]["losses"], atol=1e-5)
        assert run["gradients"] < 1e-5
        assert run["params"] < 1e-5


def assert_trains_every_parameter(reference):
    """All parameters have gradients and change, and all losses differ."""
    for name, run in reference.items():
        for key in (k for k in run if k.startswith("gradients")):
            assert np.abs(run[key]).max() > 1e-4, (name, key)
            path = key.removeprefix("gradients")
            assert np.abs(run["params" + path] - run["start" + path]).max() > 1e-4, (name, key)
    assert len({float(run["losses"][0]) for run in reference.values()}) == len(reference)


def allowed(kind: str, shape: tuple, axes: set[str], group: int, weights: set, gradients: set) -> bool:
    """Whether a collective over an axis that holds data may carry an array of this shape."""
    rows = {worker.BATCH, worker.BATCH * worker.NEGATIVES}
    embeddings = {(n, worker.DIMENSION) for n in rows} | {(worker.DIMENSION, n) for n in rows}
    keys = {(n, 2) for n in rows} | {(worker.BATCH, worker.NEGATIVES, 2)}
    statistics = {(n,) for n in rows} | {()}
    if kind == "all-gather":
        return shape in embeddings | keys | statistics or (axes == {"fsdp"} and shape in weights)
    if kind == "all-reduce":
        return shape in embeddings | statistics | gradients
    if kind == "reduce-scatter":
        parts = {(*shape[:i], n // group, *shape[i + 1 :]) for i, n in enumerate(shape)}
        return bool(parts & (embeddings | statistics | gradients))
    # A collective-permute may only move gradients, between two orders of the devices.
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


def assert_only_rows_weights_and_gradients_travel(name, sizes, found):
    weights, gradients = shapes_of(name, sizes)
    over_data = [(kind, tuple(shape), {*axes}, n) for kind, shape, axes, n in found if DATA_AXES & {*axes}]
    assert not [c for c in over_data if not allowed(*c, weights, gradients)]
    lengths = {worker.QUERY_LENGTH, worker.PASSAGE_LENGTH}
    for kind, shape, *_ in over_data:
        if len(shape) > 1 and lengths & set(shape):  # these are gradients of position biases
            assert kind == "all-reduce" and shape[-1] == shape[-2]
    gathered = [(shape, axes) for kind, shape, axes, _ in over_data if kind == "all-gather"]
    assert any(shape == (worker.BATCH, worker.DIMENSION) for shape, _ in gathered)
    if sizes.get("fsdp", 1) > 1:
        assert any(shape in weights and axes == {"fsdp"} for shape, axes in gathered)

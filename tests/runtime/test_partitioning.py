"""The mesh, and the sharding of arrays by its rules."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxir.core.errors import UserError
from jaxir.runtime.partitioning import MeshConfig, _lay_out, constrain, gather_weight, look_up


def test_mesh_covers_all_devices():
    assert MeshConfig().build().mesh.devices.shape == (1, 4, 1, 1)
    assert MeshConfig(fsdp=2).build().mesh.devices.shape == (1, 2, 2, 1)
    assert MeshConfig(slices=2, fsdp=2).build().mesh.devices.shape == (2, 1, 2, 1)
    assert dict(MeshConfig(data=1, tensor=2).build(jax.devices()[:2]).mesh.shape)["tensor"] == 2


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"data": 3}, "must be 4, all devices"),
        ({"data": 0}, "data must be a whole number of at least 1 or -1, not 0"),
        ({"data": -1, "fsdp": -1}, "at most one mesh size may be -1"),
    ],
)
def test_invalid_mesh_sizes_are_refused(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        MeshConfig(**sizes).build()


def test_names_map_to_mesh_axes():
    partitioner = MeshConfig(data=1, fsdp=2, tensor=2).build()
    assert partitioner.spec(("embed", "mlp")) == PartitionSpec("fsdp", "tensor")
    assert partitioner.spec(("batch", None)) == PartitionSpec(("slices", "data", "fsdp"), None)
    assert partitioner.batch_axes() == ("slices", "data", "fsdp")
    assert partitioner.batch_divisor() == 2
    with pytest.raises(ValueError, match="no rule for logical axes"):
        partitioner.spec(("embedd",))
    # Indivisible or repeated dimensions stay whole.
    assert partitioner.spec(("vocab", "embed"), (30_521, 8)) == PartitionSpec(None, "fsdp")
    assert partitioner.spec(("embed", "embed"), (8, 8)) == PartitionSpec("fsdp", None)
    assert partitioner.spec(("embed", "embed"), (7, 8)) == PartitionSpec(None, "fsdp")
    with pytest.raises(ValueError, match="2 dimensions"):
        partitioner.spec(("embed",), (8, 8))


def test_constrain_needs_a_mesh_in_force():
    x = jnp.ones([8, 6])
    assert constrain(x, ("batch", None)) is x
    partitioner = MeshConfig(fsdp=2).build()

    def double(x):
        return constrain(2 * x, ("batch", "length"))

    with partitioner():
        lowered = jax.jit(double).lower(x).compile()
    assert lowered(x).addressable_shards[0].data.shape == (2, 6)
    with partitioner():
        odd = jax.jit(lambda x: constrain(2 * x, ("batch", "length"))).lower(x[:7]).compile()
    assert odd(x[:7]).addressable_shards[0].data.shape == (7, 6)


@pytest.mark.parametrize(("heads", "own"), [(8, 6), (6, 24)])
def test_heads_are_split_only_between_heads(heads, own):
    x = jnp.ones([2, 24])
    with MeshConfig(tensor=4).build()():
        split = jax.jit(lambda x: constrain(2 * x, (None, "heads"), (2, heads))).lower(x).compile()
    assert split(x).addressable_shards[0].data.shape == (2, own)


def test_mesh_is_in_force_in_its_own_thread_only():
    x = jnp.ones([8, 6])
    with MeshConfig(fsdp=2).build()(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(constrain, x, ("batch", None)).result() is x


def test_rules_of_a_run_precede_the_defaults():
    rules = [("mlp", ["fsdp", "tensor"]), ("mlp", "tensor"), ("position", "fsdp")]
    partitioner = MeshConfig(data=1, fsdp=2, tensor=2, rules=rules).build()
    assert partitioner.spec(("position", "mlp"), (6, 8)) == PartitionSpec(None, ("fsdp", "tensor"))
    assert partitioner.spec(("position", "mlp"), (6, 6)) == PartitionSpec("fsdp", "tensor")
    assert partitioner.spec(("vocab", "embed"), (6, 6)) == PartitionSpec("tensor", "fsdp")
    with pytest.raises(UserError, match="unknown mesh axis 'model'"):
        MeshConfig(rules=[("mlp", "model")]).build()


class FakeTpu(NamedTuple):
    """The attributes of a TPU that laying out devices reads."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0
    process_index: int = 0


def test_only_the_slices_axis_crosses_slices():
    tpus = [FakeTpu(4 * s + i, s, (i % 2, i // 2, 0)) for s in range(2) for i in range(4)]
    grid = _lay_out(tpus[::-1], (2, 2, 2, 1))
    assert [{d.slice_index for d in part.flat} for part in grid] == [{0}, {1}]
    assert grid.shape == (2, 2, 2, 1) and len({d.id for d in grid.flat}) == 8
    with pytest.raises(UserError, match="are in 2 slices; set slices to 2, not 1"):
        _lay_out(tpus, (1, 4, 2, 1))


def test_gathered_weight_is_whole_and_its_gradient_is_sharded():
    partitioner = MeshConfig(data=1, fsdp=2, tensor=2).build()
    at_rest = partitioner.sharding(("embed", "mlp"))
    x = jax.device_put(jnp.arange(32.0).reshape(4, 8), at_rest)

    def square(x):
        used = gather_weight(x, ("embed", "mlp"))
        return (used**2).sum(), used

    with partitioner():
        gradient, used = jax.jit(jax.grad(square, has_aux=True))(x)
    assert used.addressable_shards[0].data.shape == (4, 4)
    assert gradient.addressable_shards[0].data.shape == (2, 4)
    assert (gradient == 2 * x).all() and (used == x).all()


@pytest.mark.parametrize(
    ("sizes", "rules", "rows"),
    [
        ({"data": 1, "fsdp": 2, "tensor": 2}, (), 4),
        ({"data": 1, "fsdp": 2, "tensor": 2}, [("vocab", "fsdp"), ("embed", "tensor")], 4),
        ({"data": 1, "fsdp": 2, "tensor": 2}, [("embed", ["tensor", "fsdp"])], 4),  # both split "embed"
        ({"data": 2, "fsdp": 2}, (), 4),  # "data" splits the rows, not the table
        ({"data": 2, "fsdp": 2}, (), 3),  # not divisible by four devices
    ],
)
def test_lookup_on_a_mesh_equals_one_device(sizes, rules, rows):
    partitioner = MeshConfig(**sizes, rules=rules).build()
    table = jnp.sin(jnp.arange(48.0)).reshape(6, 8)
    ids = jnp.array([[0, 5, 5], [1, 0, 5], [3, 3, 3], [2, 0, 1]])[:rows]

    def loss(table):
        return (look_up(table, ids, ("vocab", "embed"), "float32") ** 3).sum()

    expected = jax.grad(loss)(table)
    split = jax.device_put(table, partitioner.sharding(("vocab", "embed")))
    with partitioner():
        found = jax.jit(jax.grad(loss))(split)
    assert found.sharding == split.sharding and jnp.abs(expected).max() > 0.1
    assert jnp.allclose(found, expected, atol=1e-6)
    assert jnp.isnan(look_up(table, jnp.array([[6]]), ("vocab", "embed"), "float32")).all()


def test_lookup_gradients_are_summed_in_float32_and_exchanged_in_bfloat16():
    partitioner = MeshConfig(data=4).build()
    table, ids = jnp.zeros((6, 8)), jnp.zeros((4, 300), jnp.int32)  # bfloat16 cannot count beyond 256 by ones

    def loss(table):
        return look_up(table, ids, ("vocab", "embed"), "bfloat16").astype(jnp.float32).sum()

    with partitioner():
        lowered = jax.jit(jax.grad(loss)).lower(table)
    assert re.findall(r"all_reduce.*?-> tensor<6x8x(\w+)>", lowered.as_text(), re.S) == ["bf16"]
    found = lowered.compile()(table)
    assert found.dtype == jnp.float32
    assert (found[0] == 1200).all() and (found[1:] == 0).all()

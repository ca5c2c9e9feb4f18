"""The mesh, and where its rules put arrays."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxir.errors import UserError
from jaxir.partitioning import MeshConfig, constrain


def test_a_mesh_covers_all_devices():
    assert dict(MeshConfig().build().mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 1}
    assert dict(MeshConfig(fsdp=2).build().mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1}
    assert dict(MeshConfig(data=1, tensor=2).build(jax.devices()[:2]).mesh.shape)["tensor"] == 2


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"data": 3}, "does not cover 4 devices"),
        ({"fsdp": 3}, "does not cover 4 devices"),
        ({"data": 0}, "must be positive"),
        ({"data": -1, "fsdp": -1}, "at most one -1"),
    ],
)
def test_sizes_that_do_not_fit_cost_a_sentence(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        MeshConfig(**sizes).build()


def test_names_map_to_mesh_axes_and_unknown_ones_are_an_error():
    partitioner = MeshConfig(data=1, fsdp=2, tensor=2).build()
    assert partitioner.spec(("embed", "mlp")) == PartitionSpec("fsdp", "tensor")
    assert partitioner.spec(("batch", None)) == PartitionSpec(("data", "fsdp"), None)
    assert partitioner.batch_divisor() == 2
    with pytest.raises(ValueError, match="no rule for logical axes"):
        partitioner.spec(("embedd",))


def test_a_dimension_that_does_not_divide_or_repeats_is_left_whole():
    partitioner = MeshConfig(data=1, fsdp=2, tensor=2).build()
    assert partitioner.spec(("vocab", "embed"), (30_521, 8)) == PartitionSpec(None, "fsdp")
    assert partitioner.spec(("embed", "embed"), (8, 8)) == PartitionSpec("fsdp", None)
    assert partitioner.spec(("embed", "embed"), (7, 8)) == PartitionSpec(None, "fsdp")
    with pytest.raises(ValueError, match=r"shorter|longer"):
        partitioner.spec(("embed",), (8, 8))


def test_constrain_lays_activations_out_only_where_a_mesh_is_in_force():
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


def test_a_mesh_is_in_force_in_its_own_thread_only():
    x = jnp.ones([8, 6])
    with MeshConfig(fsdp=2).build()(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(constrain, x, ("batch", None)).result() is x

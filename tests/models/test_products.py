"""Products of bfloat16 numbers: the form for CPUs equals the plain one, forward and backward."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxir.models import layers
from jaxir.runtime import cpu
from jaxir.runtime.partitioning import MeshConfig

BF16 = jnp.bfloat16
ROUNDING = 2.0**-8  # relative error of rounding to bfloat16


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch):
    monkeypatch.setattr(cpu, "has_quick_bfloat16", lambda: True)


def mesh(devices: int):
    return MeshConfig(data=devices).build(jax.devices()[:devices])


def traced(context, function, *args):
    """Lowers under `context`; a new lambda, because JAX would not trace the same function again."""
    with context:
        return jax.jit(lambda *a: function(*a)).lower(*args)


def types_of_products(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"dot_general.*: \(tensor<\S*x(\w+)>, tensor<\S*x\w+>\) -> tensor<\S*x(\w+)>", text)
    assert found
    return found


def with_gradients(x, kernel, bias, slope):
    output, back = jax.vjp(layers.affine, x, kernel, bias)
    return output, back(slope)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("inside", "outside"), [(24, 40), (40, 24), (24, 1)], ids=["wider", "narrower", "one number"]
)
def test_output_and_gradients_equal_float32_rounded_once(inside, outside, bias):
    rng = np.random.default_rng(0)
    x, kernel, slope = (
        jnp.asarray(rng.normal(size=s), BF16) for s in ((56, inside), (inside, outside), (56, outside))
    )
    b = jnp.asarray(rng.normal(size=outside), BF16) if bias else None
    lowered = traced(mesh(1)(), with_gradients, x, kernel, b, slope)
    assert types_of_products(lowered.as_text()) == [("bf16", "f32")] * 3
    output, gradients = lowered.compile()(x, kernel, b, slope)
    exact = [np.asarray(a, np.float64) for a in (x, kernel, slope)]
    expected = [exact[0] @ exact[1], exact[2] @ exact[1].T, exact[0].T @ exact[2]]
    if bias:
        expected[0] += np.asarray(b, np.float64)
        expected.append(exact[2].sum(0))
    found = [output, *(g for g in gradients if g is not None)]
    assert len(found) == len(expected)
    for value, right in zip(found, expected, strict=True):
        assert value.dtype == BF16 and np.abs(right).max() > 1
        np.testing.assert_allclose(np.asarray(value, np.float64), right, rtol=ROUNDING, atol=1e-5)


def test_other_types_and_contexts_have_the_plain_form():
    x, kernel = jnp.ones((4, 8), BF16), jnp.ones((8, 4), BF16)

    def types(context, dtype=BF16):
        text = traced(context, layers.affine, x.astype(dtype), kernel.astype(dtype), None).as_text()
        return types_of_products(text)

    assert types(contextlib.nullcontext()) == [("bf16", "bf16")]
    assert types(mesh(1)()) == [("bf16", "f32")]
    assert types(mesh(1)(), jnp.float32) == [("f32", "f32")]
    assert types(contextlib.nullcontext()) == [("bf16", "bf16")]
    stand_in = dataclasses.replace(mesh(1), stand_in=True)
    assert types(stand_in()) == [("bf16", "bf16")]


@pytest.mark.parametrize(("inside", "outside"), [(24, 40), (40, 24)])
def test_no_activation_travels_between_devices(inside, outside):
    devices, rng = mesh(4), np.random.default_rng(0)
    specs = PartitionSpec("data"), PartitionSpec(), PartitionSpec(), PartitionSpec("data")
    shapes = (64, inside), (inside, outside), (outside,), (64, outside)
    values = [jnp.asarray(rng.normal(size=shape), BF16) for shape in shapes]
    spread = [jax.device_put(v, NamedSharding(devices.mesh, s)) for v, s in zip(values, specs, strict=True)]
    compiled = traced(devices(), with_gradients, *spread).compile()
    kinds = set(re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", compiled.as_text()))
    assert kinds == {"all-reduce"}, kinds
    one = traced(mesh(1)(), with_gradients, *values).compile()(*values)
    for found, expected in zip(jax.tree.leaves(compiled(*spread)), jax.tree.leaves(one), strict=True):
        found, expected = (np.asarray(a, np.float64) for a in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=2 * ROUNDING, atol=1e-4)

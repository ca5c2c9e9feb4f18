"""Compiled blockwise losses: no [B, B] array, only shards travel round the ring."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxir.costs import work
from jaxir.losses.gist import gist
from jaxir.losses.guide import Guide
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.nt_xent import nt_xent
from jaxir.losses.pair import pair
from jaxir.losses.samtone import samtone
from jaxir.runtime.partitioning import MeshConfig
from tests.losses.loss_cases import KEYS

# B^2, B * D, their shards and tiles all have different sizes.
DEVICES, LARGE, BLOCK, DIM = 4, 2048, 32, 16
LOSSES = {
    "in_batch": (in_batch_softmax, {}),
    "samtone": (samtone, {"same_tower": "both"}),
    "pair": (pair, {}),
    "guided": (gist, {}),
}


@functools.cache
def compile_step(name, *, batch=LARGE, block_size=BLOCK, partitioner=None):
    """Compiles loss and gradient of `batch` rows with keys and one hard negative each."""
    loss, settings = LOSSES[name]
    sharding = partitioner and partitioner.sharding(("batch",))

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    embeddings = array(batch, DIM), array(batch, DIM), array(batch, 1, DIM)
    key = array(batch, 2, dtype=jnp.int32)
    keys = key, key, array(batch, 1, 2, dtype=jnp.int32)
    guide = Guide(*embeddings, array(batch)) if name == "guided" else None

    def step(embeddings, keys, guide):
        names = dict(zip(KEYS, keys, strict=True))
        return loss(*embeddings, **names, **settings, guide=guide, block_size=block_size)

    with partitioner() if partitioner else contextlib.nullcontext():
        return jax.jit(jax.value_and_grad(step, has_aux=True)).lower(embeddings, keys, guide).compile()


def arrays_in(text: str) -> list[tuple[str, int]]:
    """Type and number of elements of every array in lines of HLO."""
    found = re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\]", text)
    return [(kind, math.prod(int(n) for n in shape.split(",") if n)) for kind, shape in found]


@pytest.mark.parametrize("name", LOSSES)
def test_no_array_is_larger_than_the_embeddings(name):
    text = compile_step(name).as_text()
    assert max(size for _, size in arrays_in(text)) <= LARGE * DIM < LARGE**2 / 100
    assert {kind for kind, _ in arrays_in(text) if kind.startswith(("f", "bf"))} == {"f32"}
    dense = compile_step("in_batch", block_size=None).as_text()
    assert max(size for _, size in arrays_in(dense)) >= LARGE**2


@pytest.mark.parametrize("block_size", [None, BLOCK])
@pytest.mark.parametrize("name", LOSSES)
def test_a_million_pairs_can_be_traced(name, block_size):
    """B^2 exceeds int32 from B = 46,341 on."""
    loss, settings = LOSSES[name]
    rows = jax.ShapeDtypeStruct((2**20, DIM), jnp.float32)
    key = jax.ShapeDtypeStruct((2**20, 2), jnp.int32)

    def step(query, passage, query_key, passage_key):
        keys = {"query_key": query_key, "passage_key": passage_key}
        return loss(query, passage, **keys, **settings, block_size=block_size)

    (value, _), gradient = jax.eval_shape(jax.value_and_grad(step, has_aux=True), rows, rows, key, key)
    assert value.shape == () and gradient.shape == rows.shape


def precisions(jaxpr):
    """The precision of every product, in the order of the program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"][0].name.lower()
        for inner in work._subprograms(equation.params):
            yield from precisions(inner)


@pytest.mark.parametrize("precision", ["highest", "high", "default"])
@pytest.mark.parametrize("loss", [samtone, pair, in_batch_softmax, nt_xent])
def test_gradient_precision_does_not_change_that_of_logits(loss, precision):
    """CPUs compute in one precision, so the test reads the precision from the program."""
    rows = jax.ShapeDtypeStruct((8, DIM), jnp.float32)

    def step(query, passage):
        return loss(query, passage, block_size=4, gradient_precision=precision)

    gradient = jax.value_and_grad(step, argnums=(0, 1), has_aux=True)
    found = list(precisions(jax.make_jaxpr(gradient)(rows, rows).jaxpr))
    sweeps = {in_batch_softmax: 1, samtone: 2, pair: 2, nt_xent: 3}[loss]
    # Forward: logits. Backward, for each group of columns: logits again and two products with their slopes.
    assert found == ["highest"] * sweeps + ["highest", precision, precision] * sweeps


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}])
def test_ring_sends_nothing_but_shards(sizes):
    partitioner = MeshConfig(**sizes).build(jax.devices()[:DEVICES])
    shard = LARGE // partitioner.batch_divisor() * DIM
    text = compile_step("samtone", partitioner=partitioner).as_text()
    assert max(size for _, size in arrays_in(text)) <= shard
    sent: dict[str, list[int]] = {}
    for line in text.splitlines():
        found = re.search(r"= (.*?) (all-\w+|reduce-scatter|collective-\w+|ragged-\S+)(-start)?\(", line)
        if found:
            sent.setdefault(found[2], []).append(max(size for _, size in arrays_in(found[1])))
    assert sent.keys() == {"collective-permute", "all-reduce"}
    assert max(sent["collective-permute"]) == shard
    assert max(sent["all-reduce"]) <= DIM
    # There are four groups of columns: passages, hard negatives, two towers. The vectors of each go round in
    # the forward and the backward pass; gradients go round in the backward pass and return to their device.
    assert sent["collective-permute"].count(shard) == 4 * (1 + 1 + 1 + 1)

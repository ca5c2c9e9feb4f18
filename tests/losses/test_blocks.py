"""The blockwise losses equal the dense ones: loss, metrics and gradients, on one device and on rings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.in_batch import in_batch_softmax
from jaxir.runtime.partitioning import MeshConfig
from tests.losses.loss_cases import EMBEDDINGS, KEYS, VARIANTS, make_case, to_jax

BATCH, WIDTH, NEGATIVES = 12, 8, 3
MESHES = {
    "data2_fsdp2": {"data": 2, "fsdp": 2},
    "data2_tensor2": {"data": 2, "tensor": 2},
    "data3": {"data": 3},
}


def embeddings_and_keys(batch=BATCH, keys=True, negatives=NEGATIVES):
    """A batch in which any two rows may be duplicates, and any hard negative may be any row's passage."""
    case = make_case(batch=batch, width=WIDTH, negatives=negatives, keys=False)
    if keys:
        rng = np.random.default_rng(5)
        case["query_key"] = rng.integers(0, 4, (batch, 2))
        case["passage_key"] = rng.integers(0, 4, (batch, 2))
        if negatives:
            case["negative_key"] = rng.integers(0, 4, (batch, negatives, 2))
    arrays = to_jax(case)
    return ({k: arrays[k] for k in group if k in arrays} for group in (EMBEDDINGS, KEYS))


def value_and_grad(variant, block_size):
    loss, _, settings = VARIANTS[variant]

    def step(embeddings, keys):
        return loss(**embeddings, **keys, **settings, temperature=0.05, block_size=block_size)

    return jax.value_and_grad(step, has_aux=True)


def assert_equal(got, expected):
    (value, metrics), gradients = got
    (expected_value, expected_metrics), expected_gradients = expected
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert metrics.keys() == expected_metrics.keys()
    for name, metric in metrics.items():
        assert metric.dtype == jnp.float32
        np.testing.assert_allclose(metric, expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, gradient in gradients.items():
        largest = np.abs(expected_gradients[name]).max()
        assert largest > 1e-2
        np.testing.assert_allclose(
            gradient, expected_gradients[name], rtol=0, atol=1e-5 * largest, err_msg=name
        )


@pytest.fixture(scope="module")
def dense():
    """The dense loss, gradient and metrics of a batch, each computed once."""

    @functools.cache
    def compute(variant, keys=True, negatives=NEGATIVES):
        return value_and_grad(variant, None)(*embeddings_and_keys(keys=keys, negatives=negatives))

    return compute


@pytest.mark.parametrize("block_size", [4, 5, 100])
@pytest.mark.parametrize(("keys", "negatives"), [(False, 0), (True, NEGATIVES)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_dense(variant, keys, negatives, block_size, dense):
    """Blocks of 4 divide the 12 rows; blocks of 5 do not, so the last two overlap; 100 makes one tile."""
    batch = embeddings_and_keys(keys=keys, negatives=negatives)
    assert_equal(value_and_grad(variant, block_size)(*batch), dense(variant, keys, negatives))


@pytest.mark.parametrize(
    ("variant", "mesh"),
    [
        *(("samtone_both", mesh) for mesh in MESHES),
        *((variant, "data3") for variant in ("in_batch_one_way", "pair")),
    ],
)
def test_ring_equals_one_device(variant, mesh, dense):
    """Blocks of 2 divide shards of 6 and 4 rows, but not shards of 3."""
    sizes = MESHES[mesh]
    partitioner = MeshConfig(**sizes).build(jax.devices()[: np.prod(list(sizes.values()))])
    batch = jax.device_put(tuple(embeddings_and_keys()), partitioner.sharding(("batch",)))
    with partitioner():
        compiled = jax.jit(value_and_grad(variant, 2)).lower(*batch).compile()
    assert "collective-permute" in compiled.as_text()
    assert_equal(compiled(*batch), dense(variant))


def test_hard_negatives_without_keys_are_never_masked():
    embeddings, keys = embeddings_and_keys()
    del keys["negative_key"]
    others = keys | {"negative_key": jnp.full((BATCH, NEGATIVES, 2), -1)}

    @jax.jit
    def of(embeddings, keys, others):
        without = [in_batch_softmax(**embeddings, **keys, block_size=size)[0] for size in (None, 4)]
        return without, in_batch_softmax(**embeddings, **others)[0]

    values, expected = of(embeddings, keys, others)
    np.testing.assert_allclose(values, [expected] * 2, rtol=1e-5)


def test_a_batch_that_devices_do_not_divide_is_replicated():
    partitioner = MeshConfig().build(jax.devices()[:4])
    batch = tuple(embeddings_and_keys(batch=6))
    with partitioner():
        got = jax.jit(value_and_grad("samtone_both", 4))(*batch)
    assert_equal(got, jax.jit(value_and_grad("samtone_both", None))(*batch))


def test_gradient_of_a_nearly_learnt_pair_is_exact():
    """The softmax is 1 - 1e-3 and the logits are near 100, where float32 rounds a log-sum-exp to 4e-6."""
    query = passage = np.sqrt(0.91) * np.eye(9)[0] + 0.3 * np.eye(9)[1:]
    x = query @ passage.T / 0.01
    softmax = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    exact = (softmax + softmax.T - 2 * np.eye(8)).T @ query / (8 * 0.01)
    assert 1e-4 < 1 - softmax[0, 0] < 1e-2

    def gradient(block_size):
        of = functools.partial(in_batch_softmax, block_size=block_size)
        arrays = jnp.asarray(query, jnp.float32), jnp.asarray(passage, jnp.float32)
        return jax.jit(jax.grad(of, argnums=1, has_aux=True))(*arrays)[0]

    for block_size in (None, 3):
        error = np.abs(gradient(block_size) - exact).max() / np.abs(exact).max()
        assert error < 2e-3

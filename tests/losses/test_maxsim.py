"""MaxSim by blocks has the values and gradients of the computation with all similarities at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import losses
from jaxir.core.errors import UserError
from jaxir.costs import work

QUERIES, PASSAGES, DIMENSION = (5, 4), (7, 300), 6  # the index of the best of 300 tokens needs two bytes
EMPTY, WITHOUT_TOKENS = 2, 3  # the number of a passage, and of a query, that have no tokens


def dense(queries, query_mask, passages, passage_mask):
    found = jnp.einsum("qsd,ptd->qpst", queries, passages, precision="highest")
    largest = jnp.where(passage_mask[None, :, None], found, -1e30).max(-1)
    scores = jnp.where(query_mask[:, None], largest, 0.0).sum(-1)
    return jnp.where(passage_mask.any(1)[None], scores, -1e9)


def batch(seed: int, passages=PASSAGES):
    rng = np.random.default_rng(seed)

    def side(shape, empty):
        mask = rng.random(shape) < 0.7  # the mask also has holes, as a list of words to skip makes them
        mask[empty] = False
        return rng.normal(size=(*shape, DIMENSION)).astype(np.float32), mask

    return *side(QUERIES, WITHOUT_TOKENS), *side(passages, EMPTY)


@pytest.mark.parametrize("block_size", [None, 1, 3])
@pytest.mark.parametrize("passages", [PASSAGES, (7, 5)])
def test_values_and_gradients_equal_the_dense_computation(block_size, passages):
    queries, query_mask, vectors, passage_mask = map(jnp.asarray, batch(0, passages))
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(QUERIES[0], passages[0])), jnp.float32)

    @jax.jit
    def both(queries, vectors):
        def blockwise(q, p):
            return losses.maxsim(q, query_mask, p, passage_mask, block_size=block_size)

        found, back = jax.vjp(blockwise, queries, vectors)
        expected, back_dense = jax.vjp(lambda q, p: dense(q, query_mask, p, passage_mask), queries, vectors)
        plain = blockwise(queries, vectors)
        return (found, *back(cotangent)), (expected, *back_dense(cotangent)), plain

    found, expected, plain = both(queries, vectors)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(plain, found[0])
    assert (found[0][:, EMPTY] == -1e9).all()
    assert (np.delete(found[0][WITHOUT_TOKENS], EMPTY) == 0).all()
    assert not np.asarray(found[2])[~np.asarray(passage_mask)].any()


def test_no_array_holds_all_similarities_and_no_product_is_repeated():
    shapes = [((64, 8, 16), (64, 8)), ((64, 12, 16), (64, 12))]
    sides = [(jax.ShapeDtypeStruct(v, jnp.float32), jax.ShapeDtypeStruct(m, bool)) for v, m in shapes]
    arrays = [array for side in sides for array in side]

    def step(function):
        def gradients(queries, query_mask, passages, passage_mask):
            def total(q, p):
                return function(q, query_mask, p, passage_mask).sum()

            return jax.grad(total, (0, 1))(queries, passages)

        return gradients

    def blockwise(*args):
        return losses.maxsim(*args, block_size=4)

    largest = [work.largest(jax.make_jaxpr(step(f))(*arrays).jaxpr).shape for f in (dense, blockwise)]
    assert np.prod(largest[0]) == 64 * 64 * 8 * 12
    assert np.prod(largest[1]) <= 64 * 4 * 8 * 12
    flops = [work.traced(step(f), *arrays).flops for f in (dense, blockwise)]
    assert flops[1] == flops[0]


def test_large_batches_take_little_of_the_dense_memory_and_no_more_products():
    """4,096 pairs of 32 + 180 tokens of 128 dimensions: docs/results/large_batches.md#maxsim."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for length in (32, 180)
        for shape, dtype in (((4096, length, 128), jnp.float32), ((4096, length), bool))
    ]

    def account(function):
        def loss(*arrays):
            scores = function(*arrays)
            return (jax.nn.logsumexp(scores, axis=1) - scores.diagonal()).mean()

        step = jax.value_and_grad(loss, argnums=(0, 2))
        memory = jax.jit(step).lower(*shapes).compile().memory_analysis()
        return memory.temp_size_in_bytes, work.traced(step, *shapes).flops

    (of_dense, dense_flops), (of_blocks, flops) = account(dense), account(losses.maxsim)
    assert of_blocks <= of_dense / 20 and flops <= 1.3 * dense_flops


def test_nothing_to_compare_gives_empty_scores():
    queries, query_mask, vectors, passage_mask = map(jnp.asarray, batch(0))
    assert losses.maxsim(queries[:0], query_mask[:0], vectors, passage_mask).shape == (0, PASSAGES[0])
    assert losses.maxsim(queries, query_mask, vectors[:0], passage_mask[:0]).shape == (QUERIES[0], 0)
    found = losses.maxsim(queries, query_mask, vectors[:, :0], passage_mask[:, :0])
    assert (np.asarray(found) == -1e9).all()


def test_block_size_must_be_positive():
    with pytest.raises(UserError, match="block_size"):
        losses.maxsim(*map(jnp.asarray, batch(0)), block_size=0)

"""XTR's scores by blocks and over a ring equal the computation with all similarities at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import losses
from jaxir.core.errors import UserError
from jaxir.costs import work
from jaxir.losses import TokenVectors
from jaxir.runtime.partitioning import MeshConfig

ROWS, EMPTY, WITHOUT_TOKENS = 8, 2, 3  # rows; a passage without tokens, a query without tokens
SETTINGS = {"bidirectional": False, "temperature": 0.1, "xtr_k": 9}


def dense(queries, query_mask, passages, passage_mask, *, top_k):
    found = jnp.einsum("qsd,ptd->qspt", queries, passages, precision="highest")
    found = jnp.where(passage_mask[None, None], found, -jnp.inf)
    flat = found.reshape(*found.shape[:2], -1)
    last = jnp.sort(flat, axis=2)[..., -min(top_k, flat.shape[2])]
    kept = (found >= last[..., None, None]) & passage_mask[None, None] & query_mask[:, :, None, None]
    retrieved = kept.any(3)
    largest = jnp.where(retrieved, jnp.where(kept, found, -1e30).max(3), 0.0)
    scores = largest.sum(1) / jnp.maximum(retrieved.sum(1, dtype=jnp.float32), 1.0)
    return jnp.where(passage_mask.any(1)[None], scores, -1e9)


def side(seed: int, *shape: int) -> TokenVectors:
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.7
    mask[..., 0] = True
    return TokenVectors(rng.normal(size=(*shape, 6)).astype(np.float32), mask)


def sides() -> list[jax.Array]:
    query, passage = side(0, ROWS, 4), side(1, ROWS, 7)
    query.mask[WITHOUT_TOKENS], passage.mask[EMPTY] = False, False
    return [jnp.asarray(x) for x in (*query[:2], *passage[:2])]


@pytest.mark.parametrize("mesh", [None, {"data": 4}, {"data": 2, "fsdp": 2}])
@pytest.mark.parametrize(("top_k", "block_size"), [(1, None), (5, 1), (12, 3), (500, 1)])
def test_values_and_gradients_equal_the_dense_computation(top_k, block_size, mesh):
    queries, query_mask, passages, passage_mask = sides()
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, ROWS)), jnp.float32)

    def both(function, queries, passages, **how):
        def scores(q, p):
            return function(q, query_mask, p, passage_mask, top_k=top_k, **how)

        found, back = jax.vjp(scores, queries, passages)
        return found, *back(cotangent)

    expected = both(dense, queries, passages)
    partitioner = MeshConfig(**mesh or {}).build(jax.devices()[: 4 if mesh else 1])
    placed = jax.device_put((queries, passages), partitioner.sharding(("batch",)))
    with partitioner():
        found = jax.jit(lambda q, p: both(losses.xtr, q, p, block_size=block_size))(*placed)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert (found[0][:, EMPTY] == -1e9).all() and not found[1][WITHOUT_TOKENS].any()


def test_tokens_of_hard_negatives_compete_with_those_of_passages():
    query, passage, negatives = side(0, ROWS, 4), side(1, ROWS, 5), side(2, ROWS, 2, 7)
    lists = passage.before(negatives)
    scores = dense(*map(jnp.asarray, (*query[:2], *lists.flat[:2])), top_k=SETTINGS["xtr_k"])
    scores = scores.reshape(ROWS, ROWS, 3) / SETTINGS["temperature"]
    own = jnp.arange(ROWS)
    expected = (jax.nn.logsumexp(scores, axis=(1, 2)) - scores[own, own, 0]).mean()
    batch = jax.tree.map(jnp.asarray, (query, passage, negatives))
    found, metrics = losses.in_batch_softmax(*batch, **SETTINGS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["positive_similarity"], scores[own, own, 0].mean() * 0.1, rtol=1e-5)


def test_no_array_holds_all_similarities_and_no_product_is_repeated():
    rows = 64
    shapes = [((rows, 8, 16), jnp.float32), ((rows, 8), bool), ((rows, 12, 16), jnp.float32)]
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in [*shapes, ((rows, 12), bool)]]

    def step(function, **how):
        def gradients(queries, query_mask, passages, passage_mask):
            def total(q, p):
                return function(q, query_mask, p, passage_mask, **how).sum()

            return jax.grad(total, (0, 1))(queries, passages)

        return gradients

    blockwise = step(losses.xtr, top_k=24, block_size=4)
    assert np.prod(work.largest(jax.make_jaxpr(blockwise)(*arrays).jaxpr).shape) <= rows * 8 * (4 * 12 + 24)
    flops = [work.traced(f, *arrays).flops for f in (blockwise, step(losses.maxsim), step(dense, top_k=24))]
    assert flops[0] == flops[1] == flops[2]


def test_settings_without_meaning_are_refused():
    with pytest.raises(UserError, match="top_k must be at least 1, not 0"):
        losses.xtr(*sides(), top_k=0)
    vectors = jnp.ones((2, 3))
    with pytest.raises(UserError, match="xtr_k is for multi-vector encoders"):
        losses.in_batch_softmax(vectors, vectors, xtr_k=4)

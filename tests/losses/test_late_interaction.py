"""Losses of token vectors equal those of sentence-transformers and PyLate, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import losses
from jaxir.core.errors import UserError
from jaxir.costs import work
from jaxir.losses import TokenVectors
from jaxir.runtime.partitioning import MeshConfig
from tests.interop.folders import GOLDEN

PLACE = GOLDEN / "multi_vector"
SOFTMAX = {"bidirectional": False, "temperature": 1.0}
XTR = {"bidirectional": False, "temperature": 0.25}


def listed(*sides: TokenVectors) -> TokenVectors:
    return TokenVectors(*(jnp.stack(x, axis=1) for x in zip(*(side[:2] for side in sides), strict=True)))


def value_and_gradients(loss, batch, **settings):
    """Returns the loss, and its gradients by the vectors of queries, passages and hard negatives."""

    def of_vectors(vectors, batch):
        given = [side._replace(vectors=x) for side, x in zip(batch, vectors, strict=True)]
        return loss(*given, **settings)[0]

    return jax.jit(jax.value_and_grad(of_vectors))([side.vectors for side in batch], batch)


@pytest.mark.parametrize(
    ("library", "name"),
    [("losses", name) for name in ("softmax", "sharper", "kl", "margin_mse")]
    + [("losses", name) for name in ("xtr_1", "xtr_16", "xtr_256", "xtr_kl")]
    + [("pylate_losses", name) for name in ("softmax", "sharper", "xtr_16")],
)
def test_losses_equal_those_of_other_libraries(library, name):
    with np.load(PLACE / f"{library}.npz") as file:
        golden = {key: jnp.asarray(x) for key, x in file.items()}
    sides = [TokenVectors(golden[f"vectors_{i}"], golden[f"mask_{i}"]) for i in range(4)]
    batch = [*sides[:2], listed(*sides[2:])]
    scores = {"passage_score": golden["scores"][:, 0], "negative_scores": golden["scores"][:, 1:]}
    loss, how = {
        "softmax": (losses.in_batch_softmax, SOFTMAX),
        "sharper": (losses.in_batch_softmax, SOFTMAX | {"temperature": 0.25}),
        "kl": (losses.kl_distillation, scores | {"temperature": 0.5, "teacher_temperature": 2.0}),
        "margin_mse": (losses.margin_mse, scores),
        "xtr_1": (losses.in_batch_softmax, XTR | {"xtr_k": 1}),
        "xtr_16": (losses.in_batch_softmax, XTR | {"xtr_k": 16}),
        "xtr_256": (losses.in_batch_softmax, XTR | {"xtr_k": 256}),
        "xtr_kl": (losses.kl_distillation, scores | {"temperature": 1.0, "xtr_k": 16}),
    }[name]
    value, gradients = value_and_gradients(loss, batch, **how)
    np.testing.assert_allclose(value, golden[name], rtol=1e-5)
    gradients = [*gradients[:2], gradients[2][:, 0], gradients[2][:, 1]]
    for i, (gradient, side) in enumerate(zip(gradients, sides, strict=True)):
        if library == "pylate_losses":  # PyLate normalises the vectors itself
            gradient -= (gradient * side.vectors).sum(-1, keepdims=True) * side.vectors
        np.testing.assert_allclose(gradient, golden[f"{name}_gradient_{i}"], rtol=1e-4, atol=1e-5)


def random_batch(rows: int = 8, negatives: int = 2) -> list[TokenVectors]:
    rng = np.random.default_rng(0)

    def side(*shape):
        mask = rng.random(shape) < 0.7
        mask[..., 0] = True
        return TokenVectors(rng.normal(size=(*shape, 4)).astype(np.float32), mask)

    return [side(rows, 5), side(rows, 7), side(rows, negatives, 7)]


def dense(batch, *, same_tower: bool):
    """Computes the softmax loss and its gradients in float64, from the similarities of all tokens."""
    query, passage, negatives = (TokenVectors(x.astype(np.float64), mask) for x, mask, _ in batch)
    flat = [x.reshape(-1, *x.shape[2:]) for x in negatives[:2]]
    sides = [[np.concatenate(pair) for pair in zip(passage[:2], flat, strict=True)], list(query[:2])]
    sides = sides if same_tower else sides[:1]
    parts = []
    for vectors, mask in sides:
        found = np.einsum("qsd,ptd->qpst", query.vectors, vectors)
        found = np.where(mask[None, :, None], found, -np.inf)
        parts.append((np.where(query.mask[:, None], found.max(-1), 0.0).sum(-1), found.argmax(-1)))
    scores = np.concatenate([part[0] for part in parts], axis=1)
    rows = len(scores)
    if same_tower:
        scores[np.arange(rows), np.arange(rows) - rows + scores.shape[1]] = -np.inf
    softmax = np.exp(scores - scores.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    loss = -np.log(softmax[np.arange(rows), np.arange(rows)]).mean()
    softmax[np.arange(rows), np.arange(rows)] -= 1.0
    slopes, start = softmax / rows, 0
    of_query, of_sides = np.zeros_like(query.vectors), []
    for (vectors, _), (part, chosen) in zip(sides, parts, strict=True):
        slope = slopes[:, start : start + part.shape[1], None] * query.mask[:, None]
        one_hot = np.eye(vectors.shape[1])[chosen] * slope[..., None]
        of_query += np.einsum("qpst,ptd->qsd", one_hot, vectors)
        of_sides.append(np.einsum("qpst,qsd->ptd", one_hot, query.vectors))
        start += part.shape[1]
    of_query += of_sides[1] if same_tower else 0.0
    return loss, [of_query, of_sides[0][:rows], of_sides[0][rows:].reshape(negatives.vectors.shape)]


@pytest.mark.parametrize("mesh", [None, {"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize("same_tower", [False, True])
def test_every_mesh_computes_the_loss_of_the_global_batch(mesh, same_tower):
    batch = random_batch()
    partitioner = MeshConfig(**mesh or {}).build(jax.devices()[: 4 if mesh else 1])
    placed = jax.device_put(batch, partitioner.sharding(("batch",)))
    loss = losses.samtone if same_tower else losses.in_batch_softmax
    with partitioner():
        value, gradients = value_and_gradients(loss, placed, **SOFTMAX)
    expected, others = dense(batch, same_tower=same_tower)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(gradients, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_no_device_holds_all_similarities_or_all_passages():
    rows, batch = 32, random_batch(rows=32)
    partitioner = MeshConfig(data=4).build()
    placed = jax.device_put(batch, partitioner.sharding(("batch",)))

    def step(batch):
        return jax.grad(lambda x: losses.in_batch_softmax(batch[0]._replace(vectors=x), *batch[1:])[0])(
            batch[0].vectors
        )

    with partitioner():
        jaxpr = jax.make_jaxpr(step)(placed).jaxpr
        text = jax.jit(step).lower(placed).compile().as_text()
    # One device compares its queries with the hard negatives of one device at a time.
    assert np.prod(work.largest(jaxpr).shape) <= (rows // 4 * 5) * (rows // 4 * 2 * 7)
    assert "collective-permute" in text and "all-to-all" not in text
    assert not [line for line in text.splitlines() if " all-gather(" in line and f"f32[{rows},7,4]" in line]


def test_keys_mask_equal_passages_and_lists_are_like_single_queries():
    query, passage, negatives = jax.tree.map(jnp.asarray, random_batch())
    key = jnp.arange(16, dtype=jnp.int32).reshape(8, 2)
    same = key.at[1].set(key[0])
    _, metrics = losses.in_batch_softmax(query, passage, passage_key=same, **SOFTMAX)
    _, alone = losses.in_batch_softmax(query, passage, passage_key=jnp.zeros_like(key), **SOFTMAX)
    assert metrics["rows_without_negatives"] == 0 and alone["rows_without_negatives"] == 1
    weighted = query._replace(weight=jnp.arange(1.0, 9.0))
    found = losses.maxsim_of_lists(weighted, negatives, block_size=1)
    each = [
        losses.maxsim(*(x[i : i + 1] for x in query[:2]), *(x[i] for x in negatives[:2])) for i in range(8)
    ]
    np.testing.assert_allclose(found, jnp.concatenate(each) * weighted.weight[:, None], rtol=1e-5)


def test_settings_without_meaning_for_token_vectors_are_refused():
    batch = jax.tree.map(jnp.asarray, random_batch())
    with pytest.raises(UserError, match="MaxSim chooses its blocks itself: leave out block_size"):
        losses.in_batch_softmax(*batch, block_size=4)
    with pytest.raises(
        UserError, match='sums over as many tokens as each passage has: set same_tower to "query"'
    ):
        losses.samtone(*batch, same_tower="both")

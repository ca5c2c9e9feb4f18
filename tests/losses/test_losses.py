"""In-batch losses and Matryoshka, compared with loops over equations: values, gradients and masks."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.losses.distillation import margin_mse
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.matryoshka import matryoshka
from jaxir.losses.samtone import samtone
from tests.losses.loss_cases import EMBEDDINGS, KEYS, VARIANTS, in_batch_loops, make_case, slope_along, to_jax

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "losses.npz"
# None: dense. 4: the 6 rows are two blocks of 3, the 12 hard negatives three blocks of 4.
BLOCK_SIZES = (None, 4)


@pytest.mark.parametrize("temperature", [0.3, 0.01])
@pytest.mark.parametrize("keys", [(), ("query_key",), ("passage_key", "negative_key"), KEYS], ids="+".join)
@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_papers_equation(variant, negatives, keys, temperature):
    loss, expected, settings = VARIANTS[variant]
    case = make_case(negatives=negatives)
    case = {k: v for k, v in case.items() if k in EMBEDDINGS or k in keys}
    value, metrics = loss(**to_jax(case), temperature=temperature, **settings)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected(case, temperature=temperature, **settings), rtol=2e-5)
    assert all(np.isfinite(m) and m.dtype == jnp.float32 and m.shape == () for m in metrics.values())


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("in_batch", in_batch_softmax),
        ("samtone_query", samtone),
        ("samtone_both", functools.partial(samtone, same_tower="both")),
    ],
)
def test_equals_torchs_cross_entropy(name, loss, block_size):
    golden = np.load(GOLDEN)
    case = {n: jnp.asarray(golden[n]) for n in EMBEDDINGS}
    of = functools.partial(loss, temperature=float(golden["temperature"]), block_size=block_size)
    value, gradients = jax.jit(jax.value_and_grad(lambda x: of(**x)[0]))(case)
    assert golden[name] > 0.3
    np.testing.assert_allclose(value, golden[name], rtol=1e-6)
    for n in EMBEDDINGS:
        assert np.abs(golden[f"{name} {n}"]).max() > 0.02
        np.testing.assert_allclose(gradients[n], golden[f"{name} {n}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_finite_differences(variant, keys):
    loss, expected, settings = VARIANTS[variant]
    case = make_case(keys=keys)
    arrays = to_jax(case)
    rest = {k: v for k, v in arrays.items() if k not in EMBEDDINGS}
    of = jax.grad(lambda x: loss(**x, **rest, temperature=0.1, **settings)[0])
    gradients = of({k: arrays[k] for k in EMBEDDINGS})
    slow = functools.partial(expected, temperature=0.1, **settings)
    rng = np.random.default_rng(1)
    for name in EMBEDDINGS:
        assert np.abs(gradients[name]).max() > 1e-2
        for _ in range(3):
            direction = rng.normal(size=case[name].shape)
            slope = slope_along(slow, case, name, direction)
            np.testing.assert_allclose(np.sum(gradients[name] * direction), slope, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("batch", "block_size"), [(1, None), (3, 2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_finite_when_every_negative_is_masked(variant, batch, block_size):
    """All rows and hard negatives share one passage, so each loss is -log 1 in both directions."""
    loss, _, settings = VARIANTS[variant]
    case = to_jax(make_case(batch=batch, negatives=1))
    same = jnp.zeros((batch, 2), jnp.int32)
    keys = {"passage_key": same, "negative_key": same[:, None]}
    embeddings = case["query"], case["passage"], case["negatives"]
    # The loss has no intermediate NaN, so that users can search for their own NaNs with debug_nans.
    with jax.debug_nans(True):
        of = functools.partial(loss, temperature=0.1, **settings, block_size=block_size)
        (value, metrics), gradients = jax.value_and_grad(
            lambda q, p, n: of(q, p, n, **keys), argnums=(0, 1, 2), has_aux=True
        )(*embeddings)
        assert float(of(*embeddings)[0]) != 0
    np.testing.assert_allclose(value, 0.0, atol=1e-6)
    np.testing.assert_allclose(metrics["rows_without_negatives"], 1.0, atol=1e-6)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_logits_stay_finite(variant, block_size):
    """At temperature 0.01 the logits are +-100: in float32 every sum's exp is inf, every positive's 0."""
    loss, expected, settings = VARIANTS[variant]
    # Shapes are those of the cases above, so that compiled operations are reused.
    query = np.outer([1, 1, 1, -1, -1, -1], np.eye(5)[0])
    case = {"query": query, "passage": -query, "negatives": np.stack([query, query], axis=1)}
    arrays = to_jax(case)
    value, gradients = jax.value_and_grad(
        lambda q, p: loss(q, p, arrays["negatives"], **settings, block_size=block_size)[0], argnums=(0, 1)
    )(arrays["query"], arrays["passage"])
    np.testing.assert_allclose(value, expected(case, temperature=0.01, **settings), rtol=1e-6)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in gradients)


@pytest.mark.parametrize("block_size", [None, 1])
def test_rows_without_negatives_are_counted(block_size):
    """Row 0 shares its passage with row 1 and its query with row 2; rows 1 and 2 differ in both."""
    query = passage = jnp.eye(3, 4)
    keys = {
        "query_key": jnp.asarray([[0, 0], [1, 1], [0, 0]], jnp.int32),
        "passage_key": jnp.asarray([[5, 5], [5, 5], [6, 6]], jnp.int32),
    }
    settings = {"temperature": 0.5, "block_size": block_size}

    def counted(negatives=None, **keys):
        _, metrics = in_batch_softmax(query, passage, negatives, **keys, **settings)
        return float(metrics["rows_without_negatives"])

    assert counted() == 0
    assert counted(**keys) == pytest.approx(1 / 3)
    hard = jnp.ones((3, 1, 4))
    assert counted(hard, **keys, negative_key=jnp.full((3, 1, 2), 5, jnp.int32)) == pytest.approx(1 / 3)
    assert counted(hard, **keys, negative_key=jnp.full((3, 1, 2), 9, jnp.int32)) == 0


@pytest.mark.parametrize("block_size", [None, 3])
def test_metrics_by_hand(block_size):
    """Two rows are correct, one prefers another row's passage, and one prefers a hard negative."""
    query = jnp.asarray([[1, 0], [0, 1], [0.8, 0.6], [-1, 0]], jnp.float32)
    passage = jnp.asarray([[1, 0], [0, 1], [0, -1], [-0.6, 0.8]], jnp.float32)
    negatives = jnp.asarray([[[0.6, -0.8]], [[0.6, -0.8]], [[0.6, -0.8]], [[-0.8, -0.6]]], jnp.float32)
    settings = {"temperature": 0.1, "block_size": block_size}
    alike = jnp.full((4, 2), 0.5)  # vectors of a collapsed model are equal: ties do not count as correct

    @jax.jit
    def of(query, passage, negatives, alike):
        return (
            samtone(query, passage, negatives, same_tower="both", **settings),
            samtone(query, passage, **settings)[1]["accuracy"],
            in_batch_softmax(alike, alike, **settings)[1]["accuracy"],
        )

    (loss, metrics), without_negatives, collapsed = of(query, passage, negatives, alike)
    assert float(metrics["accuracy"]) == 0.5
    assert float(without_negatives) == 0.75
    assert float(collapsed) == 0
    np.testing.assert_allclose(metrics["positive_similarity"], (1 + 1 - 0.6 + 0.6) / 4, rtol=1e-6)
    off_query = (0 + 0.8 - 1 + 0.6 + 0 - 0.8) / 6
    off_passage = (0 + 0 - 0.6 - 1 + 0.8 - 0.8) / 6
    np.testing.assert_allclose(metrics["query_query_similarity"], off_query, rtol=1e-5)
    np.testing.assert_allclose(metrics["passage_passage_similarity"], off_passage, rtol=1e-5)
    total = metrics["loss_query_to_passage"] + metrics["loss_passage_to_query"]
    np.testing.assert_allclose(loss, total)


INNER = functools.partial(in_batch_softmax, temperature=0.3)


def matryoshka_loops(case, *, dimensions, weights, normalize=True):
    """Kusupati et al. 2022, eq. 1, with the in-batch softmax for the loss."""
    total = 0.0
    for dimension, weight in zip(dimensions, weights, strict=True):
        cut = {name: case[name][..., :dimension] for name in EMBEDDINGS if case.get(name) is not None}
        if normalize:
            cut = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in cut.items()}
        keys = {name: x for name, x in case.items() if name not in EMBEDDINGS}
        total += weight * in_batch_loops(cut | keys, temperature=0.3, bidirectional=True)
    return total


@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("normalize", [True, False])
def test_matryoshka_equals_the_papers_equation(negatives, normalize):
    case = make_case(width=8, negatives=negatives)
    settings = {"dimensions": [8, 5, 2], "weights": [1.0, 0.5, 0.25], "normalize": normalize}
    loss, metrics = matryoshka(**to_jax(case), loss=INNER, **settings)
    np.testing.assert_allclose(loss, matryoshka_loops(case, **settings), rtol=2e-5)
    whole, inner = INNER(**to_jax(case))
    assert metrics["loss_at_5"] != metrics["loss_at_2"] != whole
    assert metrics["loss_at_8"] == whole and metrics["accuracy"] == inner["accuracy"]
    parts = float(whole + metrics["loss_at_5"] / 2 + metrics["loss_at_2"] / 4)
    assert float(loss) == pytest.approx(parts, rel=1e-6)
    assert {f"accuracy_at_{d}" for d in settings["dimensions"]} <= metrics.keys()


def test_matryoshkas_default_dimensions_halve_down_to_eight():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 40)), jnp.float32)
    _, metrics = matryoshka(x, x, loss=INNER)
    assert [name for name in metrics if name.startswith("loss_at")] == [f"loss_at_{d}" for d in (40, 20, 10)]
    assert "loss_at_4" in matryoshka(x[:, :4], x[:, :4], loss=INNER)[1]


def test_matryoshka_of_a_row_of_zeros_has_a_finite_gradient():
    case = to_jax(make_case(negatives=0))
    query = case["query"].at[0, :3].set(0.0)
    gradient = jax.grad(lambda q: matryoshka(q, case["passage"], loss=INNER, dimensions=[3])[0])(query)
    assert np.isfinite(gradient).all() and np.abs(gradient[1]).max() > 0


def test_scores_of_a_teacher_pass_through_matryoshka():
    case = to_jax(make_case(negatives=2))
    of = {name: case[name] for name in EMBEDDINGS}
    scores = {"passage_score": jnp.ones(len(case["query"])), "negative_scores": case["negatives"][..., 0]}
    loss, metrics = matryoshka(**of, **scores, loss=margin_mse, dimensions=[4, 2])
    assert float(loss) == pytest.approx(float(metrics["loss_at_4"] + metrics["loss_at_2"]))
    assert "margin" in metrics and "accuracy_at_4" not in metrics

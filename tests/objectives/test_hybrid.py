"""Self-distillation of hybrid encoders: FlagEmbedding's losses and gradients, meshes, chunks, duplicates."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir import HybridEncoder, Pairs, fit
from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import PretrainedHybrid
from jaxir.losses import self_distillation
from jaxir.objectives.hybrid import HybridContrastive
from jaxir.runtime.partitioning import MeshConfig

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "hybrid"  # written by make_hybrid.py, whose losses have temperature 0.05


@pytest.fixture(scope="module")
def expected():
    return np.load(FOLDER / "losses.npz")


@pytest.fixture(scope="module")
def model():
    return model_dir.load(f"hf:{FOLDER}", kind="hybrid_encoder").model


@pytest.fixture(scope="module")
def batch(expected):
    def ids(name):
        x = expected[name]
        return jnp.asarray(np.where(x < 2, 1 - x, x), jnp.int32)  # jaxir's padding is 0, the folder's 1

    passages = ids("passage_ids").reshape(4, 3, -1)
    return {"query_ids": ids("query_ids"), "passage_ids": passages[:, 0], "negative_ids": passages[:, 1:]}


def objective(*, chunks=1, **settings):
    return HybridContrastive(
        loss=functools.partial(self_distillation, temperature=0.05, **settings), chunks=chunks
    )


def loss_and_gradients(objective, model, batch):
    graph, state = nnx.split(model)
    run = jax.jit(jax.value_and_grad(lambda state: objective(nnx.merge(graph, state), batch), has_aux=True))
    (loss, metrics), gradients = run(state)
    return loss, metrics, nnx.to_pure_dict(gradients)


@pytest.mark.parametrize(("name", "distils"), [("plain", False), ("distilled", True)])
def test_losses_and_gradients_equal_flagembeddings(expected, model, batch, name, distils):
    loss, metrics, found = loss_and_gradients(objective(distillation=distils), model, batch)
    np.testing.assert_allclose(loss, expected[f"{name}_loss"], rtol=2e-6)
    assert ("distillation" in metrics) == distils
    pairs = {
        "sparse_linear": found["token_weight"]["kernel"].T,
        "colbert_linear": found["token_modules"][0]["linear"]["kernel"].T,
        "word_embeddings": np.asarray(found["encoder"]["embeddings"]["token"]["embedding"])[
            [1, 0, *range(2, 53)]
        ],
    }
    for part, gradient in pairs.items():
        wanted = expected[f"{name}_{part}"]
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=part)


def test_chunks_and_devices_change_nothing(model, batch):
    loss, metrics, _ = loss_and_gradients(objective(), model, batch)
    chunked, of_chunks, _ = loss_and_gradients(objective(chunks=2), model, batch)
    with MeshConfig(data=4).build(jax.devices()[:4])():
        split, of_devices, _ = loss_and_gradients(objective(), model, batch)
    np.testing.assert_allclose([chunked, split], [loss, loss], rtol=1e-5)
    for found in (of_chunks, of_devices):
        np.testing.assert_allclose([*found.values()], [*metrics.values()], rtol=1e-4)


def test_duplicates_are_no_negatives(model, batch):
    """With the keys of one passage in all rows, each row has only its own passage and its loss is 0."""
    alone = {name: x for name, x in batch.items() if name != "negative_ids"}
    loss, metrics, _ = loss_and_gradients(objective(), model, alone)
    assert loss > 1 and metrics["loss_sparse"] > 1
    same = {"passage_key": jnp.ones((4, 2), jnp.int32), "query_key": jnp.ones((4, 2), jnp.int32)}
    loss, metrics, _ = loss_and_gradients(objective(), model, alone | same)
    assert loss == 0 and metrics["accuracy"] == 1


TEXTS = [
    "a lazy dog",
    "the quick fox",
    "jumps over",
    "lorem ipsum",
    "dolor sit",
    "red blue",
    "one two",
    "x y",
]
PAIRS = Pairs(TEXTS, [f"{text} indeed" for text in TEXTS])
LENGTHS = {"query_max_length": 8, "passage_max_length": 8}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 2], ids=["whole", "adapters"])
def test_a_dual_encoder_becomes_a_hybrid_encoder(tmp_path, rank):
    start = PretrainedHybrid(source=f"st:{GOLDEN}/bert", projection=16, lora_rank=rank, **LENGTHS)
    encoder = fit(start, PAIRS, steps=12, batch_size=8, dev=PAIRS, output_dir=tmp_path / "run")
    assert encoder.model.config.pooling == "cls"  # the pooling of `start`
    opened = HybridEncoder.load(f"{tmp_path}/run")
    found = opened.encode_queries(TEXTS)
    assert found.tokens[0].shape[1] == 16
    np.testing.assert_allclose(found.dense, encoder.encode_queries(TEXTS).dense, atol=1e-6)
    again = fit(PretrainedHybrid(source=f"{tmp_path}/run", **LENGTHS), PAIRS, steps=2, batch_size=8)
    assert again.model.config.token_dimension == 16


def test_models_that_cannot_become_hybrid_are_refused(tmp_path):
    with pytest.raises(
        UserError, match="a hybrid encoder starts from one encoder with one pooling, not from"
    ):
        fit(PretrainedHybrid(source=f"st:{GOLDEN}/cross_bert", **LENGTHS), PAIRS, steps=2, batch_size=8)
    with pytest.raises(UserError, match="vectors have 8 dimensions, so they cannot get a projection to 4"):
        fit(PretrainedHybrid(source=f"hf:{FOLDER}", projection=4, **LENGTHS), PAIRS, steps=2, batch_size=8)
    with pytest.raises(UserError, match=r"trains a hybrid encoder|PretrainedHybrid"):
        fit(f"st:{GOLDEN}/bert", PAIRS, steps=2, batch_size=8, objective=HybridContrastive())

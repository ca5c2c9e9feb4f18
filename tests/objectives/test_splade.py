"""Sparse encoders train with the losses, regularisers and gradients of sentence-transformers."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.interop.build import Pretrained, PretrainedSparse
from jaxir.losses import in_batch_softmax, kl_distillation, margin_mse
from jaxir.models.sparse_encoder import pooled_logits
from jaxir.objectives.contrastive import Contrastive, Embeddings
from jaxir.objectives.splade import Sparsity, Splade, SpladeDistillation
from jaxir.runtime.partitioning import MeshConfig

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
POOLINGS = {"max": ("bert", "max", "relu"), "sum": ("distilbert", "sum", "log1p_relu")}
SPARSITY = Sparsity(lambda_q=5e-3, lambda_d=3e-3)
RANKING = {
    "in_batch": partial(in_batch_softmax, temperature=1.0, bidirectional=False),
    "margin_mse": margin_mse,
    "kl": partial(kl_distillation, temperature=1.0, teacher_temperature=1.0),
}
COLUMNS = (  # the columns of tests/golden/make_splade.py
    ["the cat sat on the mat", "a dog and a cat", "mice eat cheese", "last night"],
    [
        "cats sit on mats",
        "Dogs chase cats; cats chase mice.",
        "the cheese that mice eat",
        "the night was long",
    ],
    ["the table", "a mat for a table", "dogs sat", "cheese on the table last night, and more of it"],
)


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "splade.npz")


@pytest.fixture(scope="module")
def sparse():
    return {name: opened(name) for name in POOLINGS}


def opened(name):
    """Returns a golden language model with a pooling, and the golden batch."""
    folder, pooling, saturation = POOLINGS[name]
    loaded = PretrainedSparse(source=f"hf:{GOLDEN}/mlm_{folder}", dropout_rate=0.0).build(seed=0)
    object.__setattr__(loaded.model.config, "pooling", pooling)
    object.__setattr__(loaded.model.config, "saturation", saturation)
    ids = [loaded.tokenizer.encode_batch(column, max_length=24) for column in COLUMNS]
    query, passage, negative = (np.stack([np.pad(row, (0, 24 - len(row))) for row in rows]) for rows in ids)
    scores = np.load(GOLDEN / "splade.npz")["scores"]
    batch = {"query_ids": query, "passage_ids": passage, "negative_ids": negative[:, None]}
    batch |= {"passage_score": scores[:, 0], "negative_scores": scores[:, 1:]}
    return loaded.model, {name: jnp.asarray(x) for name, x in batch.items()}


def objective_of(loss, **settings):
    kind = Splade if loss == "in_batch" else SpladeDistillation
    return kind(loss=RANKING[loss], sparsity=SPARSITY, **settings)


def loss_and_gradients(model, batch, objective):
    graph, params = nnx.split(model)

    def loss_of(params, batch):
        return objective(nnx.merge(graph, params), batch)

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params, batch)
    return loss, metrics, nnx.to_pure_dict(gradients)


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-5 * max(1, np.abs(expected).max()), rtol=1e-5)


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("loss", RANKING)
def test_losses_and_gradients_equal_those_of_sentence_transformers(name, loss, golden, sparse):
    found, metrics, gradients = loss_and_gradients(*sparse[name], objective_of(loss))
    parts = {part: golden[f"{name}/{loss}/{part}"] for part in ("loss", "bias", "table")}
    expected = golden[f"{name}/{loss}/document_regularizer_loss"] / SPARSITY.lambda_d
    np.testing.assert_allclose(metrics["passage_regularizer"], expected, rtol=1e-5)
    expected = golden[f"{name}/{loss}/query_regularizer_loss"] / SPARSITY.lambda_q
    np.testing.assert_allclose(metrics["query_regularizer"], expected, rtol=1e-5)
    np.testing.assert_allclose(found, parts["loss"], rtol=1e-5)
    bias, table = gradients["head"]["bias"], gradients["encoder"]["embeddings"]["token"]["embedding"]
    for ours, theirs in ((bias, parts["bias"]), (table, parts["table"])):
        assert_near(ours, theirs)


@pytest.mark.slow
def test_regularisers_see_the_global_batch_on_a_mesh_and_with_gradient_caching(sparse):
    model, batch = sparse["max"]
    expected = loss_and_gradients(model, batch, objective_of("in_batch"))
    chunked = loss_and_gradients(model, batch, objective_of("in_batch", chunks=2))
    partitioner = MeshConfig(data=2, fsdp=2).build(jax.devices()[:4])
    rows = jax.device_put(batch, partitioner.sharding(("batch",)))
    with partitioner():
        spread = loss_and_gradients(model, rows, objective_of("in_batch"))
    for found in (chunked, spread):
        jax.tree.map(assert_near, found, expected)


def test_regularisers_rise_as_in_sentence_transformers(golden):
    half = Sparsity(regularizer_warmup=0.5).settled(lambda _, share: round(share * 10))
    assert half.regularizer_warmup == 5
    query = jnp.ones((2, 3))
    found = jnp.array([half(Embeddings(query, query), jnp.int32(step))[0] for step in range(8)])
    np.testing.assert_allclose(found / half(Embeddings(query, query), None)[0], golden["ramp"], rtol=1e-6)


def test_metrics_and_the_other_regularisers_are_their_definitions():
    query, passage = jnp.array([[1.0, 0, 2], [0, 0, 1]]), jnp.array([[0.0, 3, 1], [0, 0, 0]])
    more = Sparsity(lambda_q=1, lambda_d=10, query_regularizer="l1", regularizer_warmup=0, anti_zero=100)
    total, metrics = more(Embeddings(query, passage, jnp.zeros((2, 1, 3))), None)
    of_passages = 0.75**2 + 0.25**2  # the mean is over both passages and both negatives
    np.testing.assert_allclose(total, 2.0 + 10 * of_passages + 100 * (1 / 4**2 + 1 / 4**2), rtol=1e-6)
    assert metrics["query_active_dims"] == 1.5 and metrics["passage_active_dims"] == 0.5
    assert metrics["flops"] == 0.5 * 0 + 0 * 0.25 + 1.0 * 0.25


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_the_gradient_never_holds_all_logits(pooling):
    rows, length, width, vocabulary = 4, 64, 8, 8192
    shapes = [(rows, length, width), (rows, length), (vocabulary, width), (vocabulary,)]
    kinds = [jnp.float32, jnp.bool_, jnp.float32, jnp.float32]
    arrays = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, kinds, strict=True)]

    def temporaries(chunk):
        def loss(*arrays):
            return pooled_logits(*arrays, pooling=pooling, saturation="relu", chunk=chunk).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 2, 3))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * rows * length * vocabulary  # bytes
    assert temporaries(256) < logits / 4 < temporaries(vocabulary)


def test_objectives_refuse_models_of_another_kind(sparse):
    dual = Pretrained(source=f"st:{GOLDEN}/bert").build(seed=0).model
    with pytest.raises(UserError, match=r"Splade trains a sparse encoder .* but the model is a dual encoder"):
        Splade().check_model(dual)
    with pytest.raises(UserError, match=r"Contrastive trains a dual encoder .* but the model is a sparse"):
        Contrastive().check_model(sparse["max"][0])
    with pytest.raises(UserError, match="distillation compares a passage with hard negatives"):
        SpladeDistillation().features(TextFormat(8, 8))

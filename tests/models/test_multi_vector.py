"""The model of multi-vector encoders: tokens that no other attends to, in bfloat16, and what is scored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.features import PADDING_TOKEN
from jaxir.models.after_pooling import AfterPooling
from jaxir.models.bert import BertConfig
from jaxir.models.multi_vector import EXPANSION_TOKEN, Expansion, MultiVectorConfig, MultiVectorModel

BACKBONE = BertConfig(vocab_size=32, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=32, max_positions=16)
CONFIG = MultiVectorConfig(
    backbone=BACKBONE,
    token_modules=(AfterPooling(kind="dense", dimension=8), AfterPooling(kind="normalize")),
    expansion=Expansion(length=8, token=3),
    skipped=(5,),
)
IDS = jnp.array([[2, 7, 5, 9, 0, 0], [2, PADDING_TOKEN, 0, 0, 0, 0]], jnp.int32)


def made(config: MultiVectorConfig) -> MultiVectorModel:
    """Returns a new model with kernels ten times as large, so that attention changes its vectors."""
    model = MultiVectorModel(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x * 10.0 if x.ndim == 2 else x, state))
    return model


def skipping(attend):
    """Returns `attend`, but with zeros at the positions that cuDNN's kernel skips, on any platform."""

    def stand_in(query, key, value, *, query_seq_lengths, implementation, **how):
        assert implementation == "cudnn"
        parts = (x.astype(jnp.float32) for x in (query, key, value))
        found = attend(*parts, implementation="xla", **how).astype(query.dtype)
        real = jnp.arange(query.shape[1])[None] < query_seq_lengths[:, None]
        return jnp.where(real[..., None, None], found, jnp.zeros_like(found))

    return stand_in


@pytest.mark.parametrize("attend", [False, True])
def test_expanded_queries_have_the_same_vectors_in_bfloat16_on_a_gpu(attend, monkeypatch):
    config = dataclasses.replace(CONFIG, expansion=Expansion(length=8, token=3, attend=attend))
    exact = made(config).token_vectors([(IDS, "query", None)])[0]
    backbone = dataclasses.replace(BACKBONE, dtype="bfloat16")
    rounded = made(dataclasses.replace(config, backbone=backbone))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", skipping(jax.nn.dot_product_attention))
    found = rounded.token_vectors([(IDS, "query", None)])[0]
    assert found.vectors.shape == (2, 8, 8) and found.mask.all()
    products = jnp.einsum("qsd,qsd->qs", found.vectors, exact.vectors)
    np.testing.assert_allclose(products, 1.0, atol=2e-3)


def test_scored_tokens_and_batches_encoded_together():
    model = MultiVectorModel(CONFIG, rngs=nnx.Rngs(0))
    query, passage = model.token_vectors([(IDS, "query", None), (IDS, "passage", None)])
    np.testing.assert_array_equal(passage.mask, (IDS != 0) & (IDS != 5))
    filled = jnp.pad(
        jnp.where(IDS == 0, EXPANSION_TOKEN, IDS), [(0, 0), (0, 2)], constant_values=EXPANSION_TOKEN
    )
    np.testing.assert_allclose(query.vectors, model.encode(filled), atol=1e-6)
    real = np.asarray(IDS != 0)
    np.testing.assert_allclose(passage.vectors[real], model.encode(IDS)[real], atol=1e-6)
    mean = MultiVectorModel(dataclasses.replace(CONFIG, similarity="meanmaxsim"), rngs=nnx.Rngs(0))
    weights = mean.token_vectors([(IDS, "query", None), (IDS, "passage", None)])
    np.testing.assert_allclose(weights[0].weight, [1 / 8, 1 / 8])
    np.testing.assert_allclose(weights[1].weight, [1 / 3, 1 / 2])
    lists = jnp.stack([IDS, IDS[::-1]], axis=1)
    np.testing.assert_allclose(mean.score_lists(IDS, lists) * 8, model.score_lists(IDS, lists), rtol=1e-5)


def test_dropout_applies_to_added_tokens_too():
    backbone = dataclasses.replace(BACKBONE, dropout_rate=0.5, num_layers=1)
    model = MultiVectorModel(dataclasses.replace(CONFIG, backbone=backbone), rngs=nnx.Rngs(0))
    key = jax.random.key(0)
    (one,), (other,) = (model.token_vectors([(IDS, "query", k)]) for k in (key, None))
    added = np.abs(np.asarray(one.vectors - other.vectors)).max(-1)
    assert (added > 1e-3).all()

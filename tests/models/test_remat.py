"""Rematerialisation changes no number, and recomputes what its name says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import BadValueError
from jaxir.costs import collectives, hlo, work
from jaxir.interop.model.overrides import CommonOverrides
from jaxir.models import layers
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.t5_decoder import T5Decoder
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.run.run_fingerprint import describe
from jaxir.training.step import train_state
from jaxir.training.step.optimizers import AdamW
from tests.models.test_encoders import BACKBONES, IDS, T5, loss_and_gradients

KEY = jax.random.key(1)


def test_remat_weights_gathers_once():
    partitioner = MeshConfig(fsdp=4).build()
    x = jax.device_put(IDS, partitioner.sharding(("batch", "length"), IDS.shape))

    def of(remat):
        config = dataclasses.replace(T5, scan_layers=True, remat=remat)
        graphdef, params = nnx.split(config.make(rngs=nnx.Rngs(0)))
        shardings = layers.param_shardings(params, partitioner)

        def loss(params, key):
            with partitioner():
                return (nnx.merge(graphdef, params)(x, key=key) ** 2).sum()

        step = jax.jit(jax.grad(loss), in_shardings=(shardings, None), out_shardings=shardings)
        compiled = step.lower(params, KEY).compile()
        sent = collectives.read(hlo.parse(compiled.as_text()), partitioner.mesh)
        gathered = sum(c.count for c in sent if c.kind == "all-gather" and "while" in c.source)
        return gathered, compiled(jax.device_put(params, shardings), KEY)

    (twice, expected), (once, found) = of("products"), of("weights")
    # "weights" gathers once, "products" twice; the backward pass does not need all weights.
    assert 0 < once < 0.55 * twice
    largest = max(np.abs(a).max() for a in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6 * largest)


def test_remat_changes_no_number():
    """Recomputing draws the same dropout; tests/models/test_encoders.py tests remat=True."""
    config = dataclasses.replace(T5, scan_layers=True)
    loss, gradients = loss_and_gradients(config, KEY)
    largest = max(np.abs(expected).max() for expected in gradients.values())
    for remat in ("weights", "products"):
        value, found = loss_and_gradients(dataclasses.replace(config, remat=remat), KEY)
        assert value == pytest.approx(loss, rel=1e-6)
        for name, expected in gradients.items():
            assert np.abs(expected).max() > 1e-4
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6 * largest, err_msg=name)


def flops(make) -> list[float]:
    """Returns the operations of products if nothing, attention's products, or everything is recomputed."""

    def of(remat) -> float:
        graphdef, params = nnx.split(nnx.eval_shape(lambda: make(remat)))
        x, mask = jnp.ones((*IDS.shape, 32)), IDS != 0

        def loss(params, key):
            module = nnx.merge(graphdef, params)
            args = (x, x, mask) if isinstance(module, T5Decoder) else (IDS,)
            return module(*args, key=key).astype(jnp.float32).sum()

        return work.traced(jax.grad(loss), params, KEY).flops

    return [of(remat) for remat in (False, "products", True)]


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        *(("t5", False), ("decoder", True)),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("deberta", "modernbert")),
    ],
)
def test_remat_products_recomputes_only_attention_products(name, scan):
    config = dataclasses.replace(BACKBONES.get(name, T5), scan_layers=scan)

    def make(remat):
        changed = dataclasses.replace(config, remat=remat)
        if name == "decoder":
            return T5Decoder(changed, num_layers=2, rngs=nnx.Rngs(0))
        return changed.make(rngs=nnx.Rngs(0))

    none, products, everything = flops(make)
    length, tokens = IDS.shape[1], IDS.size
    # Recomputed products: logits and mixed values, once for each attention of a block. DeBERTa's logits have
    # three terms, two of them with 2L distances.
    met = {"deberta": 1 + 4 + 1, "decoder": 4}.get(name, 2)
    width = 32 if name in ("bert", "modernbert", "deberta") else config.num_heads * config.head_dim
    assert products - none == 2 * config.num_layers * met * tokens * length * width
    # All products with weights except a block's last are recomputed: 10 to 16 E² operations a token.
    assert everything - products > 2 * config.num_layers * tokens * 5 * 32 * 32


def test_remat_auto_recomputes_nothing_until_training_chooses():
    def model(remat):
        config = DualEncoderConfig(backbone=dataclasses.replace(T5, num_layers=1, remat=remat))
        return nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0)))

    partitioner = MeshConfig().build(jax.devices()[:1])

    def plan(remat):
        optimizer = AdamW().build(1).transform
        return train_state.plan_state(model(remat), optimizer, partitioner, auxiliary=model(remat))

    def of(plan) -> list[float]:
        def loss(params):
            both = plan.modules(params, params, {})
            return sum(module.encode(IDS, tower="query", key=KEY).sum() for module in both)

        return work.traced(jax.grad(loss), plan.abstract.params).flops

    auto, anew = plan("auto"), plan(True)
    assert of(auto) == (least := of(plan(False)))
    assert of(auto.with_remat(True)) == of(anew) == of(anew.with_remat(False)) > least


def test_fingerprints_of_recorded_runs_stay_valid():
    """A run's fingerprint hashes its configuration as text; "all" is recorded as True."""
    config = DualEncoderConfig(backbone=T5)

    def recorded(remat):
        return describe(CommonOverrides(remat=remat).executed(config))

    assert recorded(None) == recorded("none") == recorded(False) == describe(config)
    assert "remat=False" in describe(config)
    for remat in ("all", True):
        assert recorded(remat) == describe(config).replace("remat=False", "remat=True")
    assert "remat='products'" in recorded("products")
    for wrong in ("dots", 2):
        with pytest.raises(BadValueError, match=r"^remat must be True or False or 'weights' or .*, not"):
            CommonOverrides(remat=wrong)

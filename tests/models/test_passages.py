"""Sources of several passages (Fusion-in-Decoder), compared with transformers."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.models.decoding import Decoding
from tests.models.test_decoding import NAMES, generate
from tests.models.test_decoding import model_and_golden as read

pytestmark = pytest.mark.compiled
model_and_golden = functools.partial(read, file="reader.npz")


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    model, golden = model_and_golden(name)
    source, target = golden["source_ids"], golden["target_ids"]
    assert (source != 0).any(-1).sum(-1).tolist() == [3, 3, 3, 2]
    logits = nnx.jit(lambda model, s, t: model(s, t))
    found = logits(model, jnp.asarray(source), jnp.asarray(target))
    real = (target != 0)[..., None]
    np.testing.assert_allclose(np.where(real, found, 0.0), golden["logits"], atol=1e-5)
    assert golden["logits"].std(axis=-1)[target != 0].min() > 0.1
    # One long source, whose passages see each other, gives other logits; so do fewer passages.
    fewer = np.where(np.arange(3)[None, :, None] < 2, source, 0)
    for other in (source.reshape(len(source), -1), fewer):
        different = logits(model, jnp.asarray(other), jnp.asarray(target)) - found
        assert np.abs(np.where(real, different, 0)).max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(name):
    model, golden = model_and_golden(name)
    source = golden["source_ids"]
    greedy, beams = Decoding(max_new_tokens=12), Decoding(max_new_tokens=12, num_beams=4)
    np.testing.assert_array_equal(generate(model, source, greedy)[:, 0], golden["greedy"])
    np.testing.assert_array_equal(generate(model, source, beams)[:, 0], golden["beams"])
    assert (golden["beams"] != golden["greedy"]).any() and (golden["greedy"] == 1).any()


def test_padding_and_the_order_of_passages_change_no_token():
    model, golden = model_and_golden("seq2seq_1_1")
    source, longer = golden["source_ids"], np.pad(golden["source_ids"], [(0, 1), (0, 2), (0, 5)])
    for how in (Decoding(max_new_tokens=12), Decoding(max_new_tokens=12, num_outputs=3, top_p=0.9)):
        expected = np.pad(generate(model, source, how), [(0, 1), (0, 0), (0, 0)])
        np.testing.assert_array_equal(generate(model, longer, how), expected)
    greedy = generate(model, source[:, ::-1], Decoding(max_new_tokens=12))
    np.testing.assert_array_equal(greedy[:, 0], golden["greedy"])

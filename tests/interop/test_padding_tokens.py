"""Texts that spell out the padding token give the vectors and scores of sentence-transformers 6.2."""

import itertools

import numpy as np
import pytest

from jaxir import CrossEncoder, DualEncoder
from tests.interop.folders import GOLDEN

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "padding_tokens.npz")


# The models differ in pooling ([CLS], mean, last token), padding id (0, 1) and kind of positions.
@slow
@pytest.mark.parametrize("name", ["roberta", "bert", "t5_1_1", "modernbert"])
def test_padding_tokens_of_a_text_are_tokens_to_a_dual_encoder(golden, name):
    vectors = DualEncoder.load(f"st:{GOLDEN / name}").encode_passages(golden["texts"].tolist())
    np.testing.assert_allclose(vectors, golden[name], atol=3e-6)


@pytest.mark.parametrize(
    "name",
    ["cross_bert", *(pytest.param(f"cross_{n}", marks=slow) for n in ("roberta", "modernbert", "deberta"))],
)
def test_padding_tokens_of_a_pair_are_tokens_to_a_cross_encoder(golden, name):
    pairs = list(itertools.product(golden["texts"].tolist()[:4], repeat=2))
    logits = np.asarray(CrossEncoder.load(f"hf:{GOLDEN / name}").score(pairs))
    scores = logits if name == "cross_bert" else 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(scores, golden[name], atol=3e-6)

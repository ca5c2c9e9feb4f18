"""Cross-encoders: tokens, logits and scores of the reference implementations."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from jaxir import CrossEncoder
from jaxir.core.errors import UserError
from jaxir.data.text.pair_tokenizer import PairTokenizer
from jaxir.data.text.tokenizer import Tokenizer, pad_batch
from jaxir.interop import formats, model_dir
from jaxir.interop.build import PretrainedCrossEncoder
from jaxir.interop.model import stored
from jaxir.models import activations
from jaxir.models.dual_encoder import DualEncoderConfig
from tests.interop.folders import GOLDEN, change, change_tensors, edited, exchange

NAMES = ["bert", "roberta", "distilbert", "modernbert", "deberta"]
pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def loaded():
    return {name: model_dir.load(f"hf:{GOLDEN / f'cross_{name}'}", kind="cross_encoder") for name in NAMES}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN / "cross_bert", tmp_path / "model")


def golden(name: str):
    return np.load(GOLDEN / f"cross_{name}" / "golden.npz")


score = nnx.jit(lambda model, ids, types: model.score(ids, types))


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(loaded, name):
    arrays, pad = golden(name), 1 if name in ("roberta", "modernbert") else 0
    for case in ("padded", "unpadded"):
        ids = exchange(arrays[f"{case}_ids"], pad)
        assert (ids == 0).any() == (case == "padded")
        ids, types = jnp.asarray(ids), jnp.asarray(arrays[f"{case}_types"])
        found = score(loaded[name].model, ids, types)
        np.testing.assert_allclose(found, arrays[f"{case}_logits"], atol=1e-5)
        assert np.ptp(found) > 0.03, "the logits tell rows apart by far more than the tolerance"
        other = score(loaded[name].model, ids, 1 - types)
        read = np.abs(other - found).min()
        assert read > 1e-3 if name == "bert" else read == 0.0, "BERT reads token types, the others have none"


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_scores_of_pairs_match(loaded, name):
    arrays, model = golden(name), loaded[name]
    pairs = [tuple(pair) for pair in arrays["pairs"].tolist()]
    assert model.settings.pair_max_length == 40
    tokens = PairTokenizer(model.tokenizer).encode(pairs, max_length=40)
    ends = np.cumsum(arrays["pair_lengths"])[:-1]
    back = Tokenizer.load(GOLDEN / f"cross_{name}").pad_swap
    for row, ids in zip(tokens, np.split(arrays["pair_ids"], ends), strict=True):
        ours = exchange(row.ids, back or 0)
        assert ours.tolist() == ids.tolist() and row.ids.dtype == row.types.dtype == np.int32
    assert sum(len(row.ids) == 40 for row in tokens) >= 4, "some pairs are cut"
    if name == "bert":
        expected = np.split(arrays["pair_types"], ends)
        assert [r.types.tolist() for r in tokens] == [types.tolist() for types in expected]
    ids, types = (jnp.asarray(pad_batch(rows, 40)) for rows in zip(*tokens, strict=True))
    logits = np.asarray(score(model.model, ids, types))
    # As their folders say, the scores of cross_bert are logits; those of the others are sigmoids of logits.
    scores = logits if name == "bert" else 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(scores, arrays["pair_scores"], atol=1e-5)


def test_bfloat16_cross_encoder_scores_in_float32(tmp_path):
    arrays = golden("bert")
    loaded = model_dir.load(f"hf:{GOLDEN / 'cross_bert'}", kind="cross_encoder", dtype="bfloat16")
    model_dir.save(tmp_path / "model", loaded.model, loaded.tokenizer, loaded.settings)
    scores = CrossEncoder.load(str(tmp_path / "model")).score([tuple(p) for p in arrays["pairs"].tolist()])
    np.testing.assert_allclose(scores, arrays["pair_scores"], atol=1e-5)


def test_a_classifier_of_two_labels_gives_its_encoder(folder):
    """transformers writes no number of labels into config.json if there are two, its default."""
    labels = {"classifier.weight": np.zeros((2, 32), np.float32), "classifier.bias": np.zeros(2, np.float32)}
    change_tensors(folder, lambda tensors: tensors.update(labels))
    change(folder / "config.json", id2label=..., label2id=...)
    found = model_dir.read(f"hf:{folder}", kind=None)[0]
    assert isinstance(found.config, DualEncoderConfig)
    started = PretrainedCrossEncoder(source=f"hf:{folder}").build(seed=0).model
    assert started.classifier.kernel.shape == (32, 1) and np.any(started.classifier.kernel[...])
    change(folder / "config.json", num_labels=1)
    with pytest.raises(UserError, match="the model has 2 labels"):
        model_dir.read(f"hf:{folder}", kind=None)


def test_token_types_that_the_tokenizer_does_not_give_are_not_read(loaded, folder, tmp_path):
    """transformers gives a model the inputs of model_input_names, and a BERT without types uses zeros."""
    change(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    pair = ["a cat", "the dog sat"]
    assert "token_type_ids" not in transformers.AutoTokenizer.from_pretrained(folder)(*pair)
    model, tokenizer = loaded["bert"].model, loaded["bert"].tokenizer
    tokens = PairTokenizer(tokenizer).encode([tuple(pair)], max_length=40)
    ids, types = (jnp.asarray(pad_batch(rows, 40)) for rows in zip(*tokens, strict=True))
    expected = score(model, ids, jnp.zeros_like(types))
    assert np.abs(score(model, ids, types) - expected).min() > 1e-3
    formats.convert(f"hf:{folder}", tmp_path / "out", "hf", kind="cross_encoder")
    for place in (folder, tmp_path / "out"):
        found = model_dir.load(f"hf:{place}", kind="cross_encoder").model
        np.testing.assert_allclose(score(found, ids, types), expected, atol=1e-6)
    assert "token_type_ids" not in transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(*pair)


@pytest.mark.parametrize(
    "tokenizer_class", ["BertTokenizer", "PreTrainedTokenizerFast", None, "ElectraTokenizer"]
)
def test_the_class_of_a_tokenizer_decides_whether_it_gives_token_types(folder, tokenizer_class):
    change(folder / "tokenizer_config.json", model_input_names=..., tokenizer_class=tokenizer_class or ...)
    given = transformers.AutoTokenizer.from_pretrained(folder)("a cat", "the dog sat")
    found = model_dir.read(f"hf:{folder}", kind="cross_encoder")[0]
    assert (found.config.backbone.num_token_types > 1) == ("token_type_ids" in given)


def test_convert_refuses_settings_of_dual_encoders_for_a_cross_encoder(folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"is a cross-encoder.* omit --similarity, or .*--kind=dual_encoder"):
        formats.convert(f"hf:{folder}", out, "jaxir", similarity="dot")
    assert not out.exists()
    formats.convert(f"hf:{folder}", out, "jaxir", kind="dual_encoder", similarity="dot")
    config = model_dir.read(str(out))[0].config
    assert isinstance(config, DualEncoderConfig) and config.similarity == "dot"


def test_modernbert_head_uses_the_epsilon_of_its_norms(tmp_path):
    folder = edited(GOLDEN / "cross_modernbert", tmp_path, norm_eps=0.1)
    model = model_dir.load(f"hf:{folder}", kind="cross_encoder").model
    ids = jnp.array([[2, 5, 9, 3, 6, 3], [2, 7, 3, 8, 3, 0]], jnp.int32)
    hidden, found = nnx.jit(lambda m, x: (m.encoder(x), m.score(x, jnp.zeros_like(x))))(model, ids)
    real = np.asarray(ids != 0)[..., None]
    mean = (np.asarray(hidden) * real).sum(1) / real.sum(1)
    head = {name: np.asarray(x) for name, x in stored.params_of(model).items()}
    x = np.asarray(activations.gelu(jnp.asarray(mean @ head["pooler.kernel"])))
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1) * head["norm.scale"]
    expected = x @ head["classifier.kernel"] + head["classifier.bias"]
    np.testing.assert_allclose(found, expected[:, 0], atol=1e-5)


def test_pair_tokenizer_refuses_impossible_lengths_and_text(loaded):
    with pytest.raises(UserError, match="max_length is 4, but this tokenizer adds 3 special tokens"):
        PairTokenizer(loaded["bert"].tokenizer).encode([("a", "b")], max_length=4)
    with pytest.raises(UserError, match="not valid Unicode"):
        PairTokenizer(loaded["bert"].tokenizer).encode([("a", "\ud800")], max_length=10)


def test_sentencepiece_model_joins_pairs_as_transformers_does(sentencepiece_folder):
    alone = PairTokenizer(Tokenizer.load(sentencepiece_folder))
    assert alone.separator == "own"
    theirs = transformers.T5Tokenizer.from_pretrained(sentencepiece_folder)
    pairs = [("the " * n, "a cat " * m) for n in range(5) for m in range(3)] + [("the cat", "")]
    pairs += [("the " * 30, "the " * 40), ("the " * 40, "the " * 30)]
    for length in (6, 7, 20):
        how = {"truncation": "longest_first", "max_length": length}
        expected = theirs([list(pair) for pair in pairs], **how)["input_ids"]
        found = alone.encode(pairs, max_length=length)
        assert [row.ids.tolist() for row in found] == expected
        assert max(map(len, expected)) == length
    assert found[4].types.tolist() == [0] * 3 + [1] * 6

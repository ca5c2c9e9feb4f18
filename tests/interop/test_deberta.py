"""Tests for DeBERTa alone: attention by hand, gradients, tokens, and config.json."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxir import cli
from jaxir.data.text.pair_tokenizer import PairTokenizer
from jaxir.data.text.tokenizer import Tokenizer, pad_batch
from jaxir.interop import model_dir
from jaxir.interop.build import PretrainedCrossEncoder
from jaxir.interop.huggingface import hf
from jaxir.interop.model import stored
from jaxir.models.deberta import PUBLISHED, DebertaConfig, DisentangledAttention, log_buckets
from jaxir.planning import architecture
from tests.interop.folders import built, edited, tensors_of

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "deberta"
CROSS = GOLDEN.parent / "cross_deberta"


def own_bucket(distance: int, buckets: int, farthest: int) -> int:
    """Returns the bucket of a distance by the reference implementation's formula."""
    middle, size = buckets // 2, abs(distance)
    if size > middle:
        size = middle + math.ceil(math.log(size / middle) / math.log((farthest - 1) / middle) * (middle - 1))
    return int(max(min(math.copysign(size, distance), buckets - 1), -buckets))


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (16, 160)])
def test_buckets_are_those_of_torch_and_of_the_formula(buckets, farthest):
    distances = np.arange(-1100, 1101)
    expected = np.load(GOLDEN / "variants.npz")[f"buckets_{buckets}_{farthest}"].astype(np.int32)
    found = log_buckets(jnp.asarray(distances)[None], num_buckets=buckets, max_distance=farthest)[0]
    found, expected = (np.clip(x, -buckets, buckets - 1) for x in (found, expected))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found, [own_bucket(d, buckets, farthest) for d in distances.tolist()])


@pytest.mark.parametrize(
    ("terms", "shared"),
    [((True, True), True), ((True, True), False), ((True, False), False), ((False, True), True)],
)
def test_attention_is_the_sum_of_its_terms(terms, shared):
    """He et al. 2021, equations 2 and 4."""
    shape = {"embed_dim": 8, "num_heads": 2, "relative_buckets": 4, "relative_max_distance": 9}
    directions = {"content_to_position": terms[0], "position_to_content": terms[1]}
    config = DebertaConfig(**shape, **directions, shared_projections=shared)
    module = DisentangledAttention(config, rngs=nnx.Rngs(0))
    draw = np.random.default_rng(0)
    drawn = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), p.dtype), nnx.state(module))
    nnx.update(module, drawn)
    x, table, length = draw.normal(size=(7, 8)), draw.normal(size=(8, 8)), 7
    upwards = np.arange(2 * length) - (length - 1)
    rows = [[own_bucket(d, 4, 9) + 4 for d in way] for way in (-upwards, upwards)]
    mask = np.arange(length) < 6
    given = (jnp.asarray(x, jnp.float32)[None], jnp.asarray(mask)[None], jnp.asarray(table, jnp.float32))
    found = module(*given, jnp.asarray(rows, jnp.int32), key=None)[0]

    def through(linear, vectors):
        return vectors @ np.asarray(linear.kernel[...], float) + np.asarray(linear.bias[...], float)

    parts = (module.query, module.key, module.value)
    query, key, value = (through(part, x).reshape(length, 2, 4) for part in parts)
    own = (module.position_key or module.key, module.position_query or module.query)
    of_keys, of_queries = (through(part, table).reshape(8, 2, 4) for part in own)
    assert (own == parts[1::-1]) == (shared or not any(terms))
    pairs = np.array([[own_bucket(i - j, 4, 9) + 4 for j in range(6)] for i in range(length)])
    logits = np.einsum("ihd,jhd->hij", query, key[:6])
    logits += terms[0] * np.einsum("ihd,ijhd->hij", query, of_keys[pairs])
    logits += terms[1] * np.einsum("jhd,ijhd->hij", key[:6], of_queries[pairs])
    weights = np.exp(logits / math.sqrt(4 * (1 + sum(terms))))
    mixed = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), value[:6])
    out = through(module.out, mixed.reshape(length, 8))
    np.testing.assert_allclose(found[:6], out[:6], atol=2e-5 * np.abs(out).max())


@pytest.mark.parametrize("name", ["c2p", "p2c", "apart", "neither", "unbucketed"])
def test_other_attentions_are_those_of_transformers(name, tmp_path):
    golden = np.load(GOLDEN / "variants.npz")
    (tmp_path / "config.json").write_text(str(golden[f"{name}.config"]))
    arrays = {n.partition("/")[2]: golden[n].astype(np.float32) for n in golden if n.startswith(f"{name}/")}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    encoder = hf.read_encoder(tmp_path)
    ids = golden["ids"].astype(np.int32)
    expected = golden[f"{name}.output"]
    found = nnx.jit(lambda m, x: m(x))(built(encoder), jnp.asarray(ids))
    assert np.abs(np.where((ids != 0)[..., None], found - expected, 0)).max() < 2e-5 < np.abs(expected).max()
    (tmp_path / "out").mkdir()
    hf.write_encoder(tmp_path / "out", encoder.config, encoder.params, pad_id=0)
    assert hf.read_encoder(tmp_path / "out").config == encoder.config


def test_tokens_of_awkward_texts_are_those_of_transformers(tmp_path):
    """The tokenizer is read from spm.model, with and without config.json, and from a tokenizer.json."""
    golden = np.load(GOLDEN / "golden_texts.npz")
    texts = json.loads(str(golden["awkward"]))
    expected = np.split(golden["awkward_ids"], np.cumsum(golden["awkward_lengths"])[:-1])
    for name in ("spm.model", "tokenizer_config.json"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    tokenizers = [Tokenizer.load(folder) for folder in (GOLDEN, tmp_path)]
    tokenizers[0].save(tmp_path / "saved")
    for tokenizer in (*tokenizers, Tokenizer.load(tmp_path / "saved"), Tokenizer.load(CROSS)):
        found = tokenizer.encode_batch(texts, max_length=5000)
        assert [row.tolist() for row in found] == [row.tolist() for row in expected]
        assert (tokenizer.vocab_size, tokenizer.mask_id, tokenizer.pad_swap) == (81, 80, None)
    assert any(80 in row for row in expected) and any(3 in row for row in expected)  # [MASK], [UNK]
    ids = PairTokenizer(tokenizers[0]).encode([("a dog", "the cat")], max_length=40)[0].ids.tolist()
    one, other = (row.tolist() for row in tokenizers[0].encode_batch(["a dog", "the cat"], max_length=40))
    assert ids == one + other[1:]


def test_a_long_text_has_the_tokens_that_the_tokenizer_gives(tmp_path):
    tokenizer, text = Tokenizer.load(GOLDEN), "  the cat sat.  on the\tmat, and cats eat\n\nmice " * 300
    assert tokenizer._cut(text, 500) == text[:501]  # only as much of the text as needed is read
    whole = tokenizer.encode_batch([text], max_length=100_000)[0]
    cut = tokenizer.encode_batch([text], max_length=64)[0]
    assert len(whole) > 5000 and cut.tolist() == [*whole[:63], whole[-1]]


def test_texts_have_the_vectors_of_sentence_transformers():
    loaded, golden = model_dir.load(f"hf:{GOLDEN}"), np.load(GOLDEN / "golden_texts.npz")
    ids = pad_batch(loaded.tokenizer.encode_batch(golden["texts"].tolist(), max_length=24), 24)
    vectors = nnx.jit(lambda m, x: m.encode(x, tower="query"))(loaded.model, jnp.asarray(ids))
    np.testing.assert_allclose(vectors, golden["query"], atol=2e-6)


def test_a_cross_encoder_comes_out_as_it_went_in(tmp_path):
    flags = [f"--source=hf:{CROSS}", f"--output={tmp_path / 'out'}", "--format=hf"]
    assert cli.main("jaxir.convert:convert", flags) == 0
    before, after = (tensors_of(folder) for folder in (CROSS, tmp_path / "out"))
    assert before.keys() == after.keys() and all((before[n] == after[n]).all() for n in before)
    was, written = (json.loads((d / "config.json").read_text()) for d in (CROSS, tmp_path / "out"))
    assert written["architectures"] == ["DebertaV2ForSequenceClassification"]
    assert {n: written[n] for n in was if n in written} == {n: was[n] for n in was if n in written}
    tanh = was | {"pooler_hidden_act": "tanh"}
    (tmp_path / "out/config.json").write_text(json.dumps(tanh))
    (tmp_path / "out/SHA256SUMS").unlink()
    assert model_dir.load(f"hf:{tmp_path / 'out'}", kind="cross_encoder").model.config.activation == "tanh"


def test_config_json_as_the_published_ones_write_it(tmp_path):
    published = {"pos_att_type": "p2c|c2p", "share_att_key": True, "max_relative_positions": 160}
    folder = edited(GOLDEN, tmp_path, **published, legacy=...)
    assert hf.read_encoder(folder).config == hf.read_encoder(GOLDEN).config


@pytest.mark.parametrize(
    ("name", "millions", "blocks"),
    [("xsmall", 70.7, 22), ("small", 141.3, 44), ("base", 183.8, 86), ("large", 434.0, 304)],
)
def test_presets_have_the_published_sizes(name, millions, blocks):
    """He et al. 2023 and the models' pages: 22, 44, 86 and 304 M parameters besides the table of tokens."""
    shapes = stored.encoder_shapes(PUBLISHED[f"microsoft/deberta-v3-{name}"])
    total = sum(map(np.prod, shapes.values()))
    assert round(total / 1e6, 1) == millions
    assert round((total - np.prod(shapes["token.embedding"])) / 1e6) in (blocks - 1, blocks)


def test_planning_a_published_model_needs_no_network():
    lengths = {"query_max_length": 32, "passage_max_length": 128}
    reranker = PretrainedCrossEncoder(source="hf:microsoft/deberta-v3-base", **lengths)
    config, settings = architecture.describe(reranker)
    assert config.backbone == PUBLISHED["microsoft/deberta-v3-base"] and config.activation == "gelu"
    assert settings.pair_max_length == 160

"""Cross-encoders: pairs of texts joined on the device equal the tokenizers' pairs; dropout."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.data.text.pair_tokenizer import PairTokenizer
from jaxir.data.text.tokenizer import Tokenizer, pad_batch
from jaxir.interop.build import PretrainedCrossEncoder
from jaxir.interop.model import stored
from jaxir.models.cross_encoder import join

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
PAIRS = [("da de", "ha he hi"), ("", "la"), ("ma me mi mo", ""), ("sa", "ta te ti to ra re"), ("", "")]


def apart(name: str, lengths=(16, 24)) -> list[jax.Array]:
    return side_by_side(Tokenizer.load(GOLDEN / f"cross_{name}"), lengths)


def side_by_side(tokenizer: Tokenizer, lengths=(16, 24)) -> list[jax.Array]:
    texts = zip(*PAIRS, strict=True)
    rows = [tokenizer.encode_batch(side, max_length=n) for side, n in zip(texts, lengths, strict=True)]
    return [jnp.asarray(pad_batch(side, n)) for side, n in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "deberta"])
def test_joined_texts_equal_the_tokenizers_pairs(name):
    pairs = PairTokenizer(Tokenizer.load(GOLDEN / f"cross_{name}"))
    assert (pairs.separator is None) == (name != "roberta")
    ids, types = jax.jit(lambda q, p: join(q, p, separator=pairs.separator))(*apart(name))
    expected = pairs.encode(PAIRS, max_length=40)
    assert ids.shape == types.shape == (5, 39 if pairs.separator is None else 40)
    for row, kinds, pair in zip(np.asarray(ids), np.asarray(types), expected, strict=True):
        assert row[: len(pair.ids)].tolist() == pair.ids.tolist() and not row[len(pair.ids) :].any()
        if name == "bert":
            assert kinds[: len(pair.ids)].tolist() == pair.types.tolist() and kinds[: len(pair.ids)].any()


def test_a_padding_token_in_the_text_does_not_end_a_query():
    pairs, given = PairTokenizer(Tokenizer.load(GOLDEN / "cross_bert")), ("a [PAD] cat", "the [PAD] dog")
    rows = [Tokenizer.load(GOLDEN / "cross_bert").encode_batch([text], max_length=16) for text in given]
    assert all(PADDING_TOKEN in row[0][1:-1] for row in rows)
    ids, _ = jax.jit(lambda q, p: join(q, p, separator=None))(*(jnp.asarray(pad_batch(r, 16)) for r in rows))
    (expected,) = pairs.encode([given], max_length=31)
    np.testing.assert_array_equal(ids, pad_batch([expected.ids], 31))


def t5_with_pairs(folder: Path) -> Path:
    """The golden T5 with the template for pairs of T5's published tokenizers."""
    path = shutil.copytree(GOLDEN / "t5_1_1", folder / "t5") / "tokenizer.json"
    content = json.loads(path.read_text())
    one = json.dumps(content["post_processor"]["single"])
    content["post_processor"]["pair"] = json.loads(one) + json.loads(one.replace('"A"', '"B"'))
    path.write_text(json.dumps(content))
    return path.parent


def test_t5_scores_pairs_by_a_head_over_the_mean(tmp_path):
    loaded = PretrainedCrossEncoder(source=f"hf:{t5_with_pairs(tmp_path)}").build(seed=0)
    model, config = loaded.model, loaded.model.config
    assert (config.separator, config.pooling, config.activation) == ("own", "mean", "tanh")
    ids, types = jax.jit(lambda q, p: join(q, p, separator="own"))(*side_by_side(loaded.tokenizer))
    tokens = PairTokenizer(loaded.tokenizer).encode(PAIRS, max_length=40)
    assert ids.shape == types.shape == (5, 40)
    np.testing.assert_array_equal(ids, pad_batch([pair.ids for pair in tokens], 40))
    hidden = np.asarray(nnx.jit(lambda m, x: m.encoder(x))(model, ids))
    real = np.asarray(ids != 0)[..., None]
    mean = (hidden * real).sum(1) / real.sum(1)
    head = {n: np.asarray(x) for n, x in stored.flatten(nnx.to_pure_dict(nnx.state(model))).items()}
    expected = np.tanh(mean @ head["pooler.kernel"] + head["pooler.bias"])
    expected = expected @ head["classifier.kernel"] + head["classifier.bias"]
    scores = nnx.jit(lambda m, q, p: m.score_texts(q, p))(model, *side_by_side(loaded.tokenizer))
    np.testing.assert_allclose(scores, expected[:, 0], atol=1e-5)
    assert np.ptp(scores) > 0.01


def test_score_texts_equals_score_and_follows_the_dropout_key():
    loaded = PretrainedCrossEncoder(source=f"hf:{GOLDEN / 'cross_bert'}").build(seed=0)
    texts = apart("bert")
    tokens = PairTokenizer(loaded.tokenizer).encode(PAIRS, max_length=40)
    ids, types = (jnp.asarray(pad_batch(rows, 40)) for rows in zip(*tokens, strict=True))
    by_pair = nnx.jit(lambda m, x, t: m.score(x, t))(loaded.model, ids, types)
    scored = nnx.jit(lambda m, q, p, key: m.score_texts(q, p, key=key))
    found = scored(loaded.model, *texts, None)
    np.testing.assert_allclose(found, by_pair, atol=1e-5)
    assert np.ptp(found) > 0.01
    dropped = [scored(loaded.model, *texts, jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.abs(dropped[0] - found).min() > 1e-4 and np.abs(dropped[0] - dropped[2]).min() > 1e-4


def test_a_tokenizer_that_joins_pairs_differently_is_refused(tmp_path):
    tokenizer = Tokenizer.load(GOLDEN / "cross_bert")
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["pair"].reverse()
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="which is not supported: each text must begin"):
        _ = PairTokenizer(Tokenizer.load(tmp_path)).separator

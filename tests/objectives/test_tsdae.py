"""TSDAE: deletion, the inputs of the decoder, the loss, and the files of texts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import TextFormat
from jaxir.data.sets.texts import Texts
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.losses.tokens import token_cross_entropy
from jaxir.models.decoder import DecoderConfig, VectorDecoder
from jaxir.objectives.clm_autoencoder import CLMAutoencoder, delete_tokens
from jaxir.objectives.tsdae import TSDAE
from tests.objectives.unlabelled import batch_of, made, make_model, make_texts, value_and_grad


def test_tsdae_deletes_the_share_of_tokens():
    assert TSDAE().deletion == 0.6 and TSDAE().mean_over == "tokens" and CLMAutoencoder().deletion == 0.0
    ids = np.tile(np.asarray(make_texts()), (200, 1))
    ids[:, 1:-1] = np.where(ids[:, 1:-1] > 3, np.arange(4, 14), ids[:, 1:-1])  # words in ascending order
    delete = jax.jit(delete_tokens, static_argnames="share")
    found = np.asarray(delete(jnp.asarray(ids), jax.random.key(0), share=0.6))
    left, words = (found > 3).sum(1), (ids > 3).sum(1)
    assert (left >= 1).all() and (left <= words).all()
    for before, after in zip(ids, found, strict=True):
        count = (after != 0).sum()
        assert after[0] == 2 and after[count - 1] == 3 and not after[count:].any()
        some = after[1 : count - 1]
        assert (np.diff(some) > 0).all() and set(some) <= set(before[before > 3])
    # The longest texts lose the given share, and different words in each row.
    many = words == words.max()
    assert abs(left[many].mean() / words.max() - 0.4) < 0.05
    assert len({tuple(row) for row in found[many]}) > 50
    np.testing.assert_array_equal(delete(jnp.asarray(ids), jax.random.key(0), share=0.0), ids)
    one = jnp.asarray([[2, 9, 3, 0], [2, 3, 0, 0]], jnp.int32)
    np.testing.assert_array_equal(delete(one, jax.random.key(1), share=0.99), one)


def test_the_decoder_reads_only_the_vector_and_earlier_tokens():
    config = DecoderConfig(embed_dim=16, vector_dim=8, head_dim=8, mlp_dim=32)
    decoder = VectorDecoder(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x, vector = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((2, 6, 16), (2, 8)))
    mask = jnp.ones((2, 6), bool).at[1, 4:].set(False)
    run = nnx.jit(lambda m, x, v, mask, key=None: m(x, mask, v, key=key))
    found = run(decoder, x, vector, mask)
    later = run(decoder, x.at[:, 3].multiply(-1.0), vector, mask)
    np.testing.assert_array_equal(later[:, :3], found[:, :3])
    assert (np.abs(later - found)[:, 3:].max(-1) > 1e-4).all()
    other = run(decoder, x, vector.at[0].add(1.0), mask)
    assert (np.abs(other - found)[0].max(-1) > 1e-4).all(), "every position sees the vector"
    np.testing.assert_array_equal(other[1], found[1])
    dropped = [run(decoder, x, vector, mask, jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.abs(dropped[0] - dropped[2]).max() > 1e-3


def test_the_loss_of_tokens():
    rng = np.random.default_rng(0)
    hidden, table = (rng.normal(size=s).astype(np.float32) for s in ((2, 3, 4), (5, 4)))
    targets, kept = rng.integers(0, 5, (2, 3)).astype(np.int32), np.array([[1, 1, 0], [1, 0, 0]], bool)
    logits = hidden.astype(np.float64) @ table.T
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(shares, targets[..., None], -1))[..., 0][kept].mean()
    arrays = [jnp.asarray(x) for x in (hidden, table, targets, kept)]
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(token_cross_entropy, has_aux=True))(*arrays)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert metrics["token_accuracy"] == pytest.approx((logits.argmax(-1) == targets)[kept].mean())
    assert not np.asarray(gradient)[~kept].any() and (np.abs(np.asarray(gradient)[kept]).max(-1) > 1e-3).all()


@pytest.mark.slow
def test_only_the_passage_tower_is_trained_and_deletion_needs_a_key():
    objective, model = TSDAE(), make_model(sharing="ade")
    auxiliary, batch = made(objective, model), batch_of(make_texts())
    _, metrics, reached, moved = value_and_grad(objective, model, auxiliary, batch, None)
    assert all(np.abs(g).max() > 0 for g in moved.values())
    for name, gradient in reached.items():
        assert name.startswith("passage_encoder") or not gradient.any(), name
    _, noisy, *_ = value_and_grad(objective, model, auxiliary, batch, jax.random.key(0))
    assert noisy["tokens_left"] < metrics["tokens_left"] - 1


def test_texts_are_lines_documents_or_a_folder(tmp_path):
    (tmp_path / "lines.txt").write_text("da de\n\nhe ha\n")
    documents = [
        {"_id": "1", "title": "da", "text": "de"},
        {"_id": "2", "text": ""},
        {"_id": "3", "text": "ha"},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "da"}\n')
    tokenizer = Tokenizer.load(Path(__file__).parents[1] / "golden" / "bert")
    features = TSDAE().features(TextFormat(8, 10))
    sizes = []
    for path in ("lines.txt", "corpus.jsonl", "."):
        data = Texts(path=str(tmp_path / path)).build(tokenizer, features)
        batch = next(data.batches(batch_size=2, seed=0))
        assert batch["text_ids"].shape == (2, 10) and batch.keys() == {"text_ids"}
        sizes.append(data.num_examples)
    assert sizes == [2, 2, 2]
    (tmp_path / "bad.txt").write_bytes(b"da de\n\xff\n")
    with pytest.raises(BadInputError, match=r"bad\.txt:2"):
        Texts(path=str(tmp_path / "bad.txt")).build(tokenizer, features)
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        Texts(path=str(tmp_path / "nowhere.txt")).build(tokenizer, features)
    for name in ("a.csv", "a.tsv.gz", "a.JSON", "a.parquet"):
        (tmp_path / name).write_text('id,text\n1,"da de"\n')
        with pytest.raises(UserError, match=rf"{name}: texts are read from a file .*, not from a table"):
            Texts(path=str(tmp_path / name)).build(tokenizer, features)
    with pytest.raises(
        UserError, match="batch_size is 3, but there are only 2 texts: give a smaller batch_size"
    ):
        data.batches(batch_size=3, seed=0)

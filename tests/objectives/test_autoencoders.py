"""Autoencoders and the masked language model: choice of tokens, masking, reach of decoders, and losses."""

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
from jaxir.objectives.masked_lm import MaskedLM
from jaxir.objectives.masking import choose_tokens, mask_as_bert, most_chosen
from jaxir.objectives.mlm_autoencoder import MLMAutoencoder
from jaxir.objectives.seed import Seed
from jaxir.objectives.tsdae import TSDAE
from tests.objectives.unlabelled import (
    CLS,
    MASK,
    SEP,
    WORDS,
    batch_of,
    made,
    make_model,
    make_texts,
    value_and_grad,
)

SMALL = {"decoder_head_dim": 16, "decoder_layers": 1}
choose = jax.jit(choose_tokens, static_argnames="share")


def test_the_share_of_words_is_chosen_and_at_least_one():
    ids = jnp.tile(make_texts(rows=40), (50, 1))
    words = (np.asarray(ids) > SEP).sum(1)
    for share in (0.5, 0.8):
        chosen = np.asarray(choose(ids, jax.random.key(0), share=share))
        assert not chosen[np.asarray(ids) <= SEP].any() and (chosen.sum(1) >= 1).all()
        long = words >= 8
        assert chosen[long].sum() / words[long].sum() == pytest.approx(share, abs=0.02)
        assert (np.abs(chosen.sum(1) - share * words)[words > 1] < 1).all()
    nothing = jnp.asarray([[CLS, SEP, 0, 0]], jnp.int32)
    assert not choose(nothing, jax.random.key(0), share=0.8).any()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_words_are_chosen_with_equal_probability_up_to_the_maximum(share):
    for length in (3, 12, 22):
        ids = np.full((20_000, length), 7, np.int32)
        ids[:, 0], ids[:, -1] = CLS, SEP
        chosen = np.asarray(choose(jnp.asarray(ids), jax.random.key(length), share=share))
        words = length - 2
        assert chosen.sum(1).max() == most_chosen(length, share) or share * words % 1 < 1e-3
        rates = chosen[:, 1:-1].mean(0)
        np.testing.assert_allclose(rates, max(share, 1 / words), atol=0.015)


def test_logits_are_computed_at_masked_tokens_only():
    model, batch = make_model(dropout=0.0), batch_of(make_texts())
    auxiliary = made(MaskedLM(), model)
    text = str(
        jax.make_jaxpr(lambda key: MaskedLM()(model, batch, key, auxiliary=auxiliary)[0])(jax.random.key(0))
    )
    assert most_chosen(12, 0.15) == 2
    assert f"f32[8,2,{WORDS}]" in text and f"f32[8,12,{WORDS}]" not in text


def test_masking_follows_berts_shares():
    ids = jnp.full((200, 50), 7, jnp.int32)
    chosen = jnp.arange(50)[None] < jnp.full((200, 1), 40)
    found = np.asarray(mask_as_bert(ids, chosen, jax.random.key(0), mask_id=MASK, vocab_size=WORDS))
    assert (found[:, 40:] == 7).all()
    part = found[:, :40]
    assert (part == MASK).mean() == pytest.approx(0.8 + 0.1 / (WORDS - 1), abs=0.02)
    assert (part == 7).mean() == pytest.approx(0.1 + 0.1 / (WORDS - 1), abs=0.02)
    assert part.min() == 1 and len(np.unique(part)) == WORDS - 1


@pytest.mark.slow
def test_the_clm_autoencoders_loss_is_equation_3_4():
    model, ids = make_model(dropout=0.0), make_texts()
    objective = CLMAutoencoder(**SMALL)
    auxiliary = made(objective, model)
    loss, metrics = objective(model, batch_of(ids), auxiliary=auxiliary)
    vector = model.unnormalized().encode(ids, tower="passage")
    table = model.encoder.token_table
    total = 0.0
    for i, row in enumerate(np.asarray(ids)):
        count = (row != 0).sum()
        for t in range(1, count):  # predict each token from the vector and the tokens before it alone
            hidden = auxiliary(table(ids[i : i + 1, :t]), jnp.ones((1, t), bool), vector[i : i + 1])[0, -1]
            logits = np.asarray(table.embedding[...] @ hidden, np.float64)
            total -= logits[row[t]] - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(loss, total / len(ids), rtol=1e-4)
    assert set(metrics) == {"token_accuracy"}
    by_token = CLMAutoencoder(mean_over="tokens", **SMALL)(model, batch_of(ids), auxiliary=auxiliary)[0]
    targets = float((np.asarray(ids)[:, 1:] != 0).sum())
    np.testing.assert_allclose(by_token, loss * len(ids) / targets, rtol=1e-5)


@pytest.mark.parametrize("vector", ["first", "attention"])
def test_the_mlm_autoencoders_loss_is_equation_3_5(vector):
    model, ids, key = make_model(dropout=0.0), make_texts(), jax.random.key(4)
    objective = MLMAutoencoder(vector=vector, decoder_dropout=0.0, **SMALL)
    auxiliary = made(objective, model)
    loss, metrics = nnx.jit(objective)(model, batch_of(ids), key, auxiliary=auxiliary)
    chosen = np.asarray(choose_tokens(ids, jax.random.split(key, 3)[0], share=0.8))
    assert metrics["tokens_masked"] == pytest.approx(chosen.sum(1).mean())

    @nnx.jit
    def decoded(model, decoder, shown):
        vectors, x = model.unnormalized().encode(ids, tower="passage"), model.encoder.token_table(shown)
        return decoder(x.at[:, 0].set(vectors) if vector == "first" else x, ids != 0, vectors)

    hidden = np.asarray(decoded(model, auxiliary.decoder, jnp.where(chosen, MASK, ids)), np.float64)
    logits = hidden @ np.asarray(model.encoder.token_table.embedding[...]).T
    total = 0.0
    for i, row in enumerate(np.asarray(ids)):
        for m in np.flatnonzero(chosen[i]):
            total -= logits[i, m, row[m]] - np.log(np.exp(logits[i, m]).sum())
    np.testing.assert_allclose(loss, total / len(ids), rtol=1e-4)
    has_attention = any(
        "value" in str(path) and "attention" not in str(path)
        for path, _ in nnx.to_flat_state(nnx.state(auxiliary))
    )
    assert has_attention == (vector == "attention")


@pytest.mark.parametrize(("span", "num_layers"), [(None, 1), (1, 3), (2, 1), (2, 3), (4, 2)])
def test_the_reach_of_a_decoder_to_later_tokens(span, num_layers):
    """Token t changes the output at t and, per layer, at span - 1 more; the vector changes all outputs."""
    sizes = {"embed_dim": 16, "vector_dim": 16, "head_dim": 8, "mlp_dim": 32, "num_layers": num_layers}
    decoder = VectorDecoder(DecoderConfig(**sizes, span=span, dropout_rate=0.0), rngs=nnx.Rngs(0))
    graph, state = nnx.split(decoder)
    decoder = nnx.merge(graph, jax.tree.map(lambda x: 3 * x, state))  # larger, so that distant tokens matter
    x, vector = (jax.random.normal(jax.random.key(n), shape) for n, shape in ((0, (1, 12, 16)), (1, (1, 16))))
    mask = jnp.ones((1, 12), bool)
    before = decoder(x, mask, vector)
    moved = np.abs(decoder(x.at[0, 3].multiply(-1.0), mask, vector) - before).max(-1)[0] > 1e-6
    end = 12 if span is None else min(12, 4 + (span - 1) * num_layers)
    assert np.flatnonzero(moved).tolist() == list(range(3, end))
    assert (np.abs(decoder(x, mask, -vector) - before).max(-1) > 1e-4).all()


def test_seeds_loss_is_a_masked_language_model_and_a_decoder_of_short_reach():
    model, ids, key = make_model(dropout=0.0), make_texts(), jax.random.key(4)
    objective = Seed(decoder_dropout=0.0, **SMALL)
    auxiliary = made(objective, model)
    loss, metrics = nnx.jit(objective)(model, batch_of(ids), key, auxiliary=auxiliary)
    words, table = auxiliary.masked_lm, model.encoder.token_table
    masked, chosen = words.mask(ids, jax.random.split(key, 4)[:2], share=0.15)

    def log_p(hidden, bias=0.0):
        logits = np.asarray(hidden @ table.embedding[...].T, np.float64) + bias
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    of_masked = log_p(words.head(model.encoder(masked, key=None)), np.asarray(words.head.bias[...]))
    terms = [of_masked[i, j, ids[i, j]] for i, j in zip(*np.nonzero(np.asarray(chosen)), strict=True)]
    np.testing.assert_allclose(metrics["masked_lm_loss"], -np.mean(terms), rtol=1e-5)

    vectors = nnx.jit(lambda model: model.unnormalized().encode(masked, tower="passage"))(model)

    @nnx.jit
    def decoded(decoder, table, others, seen):
        return decoder(table(others), seen, vectors)

    total, count = 0.0, 0
    rows, places = np.asarray(ids), np.arange(ids.shape[1])
    for t in range(1, ids.shape[1]):
        # With one layer and span 2, the default, token t depends on tokens t - 2 and t - 1 and the vector.
        # Earlier tokens are replaced by another text's, later ones are removed.
        others = np.where(places < t - 2, np.roll(rows, -1, axis=0), rows) * (places < t)
        seen = np.broadcast_to(places < t, rows.shape)
        hidden = decoded(auxiliary.decoder, table, others, seen)[:, t - 1]
        for of_next, row in zip(log_p(hidden), rows, strict=True):
            if row[t] != 0:
                total, count = total - of_next[row[t]], count + 1
    np.testing.assert_allclose(metrics["decoder_loss"], total / count, rtol=1e-4)
    np.testing.assert_allclose(loss, metrics["masked_lm_loss"] + metrics["decoder_loss"], rtol=1e-6)
    assert (Seed().decoder_layers, Seed().masking) == (3, 0.15)  # the paper's settings


def test_tsdae_deletes_the_share_of_tokens():
    assert TSDAE().deletion == 0.6 and TSDAE().mean_over == "tokens" and CLMAutoencoder().deletion == 0.0
    ids = np.tile(np.asarray(make_texts()), (200, 1))
    ids[:, 1:-1] = np.where(ids[:, 1:-1] > 3, np.arange(4, 14), ids[:, 1:-1])  # all words of a row differ
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
    documents = (
        '{"_id": "1", "title": "da", "text": "de"}',
        '{"_id": "2", "text": ""}',
        '{"_id": "3", "text": "ha"}',
    )
    (tmp_path / "corpus.jsonl").write_text("\n".join(documents))
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
    with pytest.raises(UserError, match="batch_size is 3, but there are only 2 texts: give a smaller"):
        data.batches(batch_size=3, seed=0)

"""Decoding: the tokens of transformers, exhaustive search, and distributions."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from jaxir.interop import model_dir
from jaxir.models import decoding
from jaxir.models.decoding import Decoding
from jaxir.models.seq2seq import START, Seq2SeqConfig
from jaxir.models.t5 import T5Config

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NAMES = ["seq2seq_1_0", "seq2seq_1_1"]
EOS, BEAMS, NEW_TOKENS = 1, 4, 12
pytestmark = pytest.mark.compiled


@functools.cache
def model_and_golden(name: str, file: str = "golden.npz"):
    model = model_dir.load(f"hf:{GOLDEN / name}", kind="seq2seq").model
    return model, dict(np.load(GOLDEN / name / file))


@functools.partial(jax.jit, static_argnums=(0, 3))
def generated(graph, state, source, how):
    return nnx.merge(graph, state).generate(source, how)


def generate(model, source, how):
    return np.asarray(generated(*nnx.split(model), jnp.asarray(source), how))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name):
    model, golden = model_and_golden(name)
    source, expected = golden["source_ids"], golden["greedy"]
    ends = (expected == EOS).any(1)
    assert ends.any() and not ends.all()
    how = Decoding(max_new_tokens=NEW_TOKENS)
    # Generate for a batch with a row of padding, which gets no output; then row by row, without padding.
    padded = np.concatenate([source, np.zeros_like(source[:1])])
    np.testing.assert_array_equal(generate(model, padded, how)[:, 0], np.pad(expected, ((0, 1), (0, 0))))
    for row, tokens in zip(source[:2], expected, strict=False):
        np.testing.assert_array_equal(generate(model, row[None, : (row != 0).sum()], how)[0, 0], tokens)


@pytest.mark.parametrize("name", NAMES)
def test_beams_equal_transformers(name):
    model, golden = model_and_golden(name)
    expected = golden["beams"]
    assert (expected[:, 0] != golden["greedy"]).any()
    assert len(np.unique((expected != 0).sum(-1))) > 3
    how = Decoding(max_new_tokens=NEW_TOKENS, num_beams=BEAMS, num_outputs=BEAMS)
    np.testing.assert_array_equal(generate(model, golden["source_ids"], how), expected)


TINY = T5Config(vocab_size=50, embed_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=16)


def test_incremental_decoding_equals_teacher_forcing():
    backbone = dataclasses.replace(TINY, scan_layers=True)
    model = Seq2SeqConfig(backbone=backbone, num_decoder_layers=2).make(rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(2, 50, (2, 6)) * (np.arange(6) < [[6], [4]]), jnp.int32)
    # The target is long enough for distances in the last bucket.
    target = jnp.asarray(rng.integers(2, 50, (4, 140)), jnp.int32)

    @nnx.jit
    def both(model, source, target):
        # The two targets of each source share the source's memory.
        whole = model(jnp.repeat(source, 2, axis=0), target)
        memory, caches = model.remember(source), model.decoder.empty_caches(4, 140)

        def step(state, ids):
            caches, previous = state
            logits, caches = model.next_logits(previous, caches, memory)
            return (caches, ids), logits

        first = jnp.full((4,), START, jnp.int32)
        _, found = jax.lax.scan(step, (caches, first), target.T)
        return whole, found.swapaxes(0, 1)

    whole, found = both(model, source, target)
    np.testing.assert_allclose(found, whole, atol=2e-5)
    assert np.abs(whole[0] - whole[1]).max() > 0.1 and np.abs(whole).max() > 1.0


def test_training_drops_out_and_its_gradient_reaches_everything():
    model = Seq2SeqConfig(backbone=TINY, num_decoder_layers=1).make(rngs=nnx.Rngs(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(2, 50, (2, 6)), jnp.int32)
    graph, state = nnx.split(model)

    @jax.jit
    @jax.value_and_grad
    def both(state, key):
        return jnp.square(nnx.merge(graph, state)(ids, ids, key=key)).sum()

    found = [both(state, jax.random.key(seed)) for seed in (0, 0, 1)]
    for path, gradient in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(found[0][1])):
        assert np.abs(gradient).max() > 0, path
    assert found[0][0] == found[1][0] != found[2][0]


# A model without a network: the next token depends on the last one only.
TABLE = np.random.default_rng(3).normal(size=(6, 6)).astype(np.float32) * 1.5


def next_logits(ids, state):
    return jnp.asarray(TABLE)[ids], state + 1


def softmax(x):
    return scipy.special.softmax(x.astype(np.float64), axis=-1)


def test_samples_have_the_distribution_of_the_model():
    keys = jax.random.split(jax.random.key(5), 20_000)
    how = {"ended": jnp.zeros(len(keys), bool), "max_new_tokens": 3, "start_id": 0, "eos_id": EOS}

    @jax.jit
    def sampled(keys):
        return decoding.decode(
            next_logits, jnp.int32(0), decoding.sampler(keys, Decoding(temperature=0.7)), **how
        )

    found = np.asarray(sampled(keys))
    expected = softmax(TABLE / 0.7)

    def check(tokens, probabilities):
        counts = np.bincount(tokens, minlength=6)
        assert scipy.stats.chisquare(counts, probabilities * len(tokens)).pvalue > 1e-3

    check(found[:, 0], expected[0])
    for token in range(6):
        after = found[found[:, 0] == token, 1]
        if token == EOS:
            assert not after.any()
        else:
            check(after, expected[token])
    with pytest.raises(AssertionError):  # guard: the check fails for another temperature
        check(found[:, 0], softmax(TABLE[0]))


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(3, None), (None, 0.6), (4, 0.8), (99, 1.0), (1, None), (None, 1e-6)]
)
def test_likely_equals_the_definition(top_k, top_p):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 12)).astype(np.float32) * 2
    left, ids = decoding.likely(jnp.asarray(logits), top_k=top_k, top_p=top_p)
    ids = np.broadcast_to(np.arange(12), left.shape) if ids is None else ids
    found = np.zeros(logits.shape, bool)
    np.put_along_axis(found, np.asarray(ids), np.isfinite(left), axis=1)
    expected = np.where(found, logits, -np.inf)
    np.testing.assert_array_equal(np.take_along_axis(expected, np.asarray(ids), axis=1), left)
    for row, kept in zip(logits, found, strict=True):
        order = np.argsort(-row)[:top_k]
        shares = softmax(row[order])
        fewest = next(
            n for n in range(1, len(order) + 1) if n == len(order) or shares[:n].sum() >= (top_p or 1)
        )
        assert set(np.flatnonzero(kept)) == set(order[:fewest])
    if (top_k, top_p) == (4, 0.8):
        keys = jax.random.split(jax.random.key(0), 4000)
        choose = decoding.sampler(keys, Decoding(top_k=4, top_p=0.8))
        drawn = choose(jnp.broadcast_to(jnp.asarray(logits[0]), (4000, 12)), jnp.int32(0))
        assert set(np.asarray(drawn).tolist()) == set(np.flatnonzero(found[0]).tolist())


def test_nucleus_keeps_ties():
    logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.1, 0.1], [0.2] * 5, [0.1, 0.2, 0.4, 0.1, 0.2]]))
    left, _ = decoding.likely(logits, top_k=None, top_p=0.5)
    assert np.isfinite(left).tolist() == [[1, 1, 1, 0, 0], [1] * 5, [0, 1, 1, 0, 1]]


def test_nucleus_of_a_large_vocabulary_equals_sorting():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(40, 32_128)) * rng.uniform(0.1, 3, (40, 1))).astype(np.float32)
    sums = np.cumsum(np.sort(softmax(logits), axis=1)[:, ::-1], axis=1)
    for top_p in (0.05, 0.5, 0.95):
        left, _ = jax.jit(functools.partial(decoding.likely, top_k=None, top_p=top_p))(logits)
        # Float32 sums over a vocabulary are exact to 1e-6.
        least, most = ((sums < top_p + error).sum(1) + 1 for error in (-1e-6, 1e-6))
        kept = np.isfinite(left).sum(1)
        assert (least <= kept).all() and (kept <= most).all()
        assert len(set(kept)) > 15


@pytest.mark.parametrize("how", [Decoding(top_k=10), Decoding(top_p=0.9), Decoding(top_k=10, top_p=0.9)])
def test_no_step_sorts_the_vocabulary(how):
    def choose(logits):
        return decoding.sampler(jax.random.split(jax.random.key(0), 4), how)(logits, jnp.int32(0))

    def sorts(function):
        text = jax.jit(function).lower(jnp.zeros((4, 32_128))).compile().as_text()
        return re.findall(r"= .*\bsort\(", text)

    assert sorts(lambda x: jnp.sort(x, axis=-1))
    assert not sorts(choose)


def test_beams_find_the_best_of_all_outputs():
    length, logs = 3, np.log(softmax(TABLE))
    scores = {}
    for tokens in itertools.product(range(6), repeat=length):
        end = tokens.index(EOS) + 1 if EOS in tokens else length
        path = (0, *tokens[:end])
        score = sum(logs[a, b] for a, b in itertools.pairwise(path)) / end
        scores[tokens[:end]] = score
    best = sorted(scores, key=scores.get, reverse=True)
    how = {"max_new_tokens": length, "start_id": 0, "eos_id": EOS, "ended": jnp.array([False, True])}
    tokens, found = decoding.beam_search(next_logits, jnp.int32(0), num_beams=len(best), **how)
    # Some outputs have equal scores: 0 5 0 and 5 0 0 take the same steps after 0.
    np.testing.assert_allclose(found[0], [scores[output] for output in best], rtol=1e-5)
    whole = (tuple(output) for output in tokens[0].tolist())
    outputs = [output[: output.index(EOS) + 1] if EOS in output else output for output in whole]
    np.testing.assert_allclose([scores[output] for output in outputs], found[0], rtol=1e-5)
    assert set(outputs) == set(best)
    assert not tokens[1].any()


def test_loop_ends_with_the_last_output_and_compiles_once_per_shape():
    steps = []

    def counted(ids, state):
        jax.debug.callback(lambda: steps.append(1))
        # Row n ends after n + 1 tokens.
        return jax.nn.one_hot(jnp.where(state >= jnp.arange(3), EOS, 4), 6), state + 1

    shared = {"max_new_tokens": 50, "start_id": 0, "eos_id": EOS}
    tokens = decoding.decode(counted, jnp.int32(0), decoding.greedy, ended=jnp.zeros(3, bool), **shared)
    jax.effects_barrier()
    assert len(steps) == 3
    assert tokens[:, :4].tolist() == [[1, 0, 0, 0], [4, 1, 0, 0], [4, 4, 1, 0]]
    assert not tokens[:, 4:].any()
    model, golden = model_and_golden("seq2seq_1_1")
    before = generated._cache_size()
    for source in (golden["source_ids"], golden["source_ids"][::-1]):
        generate(model, source, Decoding(max_new_tokens=3, top_k=7, seed=2))
    assert generated._cache_size() == before + 1


def test_samples_depend_on_text_and_seed_only():
    model, golden = model_and_golden("seq2seq_1_1")
    source, how = golden["source_ids"], Decoding(max_new_tokens=6, num_outputs=4, temperature=2.0)
    found = generate(model, source, how)
    np.testing.assert_array_equal(generate(model, np.pad(source[::-1], ((0, 0), (0, 2))), how)[::-1], found)
    assert len(np.unique(found.reshape(-1, 6), axis=0)) == 24  # all outputs differ
    other = Decoding(max_new_tokens=6, num_outputs=4, temperature=2.0, seed=1)
    assert (generate(model, source, other) != found).any((1, 2)).all()

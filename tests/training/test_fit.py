"""Training as a library call: pairs of texts in, an encoder out, as docs/python.md has it."""

import contextlib
import inspect
import io
import json
import os
import signal
import tempfile
from pathlib import Path

import gin
import jax
import numpy as np
import pytest

import jaxir
from jaxir import Contrastive, DualEncoder, ExactIndex, Pairs, Pretrained, fit, in_batch_softmax
from jaxir.cli import gin_config
from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.objectives.pair_batch import pair_features
from jaxir.runtime.partitioning import MeshConfig
from jaxir.train import train as train_command
from jaxir.training import fit as fit_module
from tests.training.saved_run import log
from tests.training.tiny_run import Hooked

BERT = f"st:{Path(__file__).parents[1] / 'golden/bert'}"
WORDS = [f"{x}{y}" for x in "abcde" for y in "aeiou"][:20]
TEXTS = [(f"{a} {b}", f"{b} {a} {a}") for a in WORDS for b in WORDS[:3]]
PAIRS = Pairs([query for query, _ in TEXTS], [passage for _, passage in TEXTS])
SETTINGS = {"steps": 6, "batch_size": 8, "optimizer": jaxir.AdamW(learning_rate=1e-3), "log_every": 1}
SETTINGS["partitioner"] = MeshConfig().build(jax.devices()[:1])


def encode(encoder):
    return encoder.encode_passages(PAIRS.passages[:9], show_progress=False)


def losses(printed: str) -> list[float]:
    return [float(line.split()[3]) for line in printed.splitlines() if "  loss " in line]


@pytest.fixture(scope="module")
def start() -> DualEncoder:
    return DualEncoder.load(BERT)


@pytest.fixture(scope="module")
def small(one_layer) -> DualEncoder:
    return DualEncoder.load(f"st:{one_layer}")


@pytest.fixture(scope="module")
def fitted(small, tmp_path_factory):
    """The trained encoder, the vectors before training, the printed losses, and the temporary directory."""
    place, before = tmp_path_factory.mktemp("fitted"), encode(small)
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stderr(io.StringIO()) as said:
        patched.setattr(tempfile, "tempdir", str(place))
        return fit(small, PAIRS, **SETTINGS), before, losses(said.getvalue()), place


def test_train_save_load_search(small, fitted, tmp_path):
    encoder, before, printed, place = fitted
    assert len(printed) == 6 and printed[-1] < printed[0]
    assert list(place.iterdir()) == []  # nothing of the run is kept
    np.testing.assert_array_equal(encode(small), before)  # the model that it started from is unchanged
    vectors = encode(encoder)
    assert np.abs(vectors - before).max() > 0.01
    encoder.save(tmp_path / "model")
    loaded = DualEncoder.load(str(tmp_path / "model"))
    np.testing.assert_allclose(encode(loaded), vectors, atol=1e-6)
    assert loaded.fingerprint == encoder.fingerprint != small.fingerprint
    assert json.loads((tmp_path / "model/jaxir.json").read_text())["fingerprint"] == encoder.fingerprint
    ids = [str(n) for n in range(9)]
    index = ExactIndex.build(vectors, ids, fingerprint=encoder.fingerprint)
    index.require_model(loaded.fingerprint)
    assert index.search(vectors, k=1)[1] == [[i] for i in ids]
    with pytest.raises(UserError, match="already exists"):
        encoder.save(tmp_path / "model")


@pytest.mark.slow
def test_a_run_that_is_kept_is_a_model_and_is_resumed(tmp_path, capsys):
    run = tmp_path / "run"
    settings = SETTINGS | {"objective": Contrastive(loss=in_batch_softmax), "output_dir": run, "dev": PAIRS}
    encoder = fit(BERT, PAIRS, **settings, eval_every=2, checkpoint_every=1, dev_metric="loss")
    assert encoder.spec == str(run) and encoder.fingerprint == DualEncoder.load(str(run)).fingerprint
    best = json.loads((run / "checkpoints/best.json").read_text())
    logged = log(run)
    scores = {line["step"]: line["dev/loss"] for line in logged if "dev/loss" in line}
    assert best["step"] == min(scores, key=scores.get) and set(scores) == {2, 4, 6}
    capsys.readouterr()
    again = fit(BERT, PAIRS, **settings, eval_every=2, checkpoint_every=1, dev_metric="loss")
    assert again.fingerprint == encoder.fingerprint and not losses(capsys.readouterr().err)


@pytest.mark.slow
def test_another_seed_trains_with_the_same_program(small, capsys):
    read, misses = [], []

    def listen(event, **more):
        if event == "/jax/compilation_cache/cache_hits":
            read.append(event)
        if event == "/jax/compilation_cache/cache_misses":
            misses.append(event)

    at_least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # cache quick compilations, too
    try:
        fit(small, PAIRS, **SETTINGS, seed=1)
        jax.monitoring.register_event_listener(listen)
        # The seed is new in each run of the tests, so that its program is not in the cache yet.
        fit(small, PAIRS, **SETTINGS, seed=int.from_bytes(os.urandom(3)) + 2)
    finally:
        jax.monitoring.unregister_event_listener(listen)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", at_least)
    first, second = np.array_split(losses(capsys.readouterr().err), 2)
    assert read and not misses
    assert len(first) == 6 and np.abs(first - second).max() > 1e-3


@pytest.mark.slow
def test_defaults_suit_the_pairs(capsys):
    negatives = [[passage] for passage in PAIRS.passages[5:] + PAIRS.passages[:5]]
    seen = []

    class Watched(Contrastive):
        def __call__(self, model, batch, key=None, **more):
            seen.append({name: x.shape for name, x in batch.items()})
            return super().__call__(model, batch, key, **more)

    start, pairs = Pretrained(source=BERT, dropout_rate=0.0), Pairs(PAIRS.queries, PAIRS.passages, negatives)
    encoder = fit(start, pairs, objective=Watched(), epochs=1, log_every=1)
    # 60 pairs in batches of 32, each with a hard negative; the longest text has 16 of the 24 allowed tokens.
    assert "step 2/2" in capsys.readouterr().err
    assert seen[0]["query_ids"] == (32, 16) and seen[0]["negative_ids"] == (32, 1, 16)
    assert encoder.settings == DualEncoder.load(BERT).settings


@pytest.mark.slow
def test_a_stopped_fit_reports_its_step_or_raises(small, tmp_path, capsys):
    form = small.settings.text_format_of(small.tokenizer, 0)
    data = PAIRS.build(small.tokenizer, pair_features(form)).shortened()

    def sending(sent):
        return Hooked(data, lambda step: step == 12 and os.kill(os.getpid(), sent))

    settings = SETTINGS | {"steps": 1000, "checkpoint_every": 1000}
    with pytest.raises(KeyboardInterrupt, match=r"SIGTERM after step .* of 1000; no checkpoint was saved"):
        fit(small, sending(signal.SIGTERM), **settings)
    encoder = fit(small, sending(signal.SIGINT), output_dir=tmp_path / "run", **settings)
    ended = encoder.training
    assert (ended.stopped_by, ended.steps) == (signal.SIGINT, 1000) and 0 < ended.step < 1000
    assert f"stopped by SIGINT after step {ended.step} of 1000" in capsys.readouterr().err
    assert np.abs(encode(encoder) - encode(small)).max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], ["b", "c"]), "1 queries, 2 passages and 1 lists of negatives"),
        (([], []), "queries and passages are empty"),
        ((["a", ""], ["b", "c"]), "pair 1: the query must be a text, not ''"),
        ((["a"], ["b"], [["c", 7]]), "pair 0: the negative must be a text, not 7"),
        ((["a", "b"], ["c", "d"], [["e"], None]), "pair 1: the negatives must be a list of texts, not None"),
    ],
)
def test_impossible_pairs_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Pairs(*arguments)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (BERT, {"seed": -1}, "seed must be a whole number from 0 to 4294967295, not -1"),
        (7, {}, "the model must be a name, a DualEncoder or a Pretrained"),
        ("st:/nowhere", {}, "no such directory"),
        ("st:/nowhere", {"output_dir": Path(__file__).parent}, "is not empty and is not a training run"),
        (BERT, {"steps": 3, "dev_metric": "RR@10"}, "dev_metric is 'RR@10', but nothing is evaluated"),
        (BERT, {"steps": 3, "num_negatives": 2}, "60 of 60 have none: set num_negatives to 0"),
        (BERT, {"steps": 3, "log_evry": 1}, "^fit has no setting 'log_evry'; did you mean 'log_every'"),
        (BERT, {"steps": 3, "mesh": None}, "^fit has no setting 'mesh'; did you mean 'partitioner'"),
    ],
)
def test_fit_refuses_impossible_models_and_settings(model, settings, message):
    with pytest.raises(UserError, match=message):
        fit(model, PAIRS, **settings)


def test_pairs_and_dev_must_be_data():
    listed = [("how do I undo a commit?", "git revert makes a new commit.")]
    known = r"must be training data, such as Pairs\(queries, passages\) or BeirPairs\(.*\), not \["
    with pytest.raises(UserError, match=f"^pairs {known}"):
        fit(BERT, listed, steps=1)
    for nothing in (listed, []):
        with pytest.raises(UserError, match=f"^dev {known}"):
            fit(BERT, PAIRS, steps=1, dev=nothing)


def test_built_dataset_is_trained_on_unchanged(small, fitted):
    form = small.settings.text_format_of(small.tokenizer, 0)
    data = PAIRS.build(small.tokenizer, pair_features(form)).shortened()
    np.testing.assert_array_equal(encode(fit(small, data, **SETTINGS)), encode(fitted[0]))


def test_dataset_built_with_another_tokenizer_is_refused(small):
    other = DualEncoder.load(f"st:{Path(__file__).parents[1] / 'golden/roberta'}")
    form = other.settings.text_format_of(other.tokenizer, 0)
    with pytest.raises(UserError, match="the dataset was built with another tokenizer than the model's"):
        fit(small, PAIRS.build(other.tokenizer, pair_features(form)), **SETTINGS)


def test_defaults_are_those_of_the_recipe(start, request):
    request.addfinalizer(gin.clear_config)
    gin_config.bind(train_command, ["gin/pairs.gin"], ["DATA=x"], {})
    recipe = gin.get_bindings(train_command)
    assert recipe["optimizer"] == fit_module.OPTIMIZER
    ours, theirs = fit_module.OBJECTIVE, recipe["objective"]
    bound = {name: value for name, value in gin.get_bindings(theirs.loss).items() if value is not None}
    assert (ours.loss.keywords, ours.chunks) == (bound, theirs.chunks)
    assert ours.loss.func.__name__ == theirs.loss.__name__
    assert (recipe["min_steps"], recipe["epochs"]) == (fit_module.MIN_STEPS, 1)
    assert recipe["model"].dropout_rate == fit_module.DROPOUT
    for name in ("batch_size", "eval_every", "seed"):
        assert inspect.signature(fit).parameters[name].default == recipe[name]
    partitioner = MeshConfig().build(jax.devices()[:1])
    trained = fit_module._start(start).build(seed=0, partitioner=partitioner).model.config.backbone
    assert trained.dropout_rate == 0 and start.model.config.backbone.dropout_rate > 0


def test_reprs_describe_objects_in_one_line(start):
    dataset = PAIRS.build(start.tokenizer, pair_features(TextFormat(query_length=8, passage_length=12)))
    index = ExactIndex.build(encode(start), [str(n) for n in range(9)], model=BERT)
    encoder = "BERT, 2 layers x 32, cls pooling, 16 dimensions, dot, 24.0k parameters"
    for described, words in (
        *((start, f"': {encoder}, queries of 24 tokens"), (start.model, f"({encoder})")),
        *((index, "9 documents, 16 dimensions, cosine, of "), (PAIRS, "60 pairs; the first query: 'aa aa'")),
        *((dataset, "60 examples: 60 queries of 8 tokens"), (start.tokenizer, "ids)")),
        (Contrastive(loss=in_batch_softmax), "Contrastive(in_batch_softmax)"),
    ):
        assert words in repr(described) and "\n" not in repr(described)

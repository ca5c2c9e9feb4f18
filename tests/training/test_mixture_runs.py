"""Runs on mixtures: prompts of each set, a temperature, and batches of one set."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from jaxir import Contrastive, DualEncoder, Pairs, cli, fit, in_batch_softmax
from jaxir.core.errors import UserError
from jaxir.core.features import Tokens
from jaxir.data.batches.mixture import Mixture
from jaxir.data.batches.with_prompts import WithPrompts
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.step.optimizers import AdamW
from tests.training.saved_run import arrays, log, losses
from tests.training.tiny_run import ToOne

WORDS = ["da de di", "ha he hi", "la le li", "ma me mi", "na ne ni", "ra re ri", "sa se si", "ta te ti"]
PAIRS = Pairs(WORDS, [f"{word} {word}" for word in WORDS])
OWN, OTHER = ("da ", "ha "), ("la le ma ", "")
RECIPE = """from __gin__ import dynamic_registration
from jaxir import train
from jaxir.data.batches import mixture
from jaxir.data.batches import with_prompts
from jaxir.data.sets import pair_sources
include "gin/pairs.gin"

train.train.data = @mixture.Mixture()
mixture.Mixture.sources = [@a/with_prompts.WithPrompts(), @b/with_prompts.WithPrompts()]
mixture.Mixture.temperature = 2.0
a/with_prompts.WithPrompts.data = @a/pair_sources.JsonlPairs()
a/with_prompts.WithPrompts.query_prompt = "Instruct: find the words\\nQuery: "
a/pair_sources.JsonlPairs.path = "{a}"
b/with_prompts.WithPrompts.data = @b/pair_sources.JsonlPairs()
b/with_prompts.WithPrompts.query_prompt = "la "
b/pair_sources.JsonlPairs.path = "{b}"
"""


def sides(prompts):
    return dict(zip(("query_prompt", "passage_prompt"), prompts, strict=True))


def with_prompts(model: DualEncoder, prompts: tuple[str, str]) -> DualEncoder:
    """The model with prompts that its pooling leaves out."""
    given = sides(prompts)
    counts = {f"{name}_tokens": model.tokenizer.prompt_length(prompt) for name, prompt in given.items()}
    return DualEncoder(
        model.model.with_config(dataclasses.replace(model.model.config, **counts)),
        model.tokenizer,
        dataclasses.replace(model.settings, **given, pools_prompts=False),
        model.fingerprint,
    )


def measured(run):
    """The losses and the dev metrics of a run."""
    rows = [{n: v for n, v in line.items() if n == "loss" or n.startswith("dev/")} for line in log(run)]
    return [row for row in rows if row]


@pytest.mark.slow
def test_pairs_and_negatives_are_embedded_without_their_own_prompts(one_layer):
    """Vectors are those of a model that has the prompts itself, also with gradient caching."""
    start = DualEncoder.load(f"st:{one_layer}")
    data = Pairs(PAIRS.queries, PAIRS.passages, [[word] for word in reversed(WORDS)])
    embed = nnx.jit(lambda model, batch: Contrastive(chunks=2).embed(model, batch))
    vectors = []
    for prompts, given in ((OTHER, data), (OWN, WithPrompts(data=data, **sides(OTHER))), (OWN, data)):
        model = with_prompts(start, prompts)
        form = model.settings.text_format_of(model.tokenizer, 1)
        built = given.build(model.tokenizer, Contrastive().features(form))
        vectors.append(embed(model.model, next(built.batches(batch_size=4, seed=0))))
    for own, found, others in zip(*vectors, strict=True):
        np.testing.assert_array_equal(found, own)
        assert np.abs(np.asarray(others) - own).max() > 1e-3


@pytest.mark.slow
def test_pooling_leaves_out_each_sets_prompts_in_training_and_dev(one_layer, tmp_path):
    """A model trained and measured with a set's prompts equals a model that has these prompts itself."""
    start = DualEncoder.load(f"st:{one_layer}")
    theirs = WithPrompts(data=PAIRS, **sides(OTHER))
    how = {"steps": 2, "batch_size": 4, "log_every": 1}
    fit(with_prompts(start, OTHER), PAIRS, dev=PAIRS, output_dir=tmp_path / "own", **how)
    trained = fit(with_prompts(start, OWN), theirs, dev=theirs, output_dir=tmp_path / "given", **how)
    assert measured(tmp_path / "own") == measured(tmp_path / "given")
    assert len(measured(tmp_path / "own")) == 4 and "dev/nDCG@10" in measured(tmp_path / "own")[-1]
    assert (trained.settings.query_prompt, trained.settings.passage_prompt) == OWN


class PlainTexts(ToOne):
    """An objective of a user, whose batches have only the ids."""

    def features(self, form):
        return {"query_ids": Tokens("query", form.query_length, form.query_prompt)}


def test_objective_that_cannot_leave_out_other_prompts_is_refused(one_layer):
    model = with_prompts(DualEncoder.load(f"st:{one_layer}"), OWN)
    data = WithPrompts(data=PAIRS, query_prompt="la ")
    with pytest.raises(UserError, match="PlainTexts does not read how many tokens they have"):
        fit(model, data, objective=PlainTexts(), steps=2, batch_size=4)


@pytest.fixture
def recipe(tmp_path):
    paths = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    for name, count in (("a", 40), ("b", 10)):
        texts = [f"{WORDS[i % 8]} {WORDS[i // 8]}" for i in range(count)]
        rows = [json.dumps({"query": f"{x} da", "passage": f"{x} di"}) for x in texts]
        paths[name].write_text("\n".join(rows))
    (tmp_path / "recipe.gin").write_text(RECIPE.format(**paths))
    return tmp_path / "recipe.gin"


@pytest.mark.slow
def test_a_mixture_from_a_recipe_resumes_as_if_uninterrupted(one_layer, recipe, tmp_path, capsys):
    """The mixture's sets have prompts of different lengths, a temperature, and separate batches."""
    flags = [f"--gin_file={recipe}", f"--model=st:{one_layer}", "--data=no", "--dev_split=None"]
    flags += ["--batch_size=8", "--steps=8", "--log_every=1", "--query_length=64", "--checkpoint_every=4"]
    flags += ["--mixture_temperature=3", "--keep_last=2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main("jaxir.train:train", [*flags, f"--output_dir={whole}"]) == 0, capsys.readouterr().err
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints/8")
    assert cli.main("jaxir.train:train", [*flags, f"--output_dir={cut}"]) == 0, capsys.readouterr().err
    assert "resuming" in capsys.readouterr().err
    found, expected = arrays(cut, 8), arrays(whole, 8)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.slow
def test_a_mixture_with_prompts_and_a_temperature_trains(one_layer, tmp_path):
    prompts = ("Instruct: find it\nQuery: ", "la ")
    sources = [WithPrompts(data=PAIRS, query_prompt=prompt) for prompt in prompts]
    how = {"steps": 4, "batch_size": 4, "log_every": 1, "optimizer": AdamW(learning_rate=1e-3)}
    one = MeshConfig().build(jax.devices()[:1])
    fit(
        DualEncoder.load(f"st:{one_layer}"),
        Mixture(sources=sources, temperature=2.0),
        objective=Contrastive(loss=in_batch_softmax),
        partitioner=one,
        output_dir=tmp_path / "run",
        **how,
    )
    found = losses(tmp_path / "run")
    assert len(found) == 4 and np.isfinite(list(found.values())).all()

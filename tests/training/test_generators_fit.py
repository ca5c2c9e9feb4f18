"""Generators in Python: `fit`, metrics during training, and generation on many devices."""

import dataclasses
import json
from pathlib import Path

import gin
import jax
import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from jaxir import AdamW, Decoding, Generator, Pairs, Pretrained, PretrainedSeq2Seq, Seq2Seq, fit
from jaxir.cli import gin_config
from jaxir.core.errors import UserError
from jaxir.data.sets.texts import SourcesAndTargets
from jaxir.interop import model_dir
from jaxir.retrieval.encoding.generator import _generate_function
from jaxir.train import train
from jaxir.training import fit as fit_module
from jaxir.training.evaluators.generation import Generation
from jaxir.training.evaluators.reading import Reading
from tests.training.saved_run import log

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
START = PretrainedSeq2Seq(
    source=f"hf:{GOLDEN / 'seq2seq_1_1'}", passage_max_length=24, query_max_length=16, dropout_rate=0.0
)
PASSAGES = ["the cat sat on the mat", "a dog and a cat", "cats chase mice", "mice eat the cheese"]
QUERIES = ["a dog", "the cheese", "on the table", "last night"]
PAIRS = Pairs(QUERIES, PASSAGES)
GREEDY = Decoding(max_new_tokens=8)


@pytest.fixture(scope="module")
def generator():
    return Generator.load(START.source)


@pytest.mark.slow
def test_train_save_load_write(tmp_path):
    settings = {"steps": 40, "batch_size": 4, "eval_every": 20, "optimizer": AdamW(learning_rate=3e-2)}
    writer = fit(START, PAIRS, dev=PAIRS, **settings)
    assert isinstance(writer, Generator) and writer.spec is None
    assert (writer.settings.passage_max_length, writer.settings.query_max_length) == (24, 16)
    written = writer.generate(PASSAGES, GREEDY)
    assert sum(outputs == [query] for outputs, query in zip(written, QUERIES, strict=True)) >= 2
    writer.save(tmp_path / "model")
    again = Generator.load(str(tmp_path / "model"))
    assert again.generate(PASSAGES, GREEDY) == written
    assert repr(again).startswith(f"Generator('{tmp_path}/model': Seq2SeqModel(")


def test_defaults_are_those_of_the_recipe(request):
    request.addfinalizer(gin.clear_config)
    gin_config.bind(train, ["gin/generator.gin"], ["DATA=x"], {})
    recipe = gin.get_bindings(train)
    assert recipe["objective"] == fit_module.WRITING
    assert recipe["dev"] is None and recipe["dev_metric"] == "loss"


def rouge(targets, written) -> float:
    score = RougeScorer(["rougeL"]).score
    return float(np.mean([score(*pair)["rougeL"].fmeasure for pair in zip(targets, written, strict=True)]))


@pytest.mark.slow
def test_generation_metrics_score_the_models_own_output(generator, tmp_path):
    """Every second target is the generator's own output; at this learning rate nothing is learnt."""
    written = [" ".join(outputs) for outputs in generator.generate(PASSAGES, GREEDY)]
    assert all(written)
    targets = [text if i % 2 else f"{text} and more of it" for i, text in enumerate(written)]
    examples = [{"source": s, "target": t} for s, t in zip(PASSAGES, targets, strict=True)]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    data = SourcesAndTargets(path=str(tmp_path / "dev.jsonl"))
    judges = [Generation(data=data, max_new_tokens=8), Generation(data=data, name="cut", max_new_tokens=2)]
    start = dataclasses.replace(START, query_max_length=32)
    settings = {"evaluators": judges, "dev_metric": "rougeL", "objective": Seq2Seq()}
    settings |= {"output_dir": tmp_path / "run", "eval_every": 2, "optimizer": AdamW(learning_rate=1e-12)}
    fit(start, data, steps=2, batch_size=4, **settings)
    lines = log(tmp_path / "run")
    (found,) = [line for line in lines if "dev/rougeL" in line]
    assert found["dev/exact_match"] == 0.5
    assert found["dev/rougeL"] == pytest.approx(rouge(targets, written))
    assert 0.5 < found["dev/rougeL"] < 1
    cut = [" ".join(x) for x in generator.generate(PASSAGES, Decoding(max_new_tokens=2))]
    assert found["dev/cut/rougeL"] == pytest.approx(rouge(targets, cut))
    assert found["dev/cut/rougeL"] < found["dev/rougeL"]


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        (START, {"evaluators": [Generation(data=None)], "dev_metric": "rougeL"}, "the evaluator has no data"),
        (
            Pretrained(source=f"st:{GOLDEN / 't5_1_1'}", query_max_length=8, passage_max_length=8),
            {"evaluators": [Generation(data=PAIRS)], "dev_metric": "rougeL"},
            "Generation only evaluates models trained by Seq2Seq, not Contrastive",
        ),
        (START, {"dev": PAIRS, "dev_metric": "nDCG@10"}, "dev_metric is 'nDCG@10', but only loss"),
        (START, {"evaluators": [Reading(data=None)], "dev_metric": "EM"}, "Reading only evaluates readers"),
    ],
)
def test_unavailable_generation_metrics_are_refused(model, settings, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        fit(model, PAIRS, steps=2, batch_size=4, **settings)
    assert "\n" not in str(error.value)


BEAMS = Decoding(max_new_tokens=8, num_beams=3, num_outputs=2)
SAMPLES = Decoding(max_new_tokens=8, num_outputs=3, top_k=20)


@pytest.mark.parametrize("how", [GREEDY, BEAMS, SAMPLES])
def test_texts_are_the_same_on_all_devices_and_a_shape_is_compiled_once(how):
    loaded = model_dir.load(START.source, kind="seq2seq")
    texts = [f"{passage} {i}" for i in range(6) for passage in PASSAGES]
    one, all_ = (Generator(loaded, spec="x", devices=jax.devices()[:n]) for n in (1, jax.device_count()))
    assert all_.runner.partitioner.mesh.size == jax.device_count() > 1
    assert all_.generate(texts, how) == one.generate(texts, how)
    # Equal settings share a program.
    program, again = (all_.runner.program(_generate_function(x)) for x in (how, dataclasses.replace(how)))
    assert program is again
    shapes = set(program.executables)
    assert shapes and all(rows % jax.device_count() == 0 for rows, _ in shapes)
    before = {shape: id(future.result()) for shape, future in program.executables.items()}
    all_.generate(texts[::-1], how)
    assert {shape: id(future.result()) for shape, future in program.executables.items()} == before

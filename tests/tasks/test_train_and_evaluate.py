"""Training on a mixture with an interruption, and evaluation on a prepared set."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxir import cli
from jaxir.data.batches.mixture import MixtureDataset
from jaxir.retrieval.encoding.text_encoder import DualEncoder

ROOT = Path(__file__).resolve().parents[1]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


published, tiny_run = load("data/published"), load("training/tiny_run")


@pytest.mark.slow
def test_training_on_a_mixture_resumes_with_the_same_batches(tmp_path, capsys):
    def train(run_dir, before):
        datasets = {"first": tiny_run.pairs(40), "second": tiny_run.pairs(24, seed=1)}
        data = MixtureDataset(datasets, rates=[2, 1])
        model = tiny_run.Bag()
        settings = {"steps": 6, "batch_size": 8, "dev": None, "checkpoint_every": 4}
        tiny_run.run(run_dir, model=model, data=tiny_run.Hooked(data, before), **settings)
        return jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    def break_off(step):
        if step == 5:
            raise RuntimeError("the data went away")

    whole = train(tmp_path / "whole", lambda step: None)
    with pytest.raises(RuntimeError, match="the data went away"):
        train(tmp_path / "broken", break_off)
    resumed = train(tmp_path / "broken", lambda step: None)
    assert "resuming" in (err := capsys.readouterr().err) and "at step 4" in err
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    started = jax.device_get(nnx.to_pure_dict(nnx.state(tiny_run.Bag(), nnx.Param)))
    assert not np.array_equal(whole["kernel"], started["kernel"])


def test_evaluate_on_a_prepared_set(tmp_path, capsys):
    mrqa, candidates = published.write_multireqa(tmp_path)
    dataset = f"--dataset=multireqa:{mrqa},{candidates}"
    assert cli.main("jaxir.prepare:prepare", [dataset, f"--output={tmp_path}/squad"]) == 0
    flags = [f"--model=hf:{ROOT}/golden/bert", f"--dataset=beir:{tmp_path}/squad"]
    flags += ["--metrics=P@1 RR", f"--output={tmp_path}/figures.json"]
    assert cli.main("jaxir.evaluate:evaluate", flags) == 0
    assert "5 judged queries" in capsys.readouterr().out

    def records(name):
        return [json.loads(line) for line in (tmp_path / "squad" / f"{name}.jsonl").read_text().splitlines()]

    (qrels,) = (tmp_path / "squad" / "qrels").iterdir()
    relevant = {tuple(line.split("\t")[:2]) for line in qrels.read_text().splitlines()[1:]}
    corpus, queries = records("corpus"), records("queries")
    encoder = DualEncoder.load(f"hf:{ROOT}/golden/bert")
    passages = encoder.encode_passages([f"{d.get('title', '')} {d['text']}".strip() for d in corpus])
    asked = encoder.encode_queries([q["text"] for q in queries])
    assert {q["_id"] for q in queries} == {q for q, _ in relevant}
    first = []  # rank of the first relevant document of each query
    for query, row in zip(queries, asked @ passages.T, strict=True):
        ranked = [corpus[i]["_id"] for i in np.argsort(-row)]
        first.append(1 + min(ranked.index(d) for q, d in relevant if q == query["_id"]))
    expected = {"P@1": np.mean([rank == 1 for rank in first]), "RR": np.mean([1 / rank for rank in first])}
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["metrics"] == pytest.approx(expected)
    assert len(set(first)) > 1

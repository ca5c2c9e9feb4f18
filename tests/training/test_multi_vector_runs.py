"""A recipe trains a multi-vector encoder; evaluators, reranking and exports give the run's own scores."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxir import MultiVectorEncoder, Pairs, cli, fit
from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.retrieval_metrics import evaluate_run
from jaxir.interop import formats
from jaxir.interop.build import Pretrained, PretrainedMultiVector, outline_of
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.late_interaction import LateInteraction
from jaxir.retrieval.ranking.runs import read_run, write_run
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.evaluators.evaluation_context import Bench
from tests.beir_folder import write_folder
from tests.interop.folders import GOLDEN
from tests.training.saved_run import arrays, log, losses
from tests.training.test_distillation import write as write_scored

XTR = ["--xtr_k=32", "--temperature=0.1", "--chunks=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "pairs", train=32, held_out=12)


def train(folder, output, *more: str, model: str, query_length: int = 12, rate: float = 1e-3) -> int:
    flags = ["--gin_file=gin/late_interaction.gin", f"--data={folder}", f"--model={model}"]
    flags += [
        f"--query_length={query_length}",
        f"--learning_rate={rate}",
        "--passage_length=14",
        "--projection=8",
        "--batch_size=8",
    ]
    flags += ["--dev_distractors=0", f"--output_dir={output}"]
    return cli.main("jaxir.train:train", [*flags, *more])


@pytest.fixture(scope="module")
def trained(folder, one_layer, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    more = ("--steps=4", "--eval_every=2", "--checkpoint_every=2", "--chunks=2", "--dropout=0.1")
    assert train(folder, run, *more, model=f"hf:{one_layer}") == 0
    return run


@pytest.fixture(scope="module")
def candidates(folder, tmp_path_factory):
    """A run over the dev queries, with all dev passages in the order of the corpus."""
    documents = [
        record["_id"] for record in map(json.loads, (folder / "corpus.jsonl").read_text().splitlines())
    ][32:44]
    queries = read_judgements(BeirFolder(folder).qrels_path("dev"))
    path = tmp_path_factory.mktemp("candidates") / "dev.trec"
    write_run(path, {q: {d: -float(n) for n, d in enumerate(documents)} for q in queries})
    return path


def texts_of(folder, name) -> dict[str, str]:
    return {r["_id"]: r["text"] for r in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())}


@pytest.mark.slow
def test_a_dense_start_gets_a_projection_expansion_and_words_to_skip(trained, one_layer):
    encoder = MultiVectorEncoder.load(str(trained))
    config, tokenizer = encoder.model.config, encoder.tokenizer
    assert [module.kind for module in config.token_modules] == [
        "dense",
        "normalize",
    ] and config.dimension == 8
    assert (config.expansion.length, config.expansion.token) == (12, tokenizer.mask_id)
    assert not config.expansion.attend
    assert set(config.skipped) == {tokenizer.id_of(mark) for mark in ",.;?-"} and config.skipped_in == (
        "passage",
    )
    assert (encoder.settings.query_max_length, encoder.settings.passage_max_length) == (12, 14)
    start = PretrainedMultiVector(source=f"hf:{one_layer}")
    config, settings, _ = outline_of(start)
    assert config.dimension == 128 and config.expansion.length == 32
    assert (settings.query_max_length, settings.passage_max_length) == (32, 160)
    kernels = [
        np.asarray(start.build(seed=seed).model.token_modules[0].linear.kernel[...]) for seed in (0, 0, 1)
    ]
    assert (kernels[0] == kernels[1]).all() and (kernels[0] != kernels[2]).any()


def test_dev_metrics_are_those_of_the_saved_encoder(trained, folder, candidates):
    encoder = MultiVectorEncoder.load(str(trained))
    queries, documents = (texts_of(folder, name) for name in ("queries", "corpus"))
    judgements = read_judgements(BeirFolder(folder).qrels_path("dev"))
    ids = list(next(iter(read_run(candidates).values())))
    scores = encoder.similarity(
        encoder.encode_queries([queries[q] for q in judgements]),
        encoder.encode_passages([documents[d] for d in ids]),
    )
    run = {q: dict(zip(ids, map(float, row), strict=True)) for q, row in zip(judgements, scores, strict=True)}
    expected = evaluate_run(run, judgements, ["nDCG@10", "RR@10"]).values
    best = max((line for line in log(trained) if "dev/nDCG@10" in line), key=lambda line: line["dev/nDCG@10"])
    assert best["dev/nDCG@10"] == pytest.approx(expected["nDCG@10"], abs=1e-6)
    assert best["dev/RR@10"] == pytest.approx(expected["RR@10"], abs=1e-6)
    assert best["dev/loss"] > 0 and set(losses(trained)) == {4}


def test_rerank_writes_the_similarities_of_the_candidates(
    trained, folder, candidates, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("jaxir.retrieval.ranking.token_reranking._DOCUMENTS", 13)
    flags = [f"--model={trained}", f"--run={candidates}", f"--dataset=beir:{folder}"]
    assert cli.main("jaxir.rerank:rerank", [*flags, f"--output={tmp_path / 'new.trec'}", "--depth=5"]) == 0
    assert f"12 queries, 60 answers, by {trained}" in capsys.readouterr().out
    found, encoder = read_run(tmp_path / "new.trec"), MultiVectorEncoder.load(str(trained))
    queries, documents = (texts_of(folder, name) for name in ("queries", "corpus"))
    for query_id, some in list(found.items())[:3]:
        vectors = (
            encoder.encode_queries([queries[query_id]]),
            encoder.encode_passages([documents[d] for d in some]),
        )
        np.testing.assert_allclose(list(some.values()), encoder.similarity(*vectors)[0], rtol=1e-5)
    assert cli.main("jaxir.rerank:rerank", [*flags, "--output=x.trec", "--weights=int8"]) == 1
    assert "--weights only applies to a cross-encoder" in capsys.readouterr().err


@pytest.mark.slow
def test_export_writes_a_folder_that_pylate_opens_too(trained, tmp_path):
    assert (
        cli.main("jaxir.export:export", [f"--model={trained}", "--format=st", f"--output={tmp_path / 'st'}"])
        == 0
    )
    one, other = MultiVectorEncoder.load(str(trained)), MultiVectorEncoder.load(f"st:{tmp_path / 'st'}")
    assert other.model.config == one.model.config
    for tower, texts in (("query", ["a cat", "the dog, the mat"]), ("passage", ["the cat sat.", ""])):
        for x, y in zip(one.encode(texts, tower=tower), other.encode(texts, tower=tower), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)
    about = json.loads((tmp_path / "st/config_sentence_transformers.json").read_text())
    assert about["model_type"] == "ColBERT" and about["query_prefix"] == "" and about["do_query_expansion"]
    assert set(about["skiplist_words"]) == set(",.;?-")
    card = (tmp_path / "st/README.md").read_text()
    assert 'MultiVectorEncoder("st")' in card and "| nDCG@10 |" in card


def test_unsuitable_models_and_evaluators_are_refused(trained, one_layer):
    pairs = Pairs(["a cat", "a dog", "mat", "mice"], ["the cat", "the dog", "a mat", "two mice"])
    with pytest.raises(
        UserError, match=r"LateInteraction trains a multi-vector encoder .*gin/models/multi_vector"
    ):
        fit(Pretrained(source=f"hf:{one_layer}"), pairs, objective=LateInteraction(), steps=1, batch_size=4)
    start = PretrainedMultiVector(source=f"hf:{one_layer}")
    with pytest.raises(UserError, match=r"Contrastive trains a dual encoder .* is a multi-vector encoder"):
        fit(start, pairs, objective=Contrastive(), steps=1, batch_size=4)
    with pytest.raises(UserError, match="have 8 dimensions, so they cannot get a projection to 16"):
        PretrainedMultiVector(source=str(trained), projection=16).build(seed=0)
    with pytest.raises(UserError, match="starts from one encoder, not from"):
        PretrainedMultiVector(source=f"hf:{GOLDEN / 'cross_bert'}").build(seed=0)
    loaded = PretrainedMultiVector(source=str(trained)).build(seed=0)
    how = {"objective": LateInteraction(), "training_data": None, "batch_size": 4}
    form = loaded.settings.text_format_of(loaded.tokenizer)
    bench = Bench(tokenizer=loaded.tokenizer, form=form, partitioner=MeshConfig().build(), **how)
    ids = bench.tokens(["a cat"], "query")
    find = bench.vectors(ids, "query").__self__._function
    with pytest.raises(UserError, match="makes a vector of each token: use Retrieval, Reranking or Loss"):
        find(loaded.model, None, {"ids": ids})


@pytest.mark.slow
def test_a_run_starts_another_and_keeps_its_shape(trained, folder, candidates, tmp_path):
    evaluators = ["--gin_file=gin/evaluators/reranking.gin", f"--dev_run={candidates}", "--dev_run_depth=12"]
    flags = [
        *evaluators,
        "--dev_split=None",
        "--steps=2",
        "--eval_every=2",
        "--dtype=bfloat16",
    ]
    run = tmp_path / "run"
    assert train(folder, run, *flags, model=str(trained), query_length=10) == 0
    encoder = MultiVectorEncoder.load(str(run))
    assert encoder.model.config.expansion.length == 10 and encoder.model.config.dimension == 8
    assert {"dev/nDCG@10", "dev/RR@10"} <= {name for line in log(run) for name in line}


@pytest.mark.slow
def test_it_learns_and_resumes_with_the_same_parameters(folder, one_layer, tmp_path):
    flags = (
        "--dropout=0.1",
        "--chunks=2",
        "--checkpoint_every=20",
        "--keep_last=2",
        "--log_every=1",
        "--dev_split=None",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(folder, whole, "--steps=40", *flags, model=f"hf:{one_layer}", rate=5e-3) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints/40")
    assert train(folder, parts, "--steps=40", *flags, model=f"hf:{one_layer}", rate=5e-3) == 0
    one, other = (arrays(run, 40, "params") for run in (whole, parts))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    found = list(losses(whole).values())
    assert np.mean(found[-5:]) < 0.7 * np.mean(found[:5])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--lora_rank=2"], ["--dtype=bfloat16"], ["--loss=@samtone.samtone"], XTR])
def test_it_learns_with_other_settings(folder, one_layer, flags, tmp_path):
    run = tmp_path / "run"
    flags = [*flags, "--steps=40", "--log_every=1", "--dev_split=None"]
    assert train(folder, run, *flags, model=f"hf:{one_layer}", rate=1e-2) == 0
    found = list(losses(run).values())
    assert np.mean(found[-5:]) < 0.8 * np.mean(found[:5])
    encoder = MultiVectorEncoder.load(str(run))
    assert all(np.isfinite(x).all() for x in encoder.encode_queries(["a cat", ""]))
    assert jax.numpy.float32 == encoder.model.token_modules[0].linear.kernel[...].dtype
    formats.convert(str(run), tmp_path / "st", to="st")
    again = MultiVectorEncoder.load(f"st:{tmp_path / 'st'}")
    np.testing.assert_allclose(again.encode_queries("a cat"), encoder.encode_queries("a cat"), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kl_distillation", "margin_mse"])
def test_a_teachers_ranking_is_learned(folder, one_layer, loss, tmp_path):
    write_scored(tmp_path / "mined.jsonl")
    flags = [f"--gin_file=gin/{name}.gin" for name in ("experiments/mined", "objectives/late_distillation")]
    flags += [f"--mined={tmp_path / 'mined.jsonl'}", "--negatives=3", f"--loss=@losses.{loss}", "--chunks=2"]
    flags += ["--steps=60", "--log_every=1", "--dev_split=None"]
    assert train(folder, tmp_path / "run", *flags, model=f"hf:{one_layer}", rate=1e-2) == 0
    found = [line["agreement"] for line in log(tmp_path / "run") if "agreement" in line]
    values = list(losses(tmp_path / "run").values())
    assert np.mean(values[-5:]) < 0.6 * np.mean(values[:5]) and np.mean(found[-5:]) > np.mean(found[:5])


@pytest.mark.slow
def test_fit_returns_a_multi_vector_encoder(one_layer):
    pairs = Pairs(["a cat", "a dog", "mat", "mice"], ["the cat", "the dog", "a mat", "two mice"])
    start = PretrainedMultiVector(source=f"hf:{one_layer}", projection=8, query_max_length=6)
    encoder = fit(start, pairs, steps=2, batch_size=4, dev=pairs)
    assert isinstance(encoder, MultiVectorEncoder) and encoder.training.step == 2
    assert encoder.encode_queries("a cat").shape == (6, 8)

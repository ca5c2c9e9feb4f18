"""A cross-encoder trained on mined negatives, as users do it; reranking; formats."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxir import cli, fit
from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.sets.pair_sources import TevatronPairs
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.retrieval_metrics import evaluate_run
from jaxir.interop import model_dir
from jaxir.interop.build import Pretrained, PretrainedCrossEncoder
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.query_reranking import QueryReranking
from jaxir.objectives.reranking import Reranking
from jaxir.objectives.seq2seq import Seq2Seq
from jaxir.objectives.weighted_sum import WeightedSum
from jaxir.retrieval.encoding.pair_scorer import CrossEncoder
from jaxir.retrieval.ranking.runs import rank, read_run
from tests.models.test_cross_encoder import t5_with_pairs
from tests.training.saved_run import log
from tests.training.scored import Scored, on_mesh, value_and_grad

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
KINDS = [[f"{a}{b}" for b in "aeio"] for a in "dhlm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Queries and passages of related syllables; the passage with a query's syllable is relevant."""
    rng, place = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    documents, queries, records, qrels, run = {}, {}, [], [], []
    for i in range(48):
        kind = i % len(KINDS)
        queries[f"q{i}"] = " ".join(rng.permutation(KINDS[kind]))
        others = rng.permutation([n for n in range(len(KINDS)) if n != kind])
        ids = [f"d{i}-{n}" for n in range(1 + len(others))]
        texts = [" ".join(rng.permutation([*KINDS[n], *KINDS[n]])) for n in (kind, *others)]
        documents |= dict(zip(ids, texts, strict=True))
        # The run has the relevant document last.
        run += [f"q{i} Q0 {d} 0 {len(ids) - n} t\n" for n, d in enumerate([*ids[1:], ids[0]])]
        qrels.append(f"q{i}\t{ids[0]}\t1\n")
        passages = [{"docid": d, "title": "", "text": documents[d]} for d in ids]
        record = {"query_id": f"q{i}", "query": queries[f"q{i}"], "positive_passages": passages[:1]}
        records.append(json.dumps(record | {"negative_passages": passages[1:]}) + "\n")
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps({"_id": i, "text": text}) + "\n" for i, text in texts.items()]
        (place / f"{name}.jsonl").write_text("".join(lines))
    (place / "qrels").mkdir()
    (place / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(qrels))
    (place / "mined.jsonl").write_text("".join(records))
    (place / "run.trec").write_text("".join(run))
    return place


def train(folder, output, *more: str, model: str = f"st:{GOLDEN / 'bert'}") -> int:
    flags = ["--gin_file=gin/reranker.gin", f"--gin.DATA={folder}", f"--gin.MINED={folder}/mined.jsonl"]
    flags += [f"--gin.MODEL={model}", "--gin.QUERY_LENGTH=16", "--gin.PASSAGE_LENGTH=24"]
    flags += ["--gin.NEGATIVES=3", "--gin.LEARNING_RATE=2e-3", "--gin.CHECKPOINT_EVERY=20"]
    return cli.main("jaxir.train:train", [*flags, f"--output_dir={output}", *more])


SIX_STEPS = ("--steps=6", "--gin.CHECKPOINT_EVERY=3", "--keep_last=2")


@pytest.fixture(scope="module")
def trained(folder, one_layer, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    assert train(folder, run, *SIX_STEPS, model=f"st:{one_layer}") == 0
    return run


@pytest.mark.slow
def test_reranker_learns_to_rank(folder, tmp_path):
    run = tmp_path / "run"
    assert train(folder, run, "--steps=150") == 0
    lines = [x for x in log(run) if "loss" in x]
    last = {name: np.mean([line[name] for line in lines[-5:]]) for name in ("loss", "accuracy")}
    assert last["loss"] < 0.3 * lines[0]["loss"] and last["accuracy"] > 0.9 > lines[0]["accuracy"], lines
    found, before = rerank(folder, run, tmp_path / "new.trec"), read_run(folder / "run.trec")
    first = [rank(answers)[0] == f"d{query[1:]}-0" for query, answers in found.items()]
    assert np.mean(first) > 0.9 and not any(rank(a)[0].endswith("-0") for a in before.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deberta", "t5_1_1"])
def test_rerankers_of_other_encoders_learn_to_rank(folder, name, tmp_path):
    start, run = t5_with_pairs(tmp_path) if name == "t5_1_1" else GOLDEN / name, tmp_path / "run"
    assert train(folder, run, "--steps=80", model=f"hf:{start}") == 0
    found = rerank(folder, run, tmp_path / "new.trec")
    assert np.mean([rank(answers)[0] == f"d{query[1:]}-0" for query, answers in found.items()]) > 0.9


def rerank(folder, model, output, *more):
    flags = [f"--model={model}", f"--run={folder}/run.trec", f"--dataset=beir:{folder}"]
    assert cli.main("jaxir.rerank:rerank", [*flags, f"--output={output}", *more]) == 0
    return read_run(output)


@pytest.mark.slow
def test_a_reranked_run_has_the_models_scores_of_the_texts(folder, trained, tmp_path, capsys):
    found, before = rerank(folder, trained, tmp_path / "new.trec"), read_run(folder / "run.trec")
    assert f"48 queries, 192 answers, by {trained}" in capsys.readouterr().out
    assert {q: set(some) for q, some in found.items()} == {q: set(some) for q, some in before.items()}
    queries, documents = (
        {r["_id"]: r["text"] for r in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())}
        for name in ("queries", "corpus")
    )
    pairs = [(q, d) for q in ("q3", "q40") for d in found[q]]
    scores = CrossEncoder.load(str(trained)).score([(queries[q], documents[d]) for q, d in pairs])
    np.testing.assert_allclose([found[q][d] for q, d in pairs], scores, atol=1e-5)
    two = rerank(folder, trained, tmp_path / "two.trec", "--depth=2")
    assert all(set(two[q]) == set(rank(before[q])[:2]) for q in before)
    whole = rerank(folder, trained, tmp_path / "whole.trec", "--depth=2", "--keep_rest")
    for q, some in before.items():
        assert rank(whole[q]) == rank(two[q]) + rank(some)[2:] and len(some) > 2
        assert {d: whole[q][d] for d in two[q]} == two[q]


@pytest.mark.slow
def test_the_best_checkpoint_is_the_one_that_reranks_best(folder, tmp_path, capsys):
    run, deep, held = tmp_path / "run", tmp_path / "deep.trec", folder / "qrels" / "held.tsv"
    shutil.copy(folder / "qrels" / "train.tsv", held)
    lines = []
    for i in range(48):
        ids = [*(f"d{(i + n) % 48}-0" for n in (1, 2, 3, 5, 6, 7)), *(f"d{i}-{n}" for n in (1, 2, 3, 0))]
        lines += [f"q{i} Q0 {d} 0 {10 - n} t\n" for n, d in enumerate(ids)]
    deep.write_text("".join(lines))
    flags = ["--gin_file=gin/evaluators/reranking.gin", "--gin.DEV_RUN_SPLIT=held", "--gin.EVAL_EVERY=2"]
    assert train(folder, run, *flags, f"--gin.DEV_RUN={folder}/run.trec", "--steps=6") == 1
    assert not run.exists() and "at most 4 documents per query, but nDCG@10 and" in capsys.readouterr().err
    flags += [f"--gin.DEV_RUN={deep}", "--gin.DEV_RUN_DEPTH=10", "--steps=6"]
    flags += ["--gin.CHECKPOINT_EVERY=2", "--gin.LEARNING_RATE=5e-2"]
    assert train(folder, run, *flags) == 0
    found = {line["step"]: line["dev/nDCG@10"] for line in log(run) if "dev/nDCG@10" in line}
    assert found.keys() == {2, 4, 6} and len(set(found.values())) > 1
    best = json.loads((run / "checkpoints/best.json").read_text())
    assert found[best["step"]] == max(found.values()) == best["value"]
    # The command gives the run's best checkpoint the same nDCG@10.
    reranked = rerank(folder, run, tmp_path / "new.trec", "--depth=10", f"--run={deep}")
    scores = evaluate_run(reranked, read_judgements(folder / "qrels/train.tsv"), ["nDCG@10"])
    assert scores.values["nDCG@10"] == pytest.approx(best["value"], abs=1e-9)
    # With other judgements another checkpoint may be the best, so the run is not resumed.
    held.write_text(held.read_text().replace("d7-0", "d7-1"))
    assert train(folder, run, *flags, "--steps=8") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "was trained with dev=nDCG@10 on 48 queries with other content; give the settings" in error


@pytest.mark.parametrize("to", ["hf", "st", "jaxir"])
def test_trained_reranker_survives_conversion_to_each_format(trained, tmp_path, to):
    out = tmp_path / "out"
    flags = [f"--source={trained}", f"--output={out}", f"--format={to}"]
    assert cli.main("jaxir.convert:convert", flags) == 0
    spec = str(out) if to == "jaxir" else f"{to}:{out}"
    found, expected = (model_dir.load(str(s), kind="cross_encoder") for s in (spec, trained))
    assert found.fingerprint == expected.fingerprint
    assert found.settings.pair_max_length == expected.settings.pair_max_length == 40


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_conversion_of_a_folder_changes_nothing(name, tmp_path):
    source = GOLDEN / f"cross_{name}"
    flags = [f"--source=hf:{source}", f"--output={tmp_path}/out", "--format=hf"]
    assert cli.main("jaxir.convert:convert", flags) == 0
    before, after = (safetensors.numpy.load_file(d / "model.safetensors") for d in (source, tmp_path / "out"))
    assert before.keys() == after.keys() and all((before[n] == after[n]).all() for n in before)
    told, was = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "out", source))
    known = {n: v for n, v in was.items() if n in told and n not in ("sentence_transformers", "bos_token_id")}
    assert {n: told[n] for n in known} == known and told["model_type"] == name


def batch_of(rows: int = 16) -> dict:
    rng = np.random.default_rng(0)
    ids = {"query_ids": (rows, 4), "passage_ids": (rows, 6), "negative_ids": (rows, 3, 6)}
    keys = {"query_key": (rows, 2), "passage_key": (rows, 2), "negative_key": (rows, 3, 2)}
    batch = {k: rng.integers(1, 50, shape).astype(np.int32) for k, shape in (ids | keys).items()}
    batch["negative_key"][2, 1] = batch["passage_key"][2]
    return batch


def test_chunks_and_devices_give_the_same_numbers():
    batch = batch_of()
    direct = value_and_grad(Reranking(), batch)
    for chunks, some in ((4, batch), (2, on_mesh(batch))):
        found = value_and_grad(Reranking(chunks=chunks), some)
        np.testing.assert_allclose(found[0], direct[0], rtol=1e-5)
        np.testing.assert_allclose(found[1], direct[1], atol=1e-5)
    dropped = value_and_grad(Reranking(chunks=2), batch, jax.random.key(0), Scored(0.5))
    assert abs(dropped[0] - direct[0]) > 1e-3


def test_a_negative_that_is_the_positive_does_not_count():
    batch = batch_of()
    before = value_and_grad(Reranking(), batch)[0]
    batch["negative_ids"][2, 1] = 7
    assert value_and_grad(Reranking(), batch)[0] == before
    batch["negative_ids"][2, 0] = 7
    assert value_and_grad(Reranking(), batch)[0] != before


@pytest.mark.slow
def test_in_python(folder, tmp_path):
    source = f"hf:{shutil.copytree(GOLDEN / 'modernbert', tmp_path / 'start')}"
    # The folder's own tokenizer is for single texts.
    shutil.copy(GOLDEN / "cross_modernbert/tokenizer.json", tmp_path / "start")
    model = PretrainedCrossEncoder(source=source, query_max_length=16, passage_max_length=24)
    pairs = TevatronPairs(path=str(folder / "mined.jsonl"))
    found = fit(model, pairs, steps=2, batch_size=8, num_negatives=2)  # Reranking() is the default objective
    assert isinstance(found, CrossEncoder) and found.max_length == 40
    assert found.score([("da de", "da de"), ("da de", "la")]).shape == (2,)


SUM = WeightedSum(parts={"a": Contrastive(), "b": Reranking()})
CROSS = PretrainedCrossEncoder


@pytest.mark.parametrize(
    ("kind", "objective", "has_dev", "sentence"),
    [
        (
            Pretrained,
            Reranking(),
            False,
            r"Reranking trains a cross-encoder \(it calls score_texts\), .* dual e",
        ),
        (Pretrained, Seq2Seq(source="query", target="passage"), False, "trains a generator.* a dual encoder"),
        (
            Pretrained,
            SUM,
            False,
            r"give model=PretrainedCrossEncoder\(...\) \(gin/models/cross_encoder.gin\)",
        ),
        (CROSS, Contrastive(), False, "trains a dual encoder .*, but the model is a cross-encoder: give"),
        (CROSS, Reranking(), True, "Reranking cannot be evaluated on dev pairs: it has neither vectors nor"),
        (CROSS, QueryReranking(), True, "QueryReranking cannot be evaluated on dev"),
        (CROSS, WeightedSum(parts={"a": Reranking()}), True, "WeightedSum cannot be evaluated on dev"),
    ],
)
def test_objectives_and_dev_pairs_of_other_models_are_refused(
    folder, kind, objective, has_dev, sentence, tmp_path
):
    pairs, model = TevatronPairs(path=str(folder / "mined.jsonl")), kind(source=f"st:{GOLDEN / 'bert'}")
    how = {"num_negatives": 2, "objective": objective, "dev": pairs if has_dev else None}
    with pytest.raises(UserError, match=sentence):
        fit(model, pairs, steps=2, **how, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_reranker_refuses_unsuitable_models_and_settings(folder, trained, capsys, tmp_path):
    with pytest.raises(UserError, match="learns from hard negatives: set num_negatives"):
        Reranking().features(TextFormat(8, 8))
    run = [f"--run={folder}/run.trec", f"--dataset=beir:{folder}", f"--output={tmp_path}/x.trec"]
    corpus = [f"--input={folder}/corpus.jsonl", f"--output={tmp_path}/e"]
    lacking = tmp_path / "lacking.trec"
    lacking.write_text("q0 Q0 nowhere 1 1.0 t\n")
    for command, model, flags, sentence in (
        ("encode", trained, corpus, "is a cross-encoder, which scores pairs of texts"),
        ("rerank", f"st:{GOLDEN / 'bert'}", run, "no classifier.weight among its weights"),
        ("rerank", tmp_path, run, "no jaxir.json in it"),
        ("rerank", trained, [f"--run={lacking}", *run[1:]], "lacks 'nowhere', which the run"),
    ):
        status = cli.main(f"jaxir.{command}:{command}", [f"--model={model}", *flags])
        error = capsys.readouterr().err
        assert status == 1 and sentence in error.splitlines()[-1], error
    assert train(folder, tmp_path / "t5", "--steps=2", model=f"hf:{GOLDEN / 't5_1_1'}") == 1
    assert "t5_1_1: this tokenizer encodes a text as" in capsys.readouterr().err.splitlines()[-1]
    assert train(folder, tmp_path / "run", "--steps=2", "--gin.DEV_SPLIT=train") == 1
    assert "gin/evaluators/reranking.gin" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["lacking.trec"]

"""Rerankers of queries (EAR): trained, used and refused, as users do it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.expanded.candidates import read_candidates
from jaxir.data.formats.sources import read_queries
from jaxir.objectives.query_reranking import QueryReranking
from jaxir.objectives.reranking import Reranking
from jaxir.retrieval.encoding.pair_scorer import CrossEncoder
from jaxir.retrieval.encoding.query_reranker import QueryReranker
from tests.training.saved_run import log
from tests.training.scored import on_mesh, value_and_grad

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SYLLABLES = [f"{a}{b}" for a in "dhlm" for b in "aeio"]
KINDS = {"ri": "expanded_query", "rd": "expanded_query_and_passage"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Questions with four expansions; the right one, or the passage that it finds, contains "ha"."""
    rng, place = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    others = [s for s in SYLLABLES if s != "ha"]
    passages = {}

    def words(right: bool) -> str:
        return " ".join(rng.permutation([rng.choice(others), "ha" if right else rng.choice(others)]))

    for kind in KINDS:
        lines = []
        for i in range(112):
            right = int(rng.integers(4))
            ranks = [2 if n == right else None for n in range(4)]
            found = [f"{kind}{i}-{n}" for n in range(4)]
            passages |= {p: words(n == right) for n, p in enumerate(found)}
            outputs = [words(n == right and kind == "ri") for n in range(4)]
            some = {"_id": f"q{i}", "question": f"{rng.choice(others)}?", "outputs": outputs}
            lines.append(some | {"passages": found, "ranks": ranks, "depth": 100})
        for name, part in (("train", lines[:96]), ("dev", lines[96:])):
            (place / f"{kind}-{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in part))
    texts = [json.dumps({"_id": p, "title": "", "text": t}) + "\n" for p, t in passages.items()]
    (place / "corpus.jsonl").write_text("".join(texts))
    return place


def train(folder, kind, output, *more: str) -> int:
    flags = [f"--gin_file=gin/ear_{kind}.gin", f"--gin.TRAIN_CANDIDATES={folder}/{kind}-train.jsonl"]
    flags += [f"--gin.MODEL=st:{GOLDEN / 'bert'}", "--gin.QUERY_LENGTH=12", "--gin.LEARNING_RATE=3e-3"]
    flags += ["--gin.DROPOUT=0.0"]
    if kind == "rd":
        flags += [f"--gin.CORPUS={folder}/corpus.jsonl", "--gin.PASSAGE_LENGTH=8"]
    flags += ["--gin.CANDIDATES=4", "--gin.BATCH_SIZE=8"]
    return cli.main("jaxir.train:train", [*flags, f"--output_dir={output}", *more])


def evaluated(folder, kind, *more: str) -> list[str]:
    piece = "--gin_file=gin/evaluators/query_reranking.gin"
    return [piece, f"--gin.DEV_CANDIDATES={folder}/{kind}-dev.jsonl", *more]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """An untrained model of each kind, in a folder as `jaxir.convert --format=hf` writes it."""
    found = {}
    for kind, reads in KINDS.items():
        place = shutil.copytree(GOLDEN / "cross_bert", tmp_path_factory.mktemp("models") / kind)
        config = json.loads((place / "config.json").read_text()) | {"jaxir_reads": reads}
        (place / "config.json").write_text(json.dumps(config))
        found[kind] = f"hf:{place}"
    return found


def rerank(folder, kind, model, output, *more):
    corpus = [f"--corpus={folder}/corpus.jsonl"] if kind == "rd" else []
    flags = [f"--model={model}", f"--candidates={folder}/{kind}-dev.jsonl", f"--output={output}"]
    return cli.main("jaxir.expand:rerank", [*flags, *corpus, *more])


def test_candidates_not_searched_deep_enough_are_refused(folder, tmp_path, capsys):
    """A query that finds nothing has the rank after the last one, which would count as a success."""
    lines = [json.loads(line) for line in (folder / "ri-dev.jsonl").read_text().splitlines()]
    shallow = [line | {"depth": 10} for line in lines]  # the answers that exist have rank 2
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shallow))
    more = [*evaluated(folder, "ri"), f"--gin.DEV_CANDIDATES={tmp_path}/dev.jsonl"]
    assert train(folder, "ri", tmp_path / "run", "--steps=3", *more) == 1
    assert "Success@20 needs candidates searched to depth 20, not 10" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_query_reranker_learns_the_better_expansion(folder, tmp_path, kind):
    run = tmp_path / "run"
    assert train(folder, kind, run, "--steps=120", *evaluated(folder, kind, "--gin.EVAL_EVERY=40")) == 0
    assert rerank(folder, kind, run, tmp_path / "best.jsonl") == 0
    ranks = np.array([some.ranks[0] or 101 for some in read_candidates(tmp_path / "best.jsonl")])
    assert np.mean(ranks == 2) > 0.9
    # The best checkpoint has the best choices, and the command measures the same values.
    found = {line["step"]: line for line in log(run) if "dev/mean_rank" in line}
    best = json.loads((run / "checkpoints/best.json").read_text())
    assert best["value"] == min(line["dev/mean_rank"] for line in found.values()) == np.mean(ranks)
    assert len(found) == 3 and found[best["step"]]["dev/Success@5"] == np.mean(ranks <= 5)


@pytest.mark.parametrize("kind", KINDS)
def test_output_holds_queries_and_reordered_candidates(folder, models, tmp_path, kind):
    assert rerank(folder, kind, models[kind], tmp_path / "best.jsonl", "--keep=3") == 0
    before = {some.id: some for some in read_candidates(folder / f"{kind}-dev.jsonl")}
    queries = {query.id: query.text for query in read_queries(tmp_path / "best.jsonl")}
    records = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    reranker = QueryReranker.load(models[kind])
    texts = {r["_id"]: r["text"] for r in map(json.loads, (folder / "corpus.jsonl").read_text().splitlines())}
    assert reranker.reads_passages == (kind == "rd")
    for some, record in zip(read_candidates(tmp_path / "best.jsonl"), records, strict=True):
        assert len(some.outputs) == 3 and record["scores"] == sorted(record["scores"], reverse=True)
        places = [before[some.id].passages.index(passage) for passage in some.passages]
        assert some == before[some.id].of(places)
        assert queries[some.id] == f"{some.question[:-1]} ? {some.outputs[0]}"
        pairs = [(q, texts[p]) for q, p in zip(some.queries, some.passages, strict=True)]
        np.testing.assert_allclose(reranker.score(pairs), record["scores"], atol=1e-5)
        if kind == "ri":
            other = reranker.score([(query, "something else") for query, _ in pairs])
            np.testing.assert_allclose(other, record["scores"], atol=1e-5)
    assert rerank(folder, kind, models[kind], tmp_path / "best.jsonl", "--keep=2") == 0
    for some, record in zip(read_candidates(tmp_path / "best.jsonl"), records, strict=True):
        assert some.outputs == record["outputs"][:2], "another number of them is another file"


def test_query_reranker_is_refused_for_inputs_of_another_kind(folder, models, tmp_path, capsys):
    out = ["--output=" + str(tmp_path / "out.jsonl")]
    candidates = f"--candidates={folder}/ri-dev.jsonl"
    ri, rd = (f"--model={model}" for model in models.values())
    corpus, pairs = f"--corpus={folder}/corpus.jsonl", f"--model=hf:{GOLDEN / 'cross_bert'}"
    for form in ("hf", "jaxir"):
        convert = [f"--source={models['rd']}", f"--output={tmp_path}/{form}", f"--format={form}"]
        assert cli.main("jaxir.convert:convert", convert) == 0
    onnx = [ri, "--format=onnx", f"--output={tmp_path}/onnx"]
    (tmp_path / "beir/qrels").mkdir(parents=True)
    (tmp_path / "beir/queries.jsonl").write_text('{"_id": "q", "text": "who?"}\n')
    (tmp_path / "beir/corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "me"}\n')
    (tmp_path / "run.trec").write_text("q Q0 d 1 1 t\n")
    run = [f"--run={tmp_path}/run.trec", f"--dataset=beir:{tmp_path}/beir"]
    (tmp_path / "bare.jsonl").write_text('{"_id": "q", "question": "who?", "outputs": ["me"]}\n')
    bare = f"--candidates={tmp_path}/bare.jsonl"
    for command, flags, sentence in (
        ("expand:rerank", [ri, candidates, corpus, *out], "leave --corpus out"),
        ("expand:rerank", [rd, candidates, *out], "give --corpus=corpus.jsonl"),
        ("expand:rerank", [f"--model=hf:{tmp_path}/hf", candidates, *out], "give --corpus=corpus.jsonl"),
        ("expand:rerank", [f"--model={tmp_path}/jaxir", candidates, *out], "give --corpus=corpus.jsonl"),
        ("expand:rerank", [rd, bare, corpus, *out], "add them with jaxir.expand retrieve"),
        ("expand:rerank", [pairs, candidates, *out], "was trained to read pairs of a query and a passage"),
        ("expand:rerank", [ri, *out], "give --candidates, or --queries and --expansions"),
        ("rerank:rerank", [ri, *run, f"--output={tmp_path}/x.trec"], "use it with python -m jaxir.expand"),
        ("export:export", onnx, "a reranker of queries cannot be exported as a graph"),
    ):
        assert cli.main(f"jaxir.{command}", flags) == 1
        assert sentence in capsys.readouterr().err.splitlines()[-1], (command, flags)
    for spec in models.values():
        with pytest.raises(
            UserError, match=r"to read expanded queries .*: use it with python -m jaxir.expand"
        ):
            CrossEncoder.load(spec)
    assert not list(tmp_path.glob("*.jsonl.unfinished")) and not (tmp_path / "out.jsonl").exists()


def test_query_reranker_is_not_trained_with_unsuitable_settings(folder, tmp_path, capsys):
    convert = [f"--source=hf:{GOLDEN / 'seq2seq_1_1'}", "--kind=seq2seq", f"--output={tmp_path}/generator"]
    assert cli.main("jaxir.convert:convert", convert) == 0
    (tmp_path / "others.jsonl").write_text('{"_id": "q", "text": "who?"}\n')
    for flags, sentence in (
        (["--gin.READS=pair"], "a reranker of queries cannot read"),
        ([f"--gin.CORPUS={folder}/corpus.jsonl"], "leave --corpus out"),
        (["--gin.MAX_RANK=100"], "is 100, but must exceed the depth 100"),
        ([f"--gin.MODEL={tmp_path}/generator"], "a cross-encoder starts from one encoder, not from T5"),
        (evaluated(folder, "ri", f"--gin.DEV_CANDIDATES={tmp_path}/others.jsonl"), "1: no field 'question'"),
    ):
        assert train(folder, "ri", tmp_path / "run", "--steps=1", *flags) == 1
        assert sentence in capsys.readouterr().err
    with pytest.raises(UserError, match="set the model's reads to 'pair'"):
        Reranking().features(TextFormat(8, 8, 2, reads="expanded_query"))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_devices_give_the_same_numbers(kind):
    rng = np.random.default_rng(0)
    batch = {"query_ids": rng.integers(1, 50, (16, 5, 4)), "query_key": rng.integers(0, 99, (16, 5, 2))}
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    batch |= {"ranks": rng.integers(1, 9, (16, 5)).astype(np.float32)}
    if kind == "rd":
        batch["passage_ids"] = rng.integers(1, 50, (16, 5, 6)).astype(np.int32)
    direct = value_and_grad(QueryReranking(), batch)
    for chunks, some in ((4, batch), (2, on_mesh(batch))):
        found = value_and_grad(QueryReranking(chunks=chunks), some)
        np.testing.assert_allclose(found[0], direct[0], rtol=1e-5)
        np.testing.assert_allclose(found[1], direct[1], atol=1e-4)
    # A candidate that is repeated to fill the list counts once.
    repeated = {name: np.concatenate([x, x[:, :2]], axis=1) for name, x in batch.items()}
    np.testing.assert_allclose(value_and_grad(QueryReranking(), repeated)[0], direct[0], rtol=1e-6)

"""Fusion of runs, compared with values computed by hand, and the command."""

import numpy as np
import pytest

from jaxir import DualEncoder, cli
from jaxir.core.errors import UserError
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.indexes.entries_index import EntriesIndex
from jaxir.retrieval.ranking import fusion
from jaxir.retrieval.ranking.rescoring import score_candidates
from jaxir.retrieval.ranking.runs import read_run, write_run

A = {"q1": {"d1": 9.0, "d2": 5.0, "d3": 1.0}, "q2": {"d1": 2.0}}
B = {"q1": {"d4": 0.9, "d2": 0.8, "d1": 0.1}, "q3": {"d9": 0.5}}


def fuse(*flags: str) -> int:
    return cli.main("jaxir.fuse:fuse", flags)


def test_reciprocal_ranks_by_hand():
    run = fusion.reciprocal_rank_fusion([A, B])
    expected = {"d2": 1 / 62 + 1 / 62, "d1": 1 / 61 + 1 / 63, "d4": 1 / 61, "d3": 1 / 63}
    assert list(run["q1"]) == ["d1", "d2", "d4", "d3"]
    assert run["q1"] == pytest.approx(expected)
    assert run["q2"] == {"d1": 1 / 61} and run["q3"] == {"d9": 1 / 61}


def test_interpolation_by_hand():
    run = fusion.interpolate([A, B], weights=[0.25, 0.75])
    expected = {"d1": 0.25, "d2": 0.25 * 0.5 + 0.75 * 0.875, "d3": 0.0, "d4": 0.75}
    assert run["q1"] == pytest.approx(expected)
    assert run["q2"] == {"d1": 0.25}, "a single answer gets the run's whole weight"
    z = fusion.interpolate([A, B], weights=[0.25, 0.75], normalization="z_score")["q1"]
    a, b = np.array([9.0, 5.0, 1.0]), np.array([0.9, 0.8, 0.1])
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    assert z["d2"] == pytest.approx(0.25 * a[1] + 0.75 * b[1])
    assert z["d3"] == pytest.approx(0.25 * a[2] + 0.75 * b[2]), "what a run lacks gets the run's lowest score"
    flat = {"q1": {"d1": 3.0, "d5": 3.0}}
    z = fusion.interpolate([A, flat], weights=[0.25, 0.75], normalization="z_score")["q1"]
    assert z["d1"] == pytest.approx(0.25 * a[0]) and z["d5"] == pytest.approx(0.25 * a[2]), "all are average"
    rounded = {"q1": {"d1": 0.1, "d5": 0.1, "d6": 0.1}}  # in floats, their mean is above 0.1
    z = fusion.interpolate([A, rounded], weights=[0.25, 0.75], normalization="z_score")["q1"]
    assert z["d1"] == pytest.approx(0.25 * a[0]) and z["d6"] == pytest.approx(0.25 * a[2]), "all are average"
    shared = fusion.interpolate([A, B, flat])["q1"]
    assert shared["d2"] == pytest.approx((0.5 + 0.875 + 0) / 3), "equal weights that add up to 1"
    assert shared["d1"] == pytest.approx((1 + 0 + 1) / 3), "what was found is worth more than what was not"
    raw = fusion.interpolate([A, B], weights=[1, 10], normalization="none")["q1"]
    assert raw["d2"] == pytest.approx(5 + 8) and raw["d4"] == pytest.approx(1 + 9)
    with pytest.raises(UserError, match="there are 2 runs but 1 weights"):
        fusion.interpolate([A, B], weights=[1])


def test_rescoring_by_hand():
    dense = {"q1": {"d1": 0.1, "d2": 0.5, "d3": 0.2, "d7": 0.99}, "q2": {"d1": -1.0}}
    run = fusion.rescore(A, dense, alpha=20)
    assert run["q1"] == pytest.approx({"d1": 11.0, "d2": 15.0, "d3": 5.0}) and run["q2"] == {"d1": -18.0}
    assert fusion.rescore(A, dense, alpha=0) == A
    assert set(fusion.rescore(A, dense, alpha=20, depth=2)["q1"]) == {"d1", "d2"}
    worst_first = {"q1": dict(reversed(A["q1"].items()))}
    assert set(fusion.rescore(worst_first, dense, alpha=20, depth=2)["q1"]) == {"d1", "d2"}
    with pytest.raises(UserError, match=r"'q1': 2 of 3 documents to rescore have no score .*'d1'"):
        fusion.rescore(A, {"q1": {"d3": 1.0}}, alpha=1)


def test_round_robin_skips_duplicates():
    run = fusion.round_robin([A, B])
    assert list(run["q1"]) == ["d1", "d4", "d2", "d3"]
    scores = list(run["q1"].values())
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    assert list(fusion.round_robin([B, A], depth=3)["q1"]) == ["d4", "d1", "d2"]
    assert list(run["q3"]) == ["d9"]


@pytest.mark.parametrize("method", [fusion.reciprocal_rank_fusion, fusion.interpolate, fusion.round_robin])
def test_ties_go_to_the_greater_id(method):
    tie = {"q": {"a": 1.0, "c": 1.0, "b": 1.0}}
    assert list(method([tie, tie])["q"]) == ["c", "b", "a"]
    with pytest.raises(UserError, match="two or more runs"):
        method([tie])
    with pytest.raises(UserError, match="run 3 shares no query with the other runs"):
        method([A, B, {"x": {"d1": 1.0}}])


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "a.trec", A)
    write_run(tmp_path / "b.trec", {"q1": {**B["q1"], "d3": 0.05}, "q2": {"d1": 0.3}})
    (tmp_path / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\nq2\td1\t1\n")
    return tmp_path


def test_sweep_takes_the_best_alpha(runs, capsys):
    both, out = f"--runs={runs}/a.trec,{runs}/b.trec", runs / "best.trec"
    flags = [both, "--method=rescore", "--sweep=0,2,10,100", f"--qrels={runs}/dev.tsv", "--metric=RR"]
    assert fuse(*flags, f"--output={out}") == 0
    # With alpha a, d1 scores 9 + .1 a, and d2 scores 5 + .8 a: d2 is first from a = 40/7 on.
    out_text = capsys.readouterr().out
    assert "best alpha: 10\n" in out_text and "2 judged queries" in out_text
    values = [line.split("|")[2].strip() for line in out_text.splitlines() if line.startswith("| ")][1:]
    assert values == ["0.7500", "0.7500", "1.0000", "1.0000"]
    assert read_run(out)["q1"] == pytest.approx({"d1": 10.0, "d2": 13.0, "d3": 1.5})


def test_alpha_is_the_weight_of_the_second_run(runs):
    fused = [f"--runs={runs}/a.trec,{runs}/b.trec", "--method=interpolate", f"--output={runs}/mixed.trec"]
    assert fuse(*fused, "--alpha=0.25") == 0
    both = [read_run(runs / name) for name in ("a.trec", "b.trec")]
    expected = fusion.interpolate(both, weights=[0.75, 0.25])["q1"]
    assert read_run(runs / "mixed.trec")["q1"] == pytest.approx(expected)
    assert expected["d1"] > 0.75 > expected["d4"], "the first run's best stays ahead of the second's"


def test_rescoring_by_a_model_scores_every_candidate(tmp_path, toy, small_model):
    texts = toy.random_texts(50, seed=3)
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts)
    queries = toy.write_queries(tmp_path / "queries.jsonl", texts[:3])
    toy.encode(small_model, corpus, tmp_path / "emb", "--shard_size=16")
    rng = np.random.default_rng(0)
    first = {f"q{i}": {f"d{d}": float(rng.normal()) for d in rng.permutation(50)[:40]} for i in range(3)}
    write_run(tmp_path / "bm25.trec", first)
    dense = [f"--embeddings={tmp_path}/emb", f"--queries={queries}", f"--output={tmp_path}/hybrid.trec"]
    assert fuse(f"--runs={tmp_path}/bm25.trec", "--method=rescore", "--alpha=2.5", *dense, "--depth=30") == 0
    found = read_run(tmp_path / "hybrid.trec")
    vectors = np.concatenate(open_embeddings(tmp_path / "emb").shards)
    query_vectors = DualEncoder.load(small_model).encode_queries(texts[:3])
    for i in range(3):
        best = sorted(first[f"q{i}"], key=first[f"q{i}"].get, reverse=True)[:30]
        expected = {d: first[f"q{i}"][d] + 2.5 * float(vectors[int(d[1:])] @ query_vectors[i]) for d in best}
        assert found[f"q{i}"] == pytest.approx(expected, abs=1e-5)
    other = DualEncoder.load(toy.save_model(tmp_path / "other", seed=7))
    asked = {f"q{i}": texts[i] for i in range(3)}
    embeddings = open_embeddings(tmp_path / "emb")
    with pytest.raises(UserError, match=r"made with .*, not with .*encode the corpus again"):
        score_candidates(first, queries=asked, embeddings=embeddings, encoder=other, depth=30)


class Doubles:
    """A query tower whose texts are numbers of documents; it gives twice the document's vector."""

    fingerprint = "f" * 64

    def __init__(self, vectors):
        self.vectors = vectors

    def encode_queries(self, texts):
        return 2 * self.vectors[[int(text) for text in texts]]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_candidates_are_scored_as_by_search(toy, similarity):
    """Documents with several vectors (corpus expansion) have the score of the best one."""
    vectors = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    vectors *= np.arange(1, 10, dtype=np.float32)[:, None]
    ids = ["d0", "d0", "d1", "d2", "d3", "d3", "d3", "d4", "d5"]
    stored = toy.stored(vectors, ids, 4, similarity)
    candidates = {"q1": {"d5": 3.0, "d0": 2.0, "d3": 1.0, "d1": 0.5}, "q2": {"d4": 1.0}}
    encoder, texts = Doubles(vectors), {"q1": "2", "q2": "0"}
    found = score_candidates(candidates, queries=texts, embeddings=stored, encoder=encoder, depth=3)
    scores, near = EntriesIndex.build(vectors, ids, similarity=similarity).search(2 * vectors[[2, 0]], 6)
    exact = [dict(zip(*row, strict=True)) for row in zip(near, scores.tolist(), strict=True)]
    assert found["q1"] == pytest.approx({d: exact[0][d] for d in ("d5", "d0", "d3")}, rel=1e-5)
    assert found["q2"] == pytest.approx({"d4": exact[1]["d4"]}, rel=1e-5)
    vectors[5] = 3e38
    with pytest.raises(UserError, match=r"^the vector of 'd3' has the norm 6e\+38"):
        score_candidates(candidates, queries=texts, embeddings=stored, encoder=encoder, depth=3)


def test_fusion_refuses_runs_without_common_queries(tmp_path, capsys):
    write_run(tmp_path / "a.trec", A)
    write_run(tmp_path / "other.trec", {"query-1": {"d1": 1.0}, "query-2": {"d2": 1.0}})
    (tmp_path / "empty.trec").touch()
    for second, sentence in (
        (
            "other.trec",
            f"{tmp_path}/a.trec shares no query with the other run: give runs of the same queries",
        ),
        ("empty.trec", f"{tmp_path}/empty.trec: the file is empty"),
    ):
        runs = f"--runs={tmp_path}/a.trec,{tmp_path}/{second}"
        assert fuse(runs, "--method=rrf", f"--output={tmp_path}/x.trec") == 1
        assert capsys.readouterr().err == f"error: {sentence}\n"
    assert not (tmp_path / "x.trec").exists()


def test_fusion_warns_of_incomplete_and_foreign_runs(tmp_path, capsys):
    whole = {f"q{q}": {f"d{d}": float(d) for d in range(3)} for q in range(9)}
    write_run(tmp_path / "a.trec", whole)
    write_run(tmp_path / "cut.trec", {q: whole[q] for q in list(whole)[:5]})
    write_run(tmp_path / "foreign.trec", {q: {f"msmarco-{d}": 1.0 for d in range(3)} for q in whole})

    def warning(other):
        runs = f"--runs={tmp_path}/a.trec,{tmp_path}/{other}"
        assert fuse(runs, "--method=rrf", f"--output={tmp_path}/x.trec") == 0
        return capsys.readouterr().err

    assert f"{tmp_path}/cut.trec has no documents for 4 of 9 queries (such as 'q5')" in warning("cut.trec")
    assert "foreign.trec has no document in common with the others" in warning("foreign.trec")
    write_run(tmp_path / "b.trec", whole)
    assert warning("b.trec") == ""

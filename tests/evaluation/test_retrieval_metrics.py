import math

import numpy as np
import pytest

from jaxir.evaluation.retrieval_metrics import evaluate_run
from jaxir.retrieval.ranking.runs import rank

# q1 has graded judgements; its run has an unjudged document between relevant ones, and misses a relevant one.
# q2's relevant document has rank 11. q3 is judged, but the run has no answers to it. q4 is not judged.
QRELS = {"q1": {"d1": 2, "d2": 1, "d3": 1, "d4": 0}, "q2": {"d1": 1}, "q3": {"d5": 1}}
RUN = {
    "q1": {"d2": 9.0, "x": 8.0, "d1": 7.0, "d4": 6.0},
    "q2": {f"n{i:02}": 20.0 - i for i in range(10)} | {"d1": 1.0},
    "q4": {"d1": 1.0},
}


def log2(x):
    return math.log(x, 2)


def test_values_by_hand():
    scores = evaluate_run(RUN, QRELS, "nDCG@10 nDCG AP RR RR@10 P@1 P@10 R@2 R@100 Success@1 RR(rel=2)@10")
    ideal_q1 = 2 / log2(2) + 1 / log2(3) + 1 / log2(4)
    dcg_q1 = 1 / log2(2) + 2 / log2(4)
    expected = {
        "nDCG@10": (dcg_q1 / ideal_q1, 0, 0),
        "nDCG": (dcg_q1 / ideal_q1, 1 / log2(12), 0),
        "AP": ((1 / 1 + 2 / 3) / 3, 1 / 11, 0),
        "RR": (1, 1 / 11, 0),
        "RR@10": (1, 0, 0),
        "P@1": (1, 0, 0),
        "P@10": (2 / 10, 0, 0),
        "R@2": (1 / 3, 0, 0),
        "R@100": (2 / 3, 1, 0),
        "Success@1": (1, 0, 0),
        "RR(rel=2)@10": (1 / 3, 0, 0),
    }
    for name, values in expected.items():
        assert list(scores.per_query[name]) == ["q1", "q2", "q3"]
        np.testing.assert_allclose(list(scores.per_query[name].values()), values, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(scores.values[name], sum(values) / 3, rtol=1e-6, err_msg=name)
    assert (scores.queries, scores.unanswered, scores.unjudged) == (3, 1, 1)
    assert "3 judged queries" in scores.describe() and "score 0: 1" in scores.describe()


def test_capped_recall_by_hand():
    """Wang 2022, eq. 4.1: q1 has three relevant documents, one in its first 2 and two in its first 3."""
    scores = evaluate_run(RUN, QRELS, "CappedR@2 R_cap@3 R@2 cappedr@100")
    assert scores.per_query["CappedR@2"] == pytest.approx({"q1": 1 / 2, "q2": 0, "q3": 0})
    assert scores.per_query["R_cap@3"] == pytest.approx({"q1": 2 / 3, "q2": 0, "q3": 0})
    assert scores.values["CappedR@2"] == pytest.approx(1 / 6)
    assert scores.per_query["cappedr@100"] == pytest.approx({"q1": 2 / 3, "q2": 1, "q3": 0})


def test_synonyms_and_case_mean_the_same_metric():
    groups = "MRR@10 mrr@10 RR@10, MAP map AP, NDCG@10 ndcg@10 nDCG@10, Recall@2 r@2 R@2, Hit@1 Success@1"
    values = evaluate_run(RUN, QRELS, groups).values
    for group in map(str.split, groups.split(",")):
        assert len({values[name] for name in group}) == 1 and values[group[0]] > 0


@pytest.mark.parametrize("metrics", ["RR@10", "RR", "P@1", "nDCG@1", "Judged@1"])
def test_ties_go_to_the_greater_id_in_every_provider(metrics):
    """RR@10 and RR come from two providers of ir_measures that break ties in opposite ways."""
    for winner, loser in (("b", "a"), ("10", "1"), ("é", "z")):
        for relevant, value in ((winner, 1.0), (loser, 0.5 if metrics.startswith("RR") else 0.0)):
            qrels = {"q": {relevant: 1}}
            assert evaluate_run({"q": {winner: 1.0, loser: 1.0}}, qrels, metrics).values[metrics] == value
            assert evaluate_run({"q": {loser: 1.0, winner: 1.0}}, qrels, metrics).values[metrics] == value


def test_scores_are_compared_in_float32():
    """trec_eval reads scores as float32, so smaller differences are ties."""
    assert rank({"a": 1.0 + 1e-12, "b": 1.0}) == ["b", "a"]
    assert rank({"a": 1.0 + 1e-6, "b": 1.0}) == ["a", "b"]
    assert rank({"a": -1.0, "b": 0.0, "c": -2.0}) == ["b", "a", "c"]


def test_identical_ids_policy():
    qrels = {"7": {"3": 1}, "3": {"4": 1}}
    run = {"7": {"7": 2.0, "3": 1.0}, "3": {"4": 1.0}, "9": {"9": 1.0}}  # query 9 is not judged
    kept = evaluate_run(run, qrels, "RR")
    dropped = evaluate_run(run, qrels, "RR", identical_ids="drop")
    assert kept.per_query["RR"] == {"7": 0.5, "3": 1.0}
    assert dropped.per_query["RR"] == {"7": 1.0, "3": 1.0}
    assert kept.identical == dropped.identical == 1
    assert "kept (1 found)" in kept.describe() and "dropped (1 found)" in dropped.describe()
    alone = evaluate_run({"7": {"7": 2.0}, "3": {"4": 1.0}}, qrels, "RR", identical_ids="drop")
    assert alone.values["RR"] == 0.5 and alone.unanswered == 1

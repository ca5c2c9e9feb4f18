"""`evaluate --model` scores multi-vector and sparse encoders by their own similarity."""

import json

import pytest

from jaxir import MultiVectorEncoder, SparseEncoder
from jaxir.evaluate import evaluate
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.retrieval_metrics import evaluate_run
from tests.beir_folder import write_folder
from tests.interop.folders import GOLDEN

MULTI = f"st:{GOLDEN / 'multi_vector/pylate'}"


def scores_of(encoder, queries, passages):
    vectors = encoder.encode_queries(queries), encoder.encode_passages(passages)
    if isinstance(encoder, SparseEncoder):
        return (vectors[0] @ vectors[1].T).toarray()
    return encoder.similarity(*vectors)


@pytest.mark.parametrize("kind", ["multi_vector", "sparse"])
def test_metrics_are_those_of_all_scores(kind, tmp_path):
    folder = write_folder(tmp_path / "pairs", train=20, held_out=10)
    if kind == "sparse":
        encoder = SparseEncoder.load(f"hf:{GOLDEN / 'mlm_bert'}", query_max_length=24, passage_max_length=24)
        encoder.save(tmp_path / "model")
        model = str(tmp_path / "model")
    else:
        encoder, model = MultiVectorEncoder.load(MULTI), MULTI
    found = evaluate(model=model, dataset=f"beir:{folder}", metrics="nDCG@10 RR R@20", depth=20)
    judgements = read_judgements(folder / "qrels/test.tsv")
    texts = [
        {r["_id"]: r["text"] for r in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())}
        for name in ("queries", "corpus")
    ]
    scores = scores_of(encoder, [texts[0][query] for query in judgements], list(texts[1].values()))
    run = {
        q: dict(zip(texts[1], map(float, row), strict=True))
        for q, row in zip(judgements, scores, strict=True)
    }
    run = {q: dict(sorted(row.items(), key=lambda x: (-x[1], x[0]))[:20]) for q, row in run.items()}
    expected = evaluate_run(run, judgements, "nDCG@10 RR R@20").values
    assert found["metrics"] == pytest.approx(expected, abs=1e-6)
    assert found["similarity"] == encoder.similarity_fn_name and found["fingerprint"] == encoder.fingerprint

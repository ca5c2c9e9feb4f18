"""Hybrid encoders (BGE-M3): FlagEmbedding's outputs and scores, and the models that have one head."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from jaxir import (
    DualEncoder,
    HybridEncoder,
    MultiVectorEncoder,
    SparseEncoder,
    load_index,
    read_run,
    write_run,
)
from jaxir.core.errors import UserError
from jaxir.encode import encode
from jaxir.index import index
from jaxir.interop.formats import convert
from jaxir.rerank import rerank

FOLDER = Path(__file__).parents[1] / "golden/hybrid"  # written by make_hybrid.py
TEXTS = json.loads((FOLDER / "texts.json").read_text())
SIDES = {"query": TEXTS["queries"], "passage": TEXTS["passages"]}
LENGTHS = {"query_max_length": 16, "passage_max_length": 16}


@pytest.fixture(scope="module")
def expected():
    return np.load(FOLDER / "vectors.npz")


@pytest.fixture(scope="module")
def encoder():
    return HybridEncoder.load(f"hf:{FOLDER}", **LENGTHS)


def check(found, expected, side):
    np.testing.assert_allclose(found.dense, expected[f"{side}_dense"], atol=1e-6)
    np.testing.assert_allclose(found.sparse.toarray(), expected[f"{side}_sparse"], atol=1e-5)
    assert [len(vectors) for vectors in found.tokens] == expected[f"{side}_lengths"].tolist()
    np.testing.assert_allclose(np.concatenate(found.tokens), expected[f"{side}_tokens"], atol=2e-6)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_outputs_equal_flagembeddings(encoder, expected, side, batch_size):
    check(encoder.encode(SIDES[side], tower=side, batch_size=batch_size), expected, side)


def test_scores_equal_flagembeddings(encoder, expected):
    scores = encoder.similarity(
        encoder.encode_queries(SIDES["query"]), encoder.encode_passages(SIDES["passage"])
    )
    for ours, theirs in {"dense": "dense", "sparse": "sparse", "tokens": "colbert"}.items():
        np.testing.assert_allclose(scores[ours].ravel(), expected[f"score_{theirs}"], rtol=1e-5, atol=1e-5)
    mean = scores["sum"].ravel() / (1 + 0.3 + 1)  # FlagEmbedding divides by the sum of the weights
    np.testing.assert_allclose(mean, expected["score_colbert+sparse+dense"], rtol=1e-5)


def test_one_text_and_no_text(encoder, expected):
    one = encoder.encode_queries(SIDES["query"][0])
    np.testing.assert_allclose(one.dense, expected["query_dense"][:1], atol=1e-6)
    none = encoder.encode_passages([])
    assert none.dense.shape == (0, 32) and none.sparse.shape == (0, 53) and none.tokens == []
    assert encoder.similarity(one, none)["sum"].shape == (1, 0)


@pytest.mark.parametrize("saved", [False, True], ids=["folder", "jaxir"])
def test_models_with_one_head_open_a_hybrid_encoder(encoder, expected, tmp_path, saved):
    spec = f"hf:{FOLDER}"
    if saved:
        encoder.save(tmp_path / "model")
        spec = str(tmp_path / "model")
        check(HybridEncoder.load(spec).encode_passages(SIDES["passage"]), expected, "passage")
    dense, weights, tokens = (
        kind.load(spec, **LENGTHS).encode_passages(SIDES["passage"])
        for kind in (DualEncoder, SparseEncoder, MultiVectorEncoder)
    )
    np.testing.assert_allclose(dense, expected["passage_dense"], atol=1e-6)
    np.testing.assert_allclose(weights.toarray(), expected["passage_sparse"], atol=1e-5)
    np.testing.assert_allclose(np.concatenate(tokens), expected["passage_tokens"], atol=2e-6)


def test_an_exported_folder_has_the_same_outputs_in_all_forms(tmp_path, expected):
    convert(f"hf:{FOLDER}", tmp_path / "folder", "st")
    for form in ("st", "hf"):
        found = HybridEncoder.load(f"{form}:{tmp_path}/folder", **LENGTHS)
        check(found.encode_passages(SIDES["passage"]), expected, "passage")
    dense = DualEncoder.load(f"st:{tmp_path}/folder", **LENGTHS).encode_passages(SIDES["passage"])
    np.testing.assert_allclose(dense, expected["passage_dense"], atol=1e-6)


def test_rounded_weights_are_not_saved(tmp_path):
    rounded = HybridEncoder.load(f"hf:{FOLDER}", dtype="bfloat16")
    with pytest.raises(UserError, match="the weights were rounded to bfloat16: load the model in float32"):
        rounded.save(tmp_path / "model")


def test_a_saved_head_stays_what_it_is(tmp_path, expected):
    SparseEncoder.load(f"hf:{FOLDER}", **LENGTHS).save(tmp_path / "weights")
    found = SparseEncoder.load(str(tmp_path / "weights"))
    np.testing.assert_allclose(
        found.encode_passages(SIDES["passage"]).toarray(), expected["passage_sparse"], atol=1e-5
    )
    top = found.encode_passages(SIDES["passage"], max_active_dims=2)
    assert sparse.issparse(top) and max(np.diff(top.indptr)) == 2
    with pytest.raises(UserError, match=r"is a sparse encoder, .*; expected a hybrid encoder"):
        HybridEncoder.load(str(tmp_path / "weights"))


def test_a_run_is_reranked_by_the_sum_of_the_heads(tmp_path):
    encoder = HybridEncoder.load(f"hf:{FOLDER}")
    folder = tmp_path / "data"
    folder.mkdir()
    for name, texts in (("queries", SIDES["query"][:1]), ("corpus", SIDES["passage"])):
        lines = (json.dumps({"_id": f"{name[0]}{i}", "text": text}) for i, text in enumerate(texts))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    write_run(tmp_path / "a.trec", {"q0": {"c0": 3.0, "c3": 2.0, "c2": 1.0}})
    rerank(
        model=f"hf:{FOLDER}", run=f"{tmp_path}/a.trec", dataset=f"beir:{folder}", output=f"{tmp_path}/b.trec"
    )
    texts = encoder.encode_passages([SIDES["passage"][i] for i in (0, 3, 2)])
    sums = encoder.similarity(encoder.encode_queries(SIDES["query"][:1]), texts)["sum"][0]
    found = read_run(tmp_path / "b.trec")["q0"]
    np.testing.assert_allclose([found[f"c{i}"] for i in (0, 3, 2)], sums, rtol=1e-4)


def test_commands_index_what_a_head_makes(tmp_path, expected):
    lines = (json.dumps({"_id": str(i), "text": text}) for i, text in enumerate(SIDES["passage"]))
    (tmp_path / "corpus.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for head, backend, kind in (("dense", "exact", "vectors"), ("tokens", "maxsim", "token_vectors")):
        encode(f"hf:{FOLDER}", f"{tmp_path}/corpus.jsonl", f"{tmp_path}/{head}", max_length=16, head=head)
        index(backend=backend, embeddings=f"{tmp_path}/{head}", output=f"{tmp_path}/{head}_index")
        assert load_index(tmp_path / f"{head}_index").query_kind == kind
    of_tokens = np.load(tmp_path / "tokens/embeddings-00000.npy")
    order = [int(i) for i in json.loads((tmp_path / "tokens/ids-00000.json").read_text())]
    starts = np.split(expected["passage_tokens"], np.cumsum(expected["passage_lengths"])[:-1])
    np.testing.assert_allclose(of_tokens, np.concatenate([starts[i] for i in order]), atol=1e-3)
    with pytest.raises(UserError, match="--head only applies to a hybrid encoder"):
        encode(f"hf:{FOLDER.parent / 'bert'}", f"{tmp_path}/corpus.jsonl", f"{tmp_path}/no", head="tokens")


def test_folders_without_both_heads_are_refused(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "half")
    (tmp_path / "half/sparse_linear.pt").unlink()
    for kind in (HybridEncoder, MultiVectorEncoder):
        with pytest.raises(UserError, match=r"half has no head for token .*: give a model that has one"):
            kind.load(f"hf:{tmp_path}/half")
    with pytest.raises(UserError, match="weights needs the heads dense, sparse, tokens; got dense"):
        HybridEncoder.similarity(None, None, None, weights={"dense": 1.0})

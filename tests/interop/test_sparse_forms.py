"""Sparse encoders of every form: vectors of sentence-transformers, folders written again, and search."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from jaxir import SparseEncoder, encode_weights
from jaxir.core.errors import UserError
from jaxir.interop import formats
from jaxir.interop.build import PretrainedSparse
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf_sparse_encoder
from jaxir.interop.model import identity
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.sparse_building import build_of_texts
from jaxir.retrieval.searcher import Searcher
from tests.interop.folders import GOLDEN, change, tensors_of

FORMS = GOLDEN / "sparse_forms"
# The texts of tests/golden/make_sparse_forms.py.
TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "",
    "   ",
    "[PAD] the <pad> cat [CLS] </s>",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left on the table last night. " * 4,
]
NAMES = sorted(path.name for path in FORMS.iterdir())
WRITTEN = [
    "codes_prompts",
    "codes_and_words",
    "codes_normalized",
    "normalized",
    "factors",
    "static",
    "tokens_dense",
    "mapped",
]
WRITTEN += ["head_modernbert_untied", "head_eurobert_biased"]


def load(name: str) -> SparseEncoder:
    return SparseEncoder.load(f"st:{FORMS / name}")


@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_those_of_sentence_transformers(name):
    golden, encoder = np.load(FORMS / name / "vectors.npz"), load(name)
    for side, encode in (("query", encoder.encode_queries), ("passage", encoder.encode_passages)):
        for end, limit in (("", None), *([] if name.startswith("head_") else [("_top", 7)])):
            found, expected = encode(TEXTS, max_active_dims=limit), golden[side + end]
            assert found.has_canonical_format and found.nnz == np.count_nonzero(expected)
            np.testing.assert_allclose(found.toarray(), expected, rtol=1e-6, atol=1e-5, err_msg=side + end)
    a, b = (sparse.csr_matrix(golden[side]) for side in ("query", "passage"))
    np.testing.assert_allclose(encoder.similarity(a, b), golden["similarity"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(encoder.similarity_pairwise(a, b), golden["pairwise"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WRITTEN)
def test_saved_encoders_and_written_folders_give_the_same_vectors(name, tmp_path):
    encoder = load(name)
    encoder.save(tmp_path / "ours")
    formats.convert(str(tmp_path / "ours"), tmp_path / "theirs", "st")
    for spec in (str(tmp_path / "ours"), f"st:{tmp_path / 'theirs'}"):
        again = SparseEncoder.load(spec)
        assert again.model.config == encoder.model.config
        for side in ("query", "passage"):
            assert (again.encode(TEXTS, tower=side) != encoder.encode(TEXTS, tower=side)).nnz == 0
            assert again.text_settings(side) == encoder.text_settings(side)
    assert SparseEncoder.load(str(tmp_path / "ours")).fingerprint == encoder.fingerprint


def test_written_autoencoders_and_stored_weights_have_the_folders_tensors(tmp_path):
    formats.convert(f"st:{FORMS / 'codes_prompts'}", tmp_path / "codes", "st")
    formats.convert(f"st:{FORMS / 'codes_and_words'}", tmp_path / "both", "st")
    formats.convert(f"st:{FORMS / 'other_tokenizer'}", tmp_path / "other", "st")
    for written, original in (
        ("codes/3_SparseAutoEncoder", "codes_prompts/3_SparseAutoEncoder"),
        ("both/0_Router/query_2_SparseAutoEncoder", "codes_and_words/query_2_SparseAutoEncoder"),
        ("other/0_Router/query_0_SparseStaticEmbedding", "other_tokenizer/query_0_SparseStaticEmbedding"),
    ):
        ours, theirs = tensors_of(tmp_path / written), tensors_of(FORMS / original)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
        folders = tmp_path / written, FORMS / original
        one, other = (json.loads((folder / "config.json").read_text()) for folder in folders)
        assert one == other


def test_weights_of_a_json_file_and_older_names_are_read(tmp_path):
    folder = Path(shutil.copytree(FORMS / "from_json", tmp_path / "model"))
    static = folder / "query_0_SparseStaticEmbedding"
    (static / "model.safetensors").unlink()
    (static / "config.json").write_text('{"path": "idf.json", "frozen": true}')
    path = folder / "router_config.json"
    text = path.read_text().replace("document_0_Transformer", "document_0_MLMTransformer")
    (folder / "document_0_Transformer").rename(folder / "document_0_MLMTransformer")
    content = json.loads(text)
    older = "sentence_transformers.sparse_encoder.models"
    content["types"] = {name: f"{older}.{name.rpartition('_')[2]}" for name in content["types"]}
    del content["parameters"]["route_mappings"]
    path.write_text(json.dumps(content))
    settings = {"max_seq_length": 24, "do_lower_case": False}
    (folder / "document_0_MLMTransformer" / "sentence_bert_config.json").write_text(json.dumps(settings))
    assert SparseEncoder.load(f"st:{folder}").fingerprint == load("from_json").fingerprint
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    wanted = hub_files.wanted(names, lambda file: json.loads((folder / file).read_text()), "x", modules=True)
    for file in wanted.small + wanted.weights:
        (tmp_path / "downloaded" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / file, tmp_path / "downloaded" / file)
    found = hf_sparse_encoder.read(tmp_path / "downloaded")
    assert identity.fingerprint(found) == load("from_json").fingerprint


def test_a_download_has_the_autoencoder_after_a_router(tmp_path):
    folder = FORMS / "codes_router"
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    wanted = hub_files.wanted(names, lambda file: json.loads((folder / file).read_text()), "x", modules=True)
    for files, use in ((wanted.small, hf_sparse_encoder.check), (wanted.weights, hf_sparse_encoder.read)):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, tmp_path / file)
        found = use(tmp_path)
    assert identity.fingerprint(found) == identity.fingerprint(hf_sparse_encoder.read(folder))


def test_lengths_of_both_sides_are_written(tmp_path):
    folder = Path(shutil.copytree(FORMS / "codes", tmp_path / "model"))
    change(folder / "sentence_bert_config.json", query_length=6, document_length=15)
    formats.convert(f"st:{folder}", tmp_path / "theirs", "st")
    for place in (folder, tmp_path / "theirs"):
        encoder = SparseEncoder.load(f"st:{place}")
        assert [encoder.text_settings(side)[1] for side in ("query", "passage")] == [6, 15]


def test_stored_weights_are_not_rounded():
    low = SparseEncoder.load(f"st:{FORMS / 'static'}", dtype="bfloat16")
    assert (low.encode_passages(TEXTS) != load("static").encode_passages(TEXTS)).nnz == 0


def test_an_encoder_with_two_models_uses_each_for_its_side(tmp_path):
    encoder = load("two_models")
    assert encoder.text_settings("query") == ("ask the cat: ", 24)
    assert encoder.text_settings("passage") == ("dog: ", 40)
    given = encoder.encode_queries(TEXTS, prompt_name="other")
    assert (given != encoder.queries.encode_passages(TEXTS, prompt="mice ")).nnz == 0
    assert [len(ids) for ids in encoder.tokens(TEXTS[-1:], "query")] == [24]
    assert [len(ids) for ids in encoder.tokens(TEXTS[-1:], "passage")] == [40]
    short = SparseEncoder.load(f"st:{FORMS / 'two_models'}", query_max_length=5, passage_max_length=6)
    assert [short.text_settings(side)[1] for side in ("query", "passage")] == [5, 6]
    encoder.save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "queries")
    load("codes").save(tmp_path / "saved" / "queries")
    with pytest.raises(UserError, match=r"is not the model of queries that .* names"):
        SparseEncoder.load(str(tmp_path / "saved"))


def test_a_prompt_that_pooling_leaves_out_changes_with_the_call():
    encoder = load("codes_prompts")
    by_name = encoder.encode_queries(TEXTS, prompt_name="document")
    assert (by_name != encoder.encode_passages(TEXTS)).nnz == 0
    assert (by_name != encoder.encode_queries(TEXTS)).nnz > 0


def corpus(place: Path) -> Path:
    lines = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    (place / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place / "corpus.jsonl"


@pytest.mark.parametrize("name", ["codes_cosine", "two_models", "codes_static"])
def test_an_index_finds_the_documents_of_the_largest_similarity(name, tmp_path):
    encoder = load(name)
    index = build_of_texts(encoder, corpus(tmp_path))
    index.save(tmp_path / "index")
    assert load_index(tmp_path / "index").info.similarity == encoder.similarity_fn_name
    kept = [i for i, text in enumerate(TEXTS) if text.strip()]
    questions = ["the mice", "a dog"]
    scores, ids = Searcher.open(tmp_path / "index").search(questions, 3)
    passages = encoder.encode_passages([TEXTS[i] for i in kept])
    expected = encoder.similarity(encoder.encode_queries(questions), passages)
    for row, found, of_query in zip(scores, ids, expected, strict=True):
        order = [i for i in np.argsort(-of_query, kind="stable")[:3] if of_query[i] > 0]
        assert found == [f"d{kept[i]}" for i in order]
        np.testing.assert_allclose(row[: len(order)], of_query[order], rtol=1e-5)


def test_distances_are_neither_indexed_nor_written_as_weights(tmp_path):
    for name, distance in (("codes_prompts", "euclidean"), ("other_tokenizer", "manhattan")):
        message = f"compares vectors by {distance} distance, and an inverted index only by dot or cosine"
        with pytest.raises(UserError, match=message):
            build_of_texts(load(name), corpus(tmp_path))
        with pytest.raises(UserError, match=message):
            encode_weights(load(name), tmp_path / "corpus.jsonl", tmp_path / "vectors.jsonl")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("codes", "only a language model with pooling can be trained"),
        ("two_models", "training of stored query weights, or of two models, is not supported"),
    ],
)
def test_other_forms_cannot_be_trained(name, reason):
    with pytest.raises(UserError, match=reason):
        PretrainedSparse(source=f"st:{FORMS / name}").build(seed=0)

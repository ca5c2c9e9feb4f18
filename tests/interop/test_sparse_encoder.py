"""Sparse encoders: the weights of sentence-transformers, refused folders, and folders written again."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import DualEncoder, SparseEncoder, encode_weights
from jaxir.core.errors import UserError
from jaxir.data.formats.sparse_vectors import read_sparse_vectors
from jaxir.interop import formats
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf_sparse_encoder
from jaxir.interop.model import identity
from jaxir.models.sparse_encoder import pooled_logits
from tests.interop.folders import GOLDEN, change, change_tensors, tensors_of

# The texts of tests/golden/make_golden.py.
TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left on the table last night.",
]
LANGUAGE_MODELS = {
    "max": "bert",
    "sum": "distilbert",
    "top": "roberta",
    "router": "bert",
    "router_top": "roberta",
}


def sparse_folder(name: str, place: Path) -> Path:
    """Copies a folder of `golden/sparse` and puts the weights of its language model back."""
    folder = Path(shutil.copytree(GOLDEN / "sparse" / name, place / name))
    for settings in folder.rglob("sentence_bert_config.json"):
        weights = GOLDEN / f"mlm_{LANGUAGE_MODELS[name]}" / "model.safetensors"
        shutil.copy(weights, settings.parent / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    return sparse_folder("max", tmp_path)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_weights_equal_those_of_sentence_transformers(name, tmp_path):
    golden = np.load(GOLDEN / "sparse" / name / "vectors.npz")
    encoder = SparseEncoder.load(f"st:{sparse_folder(name, tmp_path)}")
    for side, encode in (("query", encoder.encode_queries), ("passage", encoder.encode_passages)):
        found = encode(TEXTS)
        assert found.format == "csr" and found.dtype == np.float32 and found.has_canonical_format
        assert found.nnz == np.count_nonzero(golden[side])
        np.testing.assert_allclose(found.toarray(), golden[side], atol=1e-5, err_msg=side)
        alone = encode(TEXTS, batch_size=1)  # no padding except up to a multiple of 8
        np.testing.assert_allclose(alone.toarray(), golden[side], atol=1e-5)
        assert encode([]).shape == (0, encoder.dimension)


def test_jaxir_directory_and_written_folder_keep_the_weights(tmp_path):
    for name in ("router_top", "sum"):
        source = f"st:{sparse_folder(name, tmp_path)}"
        encoder = SparseEncoder.load(source)
        encoder.save(tmp_path / name / "ours")
        assert SparseEncoder.load(str(tmp_path / name / "ours")).fingerprint == encoder.fingerprint
        formats.convert(str(tmp_path / name / "ours"), tmp_path / name / "theirs", "st")
        again = SparseEncoder.load(f"st:{tmp_path / name / 'theirs'}")
        assert again.fingerprint == encoder.fingerprint
        assert again.settings == encoder.settings
        assert again.max_active_dims == encoder.max_active_dims
        for path in (tmp_path / name).rglob("model.safetensors"):
            if "theirs" in path.parts:
                _assert_same_tensors(path, tmp_path / name)
        assert "SparseEncoder(" in (tmp_path / name / "theirs" / "README.md").read_text()


def _assert_same_tensors(written: Path, original: Path) -> None:
    names = {"0_Router": ".", "document_0_MLMTransformer": "document_0_Transformer"}
    parts = [names.get(part, part) for part in written.parent.parts[written.parts.index("theirs") + 1 :]]
    ours, theirs = tensors_of(written.parent), tensors_of(original.joinpath(*parts))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value)


def test_max_active_dims_and_prompts_of_a_call(tmp_path):
    encoder = SparseEncoder.load(f"st:{sparse_folder('router_top', tmp_path)}")
    whole = encoder.encode_passages(TEXTS[:1], max_active_dims=encoder.dimension).toarray()
    few = encoder.encode_passages(TEXTS[0], max_active_dims=3).toarray()
    largest = np.sort(whole[0])[-3]
    np.testing.assert_array_equal(few, np.where(whole >= largest, whole, 0.0))
    by_name = encoder.encode_queries(TEXTS, prompt_name="document")
    by_text = encoder.encode_queries(TEXTS, prompt="dog: ")
    assert (by_name != by_text).nnz == 0
    assert (by_name != encoder.encode_queries(TEXTS)).nnz > 0
    with pytest.raises(ValueError, match="max_active_dims must be at least 1, not 0"):
        encoder.encode_queries(TEXTS, max_active_dims=0)
    with pytest.raises(UserError, match="has no prompt named 'title'"):
        encoder.encode_queries(TEXTS, prompt_name="title")


def test_token_weights_name_the_tokens_of_a_query(tmp_path):
    folder = sparse_folder("router_top", tmp_path)  # RoBERTa, whose padding token has id 1
    encoder = SparseEncoder.load(f"st:{folder}")
    weights = tensors_of(folder / "query_0_SparseStaticEmbedding")["weight"]
    vocabulary = json.loads((folder / "query_0_SparseStaticEmbedding" / "tokenizer.json").read_text())[
        "model"
    ]
    found = encoder.token_weights(encoder.encode_queries("<pad><s>a", prompt="", max_active_dims=100))[0]
    ids = vocabulary["vocab"]
    expected = {token: weights[ids[token]] for token in ("<pad>", "<s>", "a")}
    assert found == pytest.approx({token: weight for token, weight in expected.items() if weight})
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_written_weights_are_those_that_an_impact_index_reads(tmp_path):
    encoder = SparseEncoder.load(f"st:{sparse_folder('router_top', tmp_path)}")
    texts = {"a": "the cat sat", "b": "Dogs chase cats; cats chase mice"}
    lines = {
        "passage": [
            {"_id": "a", "title": "the", "text": "cat sat"},
            {"_id": "b", "title": "", "text": texts["b"]},
        ],
        "query": [{"_id": name, "text": text} for name, text in texts.items()],
    }
    for tower, records in lines.items():
        source, output = tmp_path / f"{tower}.jsonl", tmp_path / f"{tower}_vectors.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        report = encode_weights(encoder, source, output, tower=tower, scale=50)
        expected = encoder.token_weights(encoder.encode(texts.values(), tower=tower))
        rounded = [{t: round(50 * w) for t, w in found.items() if round(50 * w)} for found in expected]
        assert list(read_sparse_vectors(output)) == list(zip(texts, rounded, strict=True))
        assert (report.texts, report.outputs) == (2, sum(map(len, rounded)))
        assert encode_weights(encoder, source, output, tower=tower, scale=50).was_complete
    with pytest.raises(
        UserError, match=r"text 'a': the weight of '.*' is .*, but an index holds whole numbers"
    ):
        encode_weights(encoder, tmp_path / "query.jsonl", tmp_path / "large.jsonl", tower="query", scale=1e6)


def test_a_masked_language_model_becomes_a_sparse_encoder(tmp_path):
    folder = sparse_folder("max", tmp_path)
    found = SparseEncoder.load(f"hf:{GOLDEN / 'mlm_bert'}", query_max_length=24, passage_max_length=24)
    assert found.fingerprint == SparseEncoder.load(f"st:{folder}").fingerprint


@pytest.mark.parametrize("name", ["router", "sum"])
def test_files_that_are_downloaded_from_the_hub_suffice(name, tmp_path):
    source, place = sparse_folder(name, tmp_path), tmp_path / "downloaded"
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    wanted = hub_files.wanted(names, lambda file: json.loads((source / file).read_text()), name, modules=True)
    for files, use in ((wanted.small, hf_sparse_encoder.check), (wanted.weights, hf_sparse_encoder.read)):
        for file in files:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file, place / file)
        found = use(place)
    assert identity.fingerprint(found) == identity.fingerprint(hf_sparse_encoder.read(source))


def test_refused_folders_say_why(folder, tmp_path):
    def refused(message: str, directory: Path = folder) -> None:
        with pytest.raises(UserError, match=message):
            SparseEncoder.load(f"st:{directory}")

    with pytest.raises(UserError, match=r"holds a sparse encoder, .*; expected a dual encoder"):
        DualEncoder.load(f"st:{folder}")
    refused("holds a dual encoder, .*; expected a sparse encoder", GOLDEN / "st_modules" / "mixed")
    listed = json.loads((folder / "modules.json").read_text())
    kind = "sentence_transformers.sparse_encoder.modules.sparse_auto_encoder.SparseAutoEncoder"
    more = {"idx": 2, "name": "2", "path": "2_SparseAutoEncoder", "type": kind}
    (folder / "modules.json").write_text(json.dumps([*listed, more]))
    refused("the modules Transformer, SpladePooling are not supported; expected Transformer")
    (folder / "modules.json").write_text(json.dumps(listed))
    pooling = folder / "1_SpladePooling" / "config.json"
    change(pooling, activation_function="gelu")
    refused("activation_function 'gelu' is not supported, only relu and log1p_relu")
    change(pooling, activation_function="relu", pooling_strategy="mean")
    refused("pooling_strategy 'mean' is not supported, only max and sum")
    change(pooling, pooling_strategy="max")
    about = folder / "config_sentence_transformers.json"
    change(about, similarity_fn_name="maxsim")
    refused("similarity_fn_name 'maxsim' is not supported, only dot, cosine, euclidean, manhattan")
    change(about, similarity_fn_name=None, max_active_dims=0)
    refused("max_active_dims")
    change(about, max_active_dims=None)
    settings = folder / "sentence_bert_config.json"
    change(settings, transformer_task="text-generation")
    refused(r"the modules Transformer \(text-generation\), SpladePooling are not supported for a sparse")
    router = sparse_folder("router", tmp_path)
    static = router / "query_0_SparseStaticEmbedding"
    (static / "config.json").write_text('{"path": "idf.json"}')
    refused("no file 'idf.json', which path names", router)
    (static / "idf.json").write_text('{"the": 1.5, "no such token": 2}')
    refused("the token 'no such token' is not in the tokenizer", router)
    (static / "config.json").write_text("{}")
    change_tensors(static, lambda tensors: tensors.update(weight=tensors["weight"][:-1].copy()))
    refused(r"weights of shape \(99,\) do not fit a tokenizer with 100 ids", router)
    change(router / "router_config.json", structure={"query": [], "document": []})
    refused("no route for query texts among", router)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    folder = sparse_folder("router", tmp_path)
    static = folder / "query_0_SparseStaticEmbedding"
    change_tensors(static, lambda tensors: tensors["weight"].fill(np.nan))
    encoder = SparseEncoder.load(f"st:{folder}")
    with pytest.raises(UserError, match="gives a weight that is not finite: text 2, 'a dog'"):
        encoder.encode_queries(["", "a dog"])


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_pooling_in_chunks_equals_all_at_once_and_needs_less_memory(pooling):
    draw, (rows, length, width, vocabulary) = np.random.default_rng(0), (4, 64, 8, 4100)
    hidden, table = (
        draw.normal(size=shape).astype(np.float32) for shape in ((rows, length, width), (vocabulary, width))
    )
    mask = np.arange(length)[None] < np.array([64, 9, 1, 0])[:, None]
    bias = draw.normal(size=vocabulary).astype(np.float32)

    def pooled(chunk: int):
        def run(*arrays):
            return pooled_logits(*arrays, pooling=pooling, saturation="relu", chunk=chunk)

        return jax.jit(run).lower(*map(jnp.asarray, (hidden, mask, table, bias))).compile()

    whole, parts = pooled(vocabulary), pooled(256)
    arrays = tuple(map(jnp.asarray, (hidden, mask, table, bias)))
    np.testing.assert_allclose(parts(*arrays), whole(*arrays), rtol=1e-5, atol=1e-5)
    assert not np.asarray(parts(*arrays))[3].any()
    logits = 4 * rows * length * vocabulary  # bytes
    assert (
        parts.memory_analysis().temp_size_in_bytes < logits / 4 < whole.memory_analysis().temp_size_in_bytes
    )

"""`MultiVectorEncoder` gives the token vectors and MaxSim scores of sentence-transformers and PyLate."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxir import DualEncoder, MultiVectorEncoder
from jaxir.core.errors import UserError
from jaxir.interop import formats
from tests.interop.folders import GOLDEN, change

FOLDERS = GOLDEN / "multi_vector"
TEXTS = json.loads((FOLDERS / "texts.json").read_text())
FAMILIES = sorted(path.stem for path in (FOLDERS / "families").glob("*.npz"))
NAMES = sorted(path.parent.name for path in FOLDERS.glob("*/vectors.npz"))


def folder_of(name: str, place: Path, encoder: str = "bert") -> Path:
    """Copies a folder and puts its encoder back, if it has none."""
    folder = Path(shutil.copytree(FOLDERS / name, place / name))
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        of_encoder = encoder if "token" not in file else "bert"
        if not (folder / file).exists():
            shutil.copy(GOLDEN / of_encoder / file, folder / file)
    if encoder != "bert":
        given = json.loads((folder / "config.json").read_text())
        changed = {"pad_token_id": 0, "local_attention": 64, "sliding_window": 64}
        change(folder / "config.json", **{n: v for n, v in changed.items() if given.get(n) is not None})
    return folder


def golden_of(path: Path) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    with np.load(path) as file:
        sides = [
            np.split(file[f"{side}_vectors"], np.cumsum(file[f"{side}_lengths"])[:-1])
            for side in ("query", "passage")
        ]
        return *sides, file["similarity"]


def assert_near(found: list[np.ndarray], golden: list[np.ndarray]) -> None:
    assert [x.shape for x in found] == [x.shape for x in golden]
    assert all(x.dtype == np.float32 for x in found)
    for x, y in zip(found, golden, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_and_scores_equal_the_reference(name, tmp_path):
    encoder = MultiVectorEncoder.load(f"st:{folder_of(name, tmp_path)}")
    queries, passages, scores = golden_of(FOLDERS / name / "vectors.npz")
    found = encoder.encode_queries(TEXTS["queries"]), encoder.encode_passages(TEXTS["passages"])
    assert_near(found[0], queries)
    assert_near(found[1], passages)
    # PyLate has no score for passages without tokens.
    some = [len(passage) > 0 for passage in passages] if name.startswith("pylate") else slice(None)
    np.testing.assert_allclose(encoder.similarity(*found)[:, some], scores[:, some], rtol=1e-5, atol=1e-4)
    assert encoder.dimension == found[0][0].shape[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_unattended_tokens_have_the_vectors_of_the_reference(family, tmp_path):
    encoder = MultiVectorEncoder.load(f"st:{folder_of('families', tmp_path, family)}")
    queries, passages, _ = golden_of(FOLDERS / "families" / f"{family}.npz")
    assert_near(encoder.encode_queries(TEXTS["queries"]), queries)
    assert_near(encoder.encode_passages(TEXTS["passages"]), passages)


def test_vectors_do_not_depend_on_padding_and_batches(tmp_path):
    folder = folder_of("fixed", tmp_path)
    encoder, small = (MultiVectorEncoder.load(f"st:{folder}", batch_tokens=n) for n in (None, 16))
    for tower, texts in (("query", TEXTS["queries"]), ("passage", TEXTS["passages"])):
        together = encoder.encode(texts, tower=tower)
        assert_near(encoder.encode(texts, tower=tower, batch_size=1), together)
        assert_near(small.encode(texts * 9, tower=tower), together * 9)
        assert_near([encoder.encode(text, tower=tower) for text in texts], together)
    assert encoder.encode_queries([]) == []


def test_similarity_of_many_passages_equals_each_pair(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxir.retrieval.encoding.multi_vector_encoder._PASSAGE_TOKENS", 64)
    monkeypatch.setattr("jaxir.retrieval.encoding.multi_vector_encoder._QUERY_TOKENS", 16)
    encoder = MultiVectorEncoder.load(f"st:{folder_of('fixed', tmp_path)}")
    rng = np.random.default_rng(0)
    sides = [[rng.normal(size=(n, 8)) for n in lengths] for lengths in ([3, 0, 9, 30], range(1, 24))]
    found = encoder.similarity(*sides)
    expected = [[(q @ p.T).max(1).sum() if len(q) else 0 for p in sides[1]] for q in sides[0]]
    np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(encoder.similarity(sides[0][0], sides[1][4]), found[:1, 4:5], rtol=1e-5)
    assert encoder.similarity(sides[0], []).shape == (4, 0)
    assert (encoder.similarity(sides[0], [np.zeros((0, 8))]) == -1e9).all()


@pytest.mark.parametrize("name", ["fixed", "least", "several"])
def test_saved_model_is_the_same(name, tmp_path):
    encoder = MultiVectorEncoder.load(f"st:{folder_of(name, tmp_path)}")
    encoder.save(tmp_path / "saved")
    again = MultiVectorEncoder.load(str(tmp_path / "saved"))
    assert again.fingerprint == encoder.fingerprint
    assert (again.model.config, again.settings) == (encoder.model.config, encoder.settings)
    for tower, texts in (("query", TEXTS["queries"]), ("passage", TEXTS["passages"])):
        for x, y in zip(again.encode(texts, tower=tower), encoder.encode(texts, tower=tower), strict=True):
            np.testing.assert_array_equal(x, y)


def test_bfloat16_vectors_are_float32_near_the_others_and_not_saved(tmp_path):
    spec = f"st:{folder_of('fixed', tmp_path)}"
    encoder, exact = MultiVectorEncoder.load(spec, dtype="bfloat16"), MultiVectorEncoder.load(spec)
    assert encoder.fingerprint == exact.fingerprint
    for tower, texts in (("query", TEXTS["queries"]), ("passage", TEXTS["passages"])):
        for x, y in zip(encoder.encode(texts, tower=tower), exact.encode(texts, tower=tower), strict=True):
            assert x.dtype == np.float32 and x.shape == y.shape and (len(x) == 0 or (x != y).any())
            np.testing.assert_allclose(x, y, atol=0.1)
    with pytest.raises(UserError, match="load the model in float32 to save it"):
        encoder.save(tmp_path / "saved")


@pytest.mark.parametrize("name", NAMES)
def test_written_folder_is_the_same_model(name, tmp_path):
    folder, written = folder_of(name, tmp_path), tmp_path / "written"
    formats.convert(f"st:{folder}", written, to="st")
    one, other = (MultiVectorEncoder.load(f"st:{place}") for place in (folder, written))
    assert other.fingerprint == one.fingerprint
    assert (other.model.config, other.settings) == (one.model.config, one.settings)
    for file, entry in (
        ("sentence_bert_config", "query_expansion"),
        ("config_sentence_transformers", "prompts"),
    ):
        before, after = (json.loads((place / f"{file}.json").read_text()) for place in (folder, written))
        # Models without prompts are written in PyLate's form.
        assert (
            name in ("attended", "unmasked")
            or name.startswith("pylate")
            or after.get(entry) == before.get(entry)
        )


def test_a_folder_with_only_a_transformer_is_written_again(tmp_path):
    folder, written = folder_of("fixed", tmp_path), tmp_path / "written"
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:1]))
    formats.convert(f"st:{folder}", written, to="st")
    one, other = (MultiVectorEncoder.load(f"st:{place}") for place in (folder, written))
    assert_near(other.encode_passages(TEXTS["passages"]), one.encode_passages(TEXTS["passages"]))


def test_a_folder_that_names_xtr_is_compared_by_maxsim(tmp_path, capsys):
    """sentence-transformers, which has XTR only as an argument of losses, opens such a folder with MaxSim."""
    folder = folder_of("fixed", tmp_path)
    change(folder / "config_sentence_transformers.json", similarity_fn_name="xtr")
    encoder = MultiVectorEncoder.load(f"st:{folder}")
    assert encoder.similarity_fn_name == "maxsim" and "xtr is for training" in capsys.readouterr().err
    formats.convert(f"st:{folder}", tmp_path / "written", to="st")
    written = json.loads((tmp_path / "written/config_sentence_transformers.json").read_text())
    assert written["similarity_fn_name"] == "maxsim"


@pytest.mark.parametrize(
    ("name", "file", "entries", "message"),
    [
        ("pooled", "4_HierarchicalTokenPooling/config.json", {"pool_factor": 0.5}, "at least 1, not 0.5"),
        (
            "fixed",
            "1_Dense/config.json",
            {"module_input_name": "sentence_embedding"},
            "models with one vector",
        ),
        (
            "fixed",
            "config_sentence_transformers.json",
            {"similarity_fn_name": "cosine"},
            "'cosine' is not supported",
        ),
        (
            "fixed",
            "config_sentence_transformers.json",
            {"model_type": "SparseEncoder"},
            "expected a multi-vector",
        ),
        (
            "fixed",
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "all"}},
            "strategy fixed or min",
        ),
        (
            "fixed",
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "min", "length": 8, "token": "nothing"}},
            "needs a token of the tokenizer, not 'nothing'",
        ),
        (
            "fixed",
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "min", "length": 800}},
            "800 tokens exceed the model's 160 positions",
        ),
        ("fixed", "tokenizer_config.json", {"padding_side": "left"}, "padding on the left"),
        ("fixed", "2_MultiVectorMask/config.json", {"skiplist_words": "the"}, "must be lists of texts"),
    ],
)
def test_unsupported_folders_are_refused(name, file, entries, message, tmp_path):
    folder = folder_of(name, tmp_path)
    if file is not None:
        change(folder / file, **entries)
    with pytest.raises(UserError, match=message):
        MultiVectorEncoder.load(f"st:{folder}")


def test_encoders_that_mask_unattended_tokens_are_refused(tmp_path):
    folder = folder_of("families", tmp_path, "deberta")
    with pytest.raises(UserError, match="deberta-v2 cannot embed tokens that no other token attends to"):
        MultiVectorEncoder.load(f"st:{folder}")


def test_queries_longer_than_a_window_are_refused(tmp_path):
    folder = folder_of("families", tmp_path, "modernbert")
    change(folder / "config.json", local_attention=16)
    with pytest.raises(UserError, match="expanded to 12 tokens, but the last see only 8 before them"):
        MultiVectorEncoder.load(f"st:{folder}")


def test_other_kinds_of_models_are_refused(tmp_path):
    folder = folder_of("fixed", tmp_path)
    with pytest.raises(UserError, match="the folder holds a multi-vector encoder"):
        DualEncoder.load(f"st:{folder}")
    with pytest.raises(UserError, match="the folder holds a dual encoder"):
        MultiVectorEncoder.load(f"st:{GOLDEN / 'bert'}")
    with pytest.raises(UserError, match="has no head for token vectors"):
        MultiVectorEncoder.load(f"hf:{GOLDEN / 'bert'}")
    with pytest.raises(UserError, match="format hf cannot hold it: use st"):
        formats.convert(f"st:{folder}", tmp_path / "out", to="hf")
    formats.convert(f"st:{folder}", tmp_path / "model", to="jaxir")
    with pytest.raises(UserError, match="expected a dual encoder"):
        DualEncoder.load(str(tmp_path / "model"))

"""Whitened models, compared with Su et al. 2021."""

from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.interop import model_dir
from jaxir.retrieval.encoding.text_encoder import DualEncoder

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

LETTERS = list("abcdefghilmnoprstuwxy")  # letters in the tokenizer's vocabulary, also within words


@pytest.fixture(scope="module")
def model(one_layer) -> str:
    return f"hf:{one_layer}"  # a model whose vectors have 32 dimensions


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [" ".join("".join(rng.choice(LETTERS, 4)) for _ in range(3)) for _ in range(200)]


@pytest.fixture(scope="module")
def file(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def whiten(capsys, *flags) -> tuple[int, str]:
    status = cli.main("jaxir.whiten:whiten", list(map(str, flags)))
    said = capsys.readouterr()
    return status, said.out + said.err


def raw_vectors(model: str, texts: list[str]) -> np.ndarray:
    """A model's vectors before they are scaled to length 1, in float64."""
    loaded = model_dir.load(model, similarity="dot")
    encoder = DualEncoder(loaded.model, loaded.tokenizer, loaded.settings, loaded.fingerprint)
    return encoder.encode_passages(texts, show_progress=False).astype(np.float64)


def by_the_paper(vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of Su et al.: the mean and W, by the singular value decomposition of the covariance."""
    mean = vectors.mean(0)
    u, s, _ = np.linalg.svd((vectors - mean).T @ (vectors - mean) / len(vectors))
    return mean, (u @ np.diag(1 / np.sqrt(s)))[:, :k]


@pytest.fixture(scope="module")
def before(model, texts):
    return raw_vectors(model, texts)


@pytest.mark.parametrize("k", [31, 8])  # LayerNorm's outputs span 31 of 32 dimensions
def test_whitened_vectors_are_white_and_have_the_papers_similarities(
    k, model, texts, before, file, tmp_path, capsys
):
    flags = [f"--model={model}", f"--input={file}", f"--output={tmp_path / 'out'}"]
    flags += [] if k == 31 else [f"--dimensions={k}"]
    status, output = whiten(capsys, *flags)
    assert status == 0, output
    after = raw_vectors(str(tmp_path / "out"), texts)
    assert np.abs(np.cov(before.T, bias=True) - np.eye(32)).max() > 0.1
    np.testing.assert_allclose(after.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(np.cov(after.T, bias=True), np.eye(k), atol=1e-3)
    mean, matrix = by_the_paper(before, k)
    expected = (before - mean) @ matrix  # products do not depend on the signs of U's columns
    np.testing.assert_allclose(after @ after.T, expected @ expected.T, atol=1e-2)
    encoder = DualEncoder.load(str(tmp_path / "out"))
    assert (encoder.dimension, encoder.similarity_fn_name) == (k, "cosine")
    others = ["not among them", texts[0]]
    white = (raw_vectors(model, others) - mean) @ matrix
    white /= np.linalg.norm(white, axis=1, keepdims=True)
    found = encoder.encode_queries(others, show_progress=False)
    np.testing.assert_allclose(found @ found.T, white @ white.T, atol=1e-4)


def test_model_trained_in_bfloat16_is_whitened_in_float32(model, texts, file, tmp_path, capsys):
    loaded = model_dir.load(model, dtype="bfloat16")
    model_dir.save(tmp_path / "model", loaded.model, loaded.tokenizer, loaded.settings)
    flags = [f"--model={tmp_path / 'model'}", f"--input={file}", f"--output={tmp_path / 'out'}"]
    status, output = whiten(capsys, *flags)
    assert status == 0, output
    whole = model_dir.load(str(tmp_path / "out"), similarity="dot", dtype="float32")
    encoder = DualEncoder(whole.model, whole.tokenizer, whole.settings, whole.fingerprint)
    after = encoder.encode_passages(texts, show_progress=False).astype(np.float64)
    np.testing.assert_allclose(after.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(np.cov(after.T, bias=True), np.eye(31), atol=1e-3)


def test_projection_is_merged_into_the_map_and_exported(texts, file, tmp_path, capsys):
    flags = f"--model=st:{GOLDEN / 't5_1_1'}", f"--input={file}"  # a model of 32 dimensions, projected to 16
    assert whiten(capsys, *flags, "--dimensions=4", f"--output={tmp_path / 'once'}")[0] == 0
    assert whiten(capsys, *flags, f"--output={tmp_path / 'all'}")[0] == 0
    once = f"--model={tmp_path / 'once'}"
    status, output = whiten(capsys, once, f"--input={file}", f"--output={tmp_path / 'twice'}")
    assert status == 0 and "100.0% of the variance of 200 texts" in output, output
    before, again = (raw_vectors(str(tmp_path / name), texts) for name in ("once", "twice"))
    np.testing.assert_allclose(before @ before.T, again @ again.T, atol=1e-2)
    assert raw_vectors(str(tmp_path / "all"), texts).shape == (200, 16)
    export = [f"--model={tmp_path / 'once'}", "--format=st", f"--output={tmp_path / 'folder'}"]
    assert cli.main("jaxir.export:export", export) == 0
    np.testing.assert_allclose(raw_vectors(f"st:{tmp_path / 'folder'}", texts), before, atol=1e-5)


def test_whitening_refuses_unsuitable_models_texts_and_dimensions(model, texts, file, tmp_path, capsys):
    few = tmp_path / "few.txt"
    few.write_text("".join(f"{text}\n" for text in texts[:9]))
    model_dir.save(tmp_path / "two", *model_dir.load(model, sharing="ade")[:3])
    for given, path, flags, message in (
        (model, few, [], "9 texts are too few to whiten 32 dimensions: give more texts"),
        (model, few, ["--dimensions=9"], "only span 8 of 32 dimensions, fewer than --dimensions=9"),
        (model, file, ["--dimensions=33"], "only span 31 of 32 dimensions, fewer than --dimensions=33"),
        (f"st:{GOLDEN / 'bert'}", file, [], "needs a linear projection, but this model's has a tanh"),
        (tmp_path / "two", file, [], "whitening needs a model with one tower, but this one has two"),
        (model, tmp_path / "absent.txt", [], "absent.txt"),
    ):
        flags = [f"--model={given}", f"--input={path}", f"--output={tmp_path / 'out'}", *flags]
        status, error = whiten(capsys, *flags)
        assert (status, error.count("\n")) == (1, 1) and message in error, error
        assert not (tmp_path / "out").exists()

"""Files of word vectors as gensim writes them, and averages of vectors as gensim computes them."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from gensim.models import KeyedVectors, Word2Vec

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.interop import formats, model_dir
from jaxir.retrieval.encoding.text_encoder import DualEncoder

SENTENCES = [
    "The mat: it's a cat's, and the dog sat on it.",
    "A dog and a cat, in Zürich; ÉCOLE 42 is closed!",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left (on the table) last night...",
    "the cat sat on the mat",
]
UNSEEN = ["The cat, unheard-of, sat", "Entirely different", ""]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]+", text.lower())


@pytest.fixture(scope="module")
def vectors() -> KeyedVectors:
    words = [words_of(text) for text in SENTENCES]
    return Word2Vec(words, vector_size=12, sg=1, min_count=1, seed=1, workers=1, epochs=3).wv


@pytest.fixture(scope="module")
def files(vectors, tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("vectors")
    found = {name: directory / name for name in ("text", "binary", "gzipped", "original", "glove")}
    vectors.save_word2vec_format(str(found["text"]))
    vectors.save_word2vec_format(str(found["binary"]), binary=True)
    found["gzipped"].write_bytes(gzip.compress(found["binary"].read_bytes()))
    header, *rows = found["text"].read_text().splitlines()
    found["glove"].write_text("\n".join(rows) + "\n")  # GloVe's format has no header line
    rows = (f"{w} ".encode() + vectors[w].tobytes() + b"\n" for w in vectors.index_to_key)
    found["original"].write_bytes(f"{header}\n".encode() + b"".join(rows))  # as word2vec.c writes it
    return found


def encode(spec: str, texts: list[str]) -> np.ndarray:
    loaded = model_dir.load(spec, similarity="dot")
    encoder = DualEncoder(loaded.model, loaded.tokenizer, loaded.settings, loaded.fingerprint)
    return encoder.encode_passages(texts, show_progress=False)


@pytest.mark.parametrize("name", ["text", "binary", "gzipped", "original", "glove"])
def test_vectors_of_texts_are_averages_of_gensim(name, vectors, files):
    texts = SENTENCES + UNSEEN
    known = [[word for word in words_of(text) if word in vectors] for text in texts]
    expected = [vectors.get_mean_vector(k, pre_normalize=False) if k else np.zeros(12) for k in known]
    found = encode(f"w2v:{files[name]}", texts)
    assert np.abs(found[0] - found[1]).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_array_equal(found[-2:], 0)  # texts without a known word get zeros


def test_cased_word_vectors_are_not_lower_cased(tmp_path):
    file = tmp_path / "cased.txt"
    file.write_text("Rhine 1 0\nrhine 0 2\n[PAD] 5 5\nrhine 9 9\n. . 0 4 \nMain 3 7\n")
    found = encode(f"w2v:{file}", ["Rhine", "rhine", "RHINE", "Rhine rhine [PAD]", "Main"])
    np.testing.assert_array_equal(found, [[1, 0], [0, 2], [0, 0], [0.5, 1], [3, 7]])


def test_word_vectors_become_a_jaxir_model_and_no_other(files, tmp_path):
    spec = f"w2v:{files['binary']}"
    formats.convert(spec, tmp_path / "model", "jaxir")
    np.testing.assert_array_equal(encode(str(tmp_path / "model"), SENTENCES), encode(spec, SENTENCES))
    for to, message in (("st", "unknown words"), ("hf", r"word vectors, 37 words x 12")):
        with pytest.raises(UserError, match=message):
            formats.convert(spec, tmp_path / "folder", to)
        assert not (tmp_path / "folder").exists()


@pytest.mark.slow
def test_word_vectors_are_exported_to_onnx(files, tmp_path):
    flags = [f"--model=w2v:{files['text']}", "--format=onnx", f"--output={tmp_path / 'onnx'}"]
    assert cli.main("jaxir.export:export", flags) == 0
    assert (tmp_path / "onnx" / "query.onnx").is_file()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"cat 1 2 3\ndog 1 2\n", ":2: expected a word and 3 numbers"),
        (b"cat 1 2\ndog 1 nan\n", ":2: the vector has a number that is not finite"),
        (b"3 2\ncat 1 2\ndog 1 2\n", "its first line says 3 words, but it has 2"),
        (b"2 2\ncat " + np.float32([1, 2]).tobytes() + b"dog " + b"\0" * 7, "says 2 words, but it has 1"),
        (b"1 2\ncat 1 2\ndog 3 4\n", "its first line says 1 words, but it has 2"),
        (b"0 2\n", "no word vector in it"),
        (b"1 0\ncat \n", ":1: its vectors have 0 dimensions"),
        (b"cat 1 2\ndog 1_0 2\n", ":2: expected a word and 2 numbers"),
        (b"", "the file is empty"),
    ],
)
def test_damaged_word_vectors_are_refused(content, said, tmp_path):
    (tmp_path / "vectors").write_bytes(content)
    with pytest.raises(UserError) as caught:
        model_dir.read(f"w2v:{tmp_path / 'vectors'}")
    assert said in str(caught.value) and str(caught.value).startswith(str(tmp_path)), str(caught.value)

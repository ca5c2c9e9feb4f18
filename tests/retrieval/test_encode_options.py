"""Arguments of `DualEncoder.encode*` that sentence-transformers has, too."""

from pathlib import Path

import numpy as np
import pytest

import jaxir
from jaxir.core.errors import UserError
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.text_encoder import DualEncoder
from tests.interop.folders import change, module_folder

TEXTS = ["the cat", "a cat sat on the mat", "dogs", "the treaty"]


def folder_with_prompts(place: Path, *, pools: bool, **about) -> str:
    """Returns the spec of a folder with prompts, whose tokens pooling includes if `pools`."""
    folder = module_folder("without_prompt", place)
    change(folder / "config_sentence_transformers.json", default_prompt_name=None)
    change(folder / "config_sentence_transformers.json", **about)
    change(folder / "1_Pooling" / "config.json", include_prompt=pools)
    return f"st:{folder}"


def test_one_string_gives_one_vector(encoder):
    one = encoder.encode_queries("w1 w2")
    assert one.shape == (encoder.dimension,)
    np.testing.assert_array_equal(one, encoder.encode_queries(["w1 w2"])[0])
    assert encoder.encode_passages(np.array(["w1", "w2"])).shape == (2, encoder.dimension)


def test_batch_size_limits_texts_per_batch_and_changes_no_vector(small_model, toy):
    encoder = DualEncoder.load(small_model)
    texts = toy.random_texts(20)
    report = EncodingReport()
    found = encoder.encode(texts, tower="passage", batch_size=2, report=report)
    devices = encoder.runner.partitioner.mesh.size
    assert max(rows for rows, _ in report.shapes) == 2 * devices
    np.testing.assert_allclose(found, encoder.encode_passages(texts), atol=1e-5)
    with pytest.raises(ValueError, match="at least 1"):
        encoder.encode_passages(texts, batch_size=0)


def test_prompt_goes_before_texts_in_place_of_the_towers_own(tmp_path):
    plain = DualEncoder.load(folder_with_prompts(tmp_path / "plain", pools=True, prompts={}))
    named = {"prompts": {"query": "find: ", "topic": "cat: "}, "default_prompt_name": "topic"}
    encoder = DualEncoder.load(folder_with_prompts(tmp_path / "named", pools=True, **named))
    after = {prompt: plain.encode([prompt + text for text in TEXTS]) for prompt in ("find: ", "cat: ", "a ")}
    close = {"atol": 1e-6}
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), after["find: "], **close)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS, prompt_name="topic"), after["cat: "], **close)
    np.testing.assert_allclose(encoder.encode(TEXTS), after["cat: "], **close)
    np.testing.assert_allclose(encoder.encode(TEXTS, prompt_name="query"), after["find: "], **close)
    found = encoder.encode_passages(TEXTS, prompt="a ", prompt_name="topic")
    np.testing.assert_allclose(found, after["a "], **close)
    assert np.abs(after["a "] - after["cat: "]).max() > 1e-3
    with pytest.raises(UserError, match=r"no prompt named 'web'; it has 'query', 'document', 'topic'"):
        encoder.encode(TEXTS, prompt_name="web")


def test_prompt_of_a_call_is_left_out_of_pooling_if_the_folder_says_so(tmp_path):
    stored = DualEncoder.load(
        folder_with_prompts(tmp_path / "stored", pools=False, prompts={"query": "cat: "})
    )
    given = DualEncoder.load(folder_with_prompts(tmp_path / "given", pools=False, prompts={}))
    expected = stored.encode_queries(TEXTS)
    np.testing.assert_allclose(given.encode_queries(TEXTS, prompt="cat: "), expected, atol=1e-6)
    with_prompt = given.encode_queries(["cat: " + text for text in TEXTS])
    assert np.abs(with_prompt - expected).max() > 1e-3, "pooling with the prompt gives other vectors"


def test_vectors_are_truncated_then_normalised_then_quantised(encoder):
    whole = encoder.encode_passages(TEXTS)
    short = encoder.encode_passages(TEXTS, truncate_dim=8)
    np.testing.assert_array_equal(short, whole[:, :8])
    unit = encoder.encode_passages(TEXTS, truncate_dim=8, normalize=True)
    np.testing.assert_allclose(unit, short / np.linalg.norm(short, axis=1, keepdims=True), rtol=1e-6)
    bits = encoder.encode_passages(TEXTS, truncate_dim=8, precision="ubinary")
    np.testing.assert_array_equal(bits, np.packbits(short > 0, axis=1))
    with pytest.raises(UserError, match=r"truncate_dim is 33, but the model has 32 dimensions"):
        encoder.encode_passages(TEXTS, truncate_dim=33)


def test_int8_divides_the_range_of_each_component_into_256_steps():
    vectors = np.array([[0.0, -51.0, 5.0], [255.0, 204.0, 5.0], [127.5, 0.0, 5.0]], np.float32)
    levels = [[0, 0, 0], [255, 255, 0], [127, 51, 0]]
    found = jaxir.quantize_embeddings(vectors, "uint8")
    assert found.dtype == np.uint8 and found.tolist() == levels
    signed = jaxir.quantize_embeddings(vectors, "int8")
    assert signed.dtype == np.int8 and (signed.astype(int) + 128).tolist() == levels
    ranges = np.array([[0.0, -255.0, 4.0], [510.0, 255.0, 4.0]])
    alone = jaxir.quantize_embeddings(vectors[2], "uint8", ranges=ranges)
    assert alone.tolist() == [63, 127, 1]
    same = jaxir.quantize_embeddings(vectors[2:], "uint8", calibration_embeddings=vectors)
    assert same.tolist() == levels[2:]


def test_binary_keeps_the_signs():
    vectors = np.array([[1.0, -1.0, 0.0, 2.0, -1.0, -1.0, -1.0, 3.0]])
    assert jaxir.quantize_embeddings(vectors, "ubinary").tolist() == [[0b10010001]]
    found = jaxir.quantize_embeddings(vectors, "binary")
    assert found.dtype == np.int8 and found.tolist() == [[0b10010001 - 128]]


def test_int8_of_one_text_needs_ranges(encoder):
    with pytest.raises(ValueError, match=r"one vector does not give.*ranges="):
        encoder.encode_passages("w1", precision="int8")
    with pytest.raises(ValueError, match="precision is 'int4'; expected one of float32, int8"):
        encoder.encode_passages(["w1"], precision="int4")


@pytest.mark.parametrize("name", ["cosine", "dot"])
def test_similarity_is_the_models(encoder, name, monkeypatch):
    monkeypatch.setattr(encoder, "similarity_fn_name", name)
    a, b = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[6.0, 8.0], [4.0, -3.0]])
    expected = {"cosine": [[1, 0], [0, 0]], "dot": [[50, 0], [0, 0]]}[name]
    np.testing.assert_allclose(encoder.similarity(a, b), expected, atol=1e-6)
    np.testing.assert_allclose(encoder.similarity_pairwise(a, b), np.diag(expected), atol=1e-6)
    assert encoder.similarity(a[0], b).shape == (1, 2)

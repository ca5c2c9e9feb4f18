"""DualEncoder: each text's vector, in order, with no shape compiled twice."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jaxir
from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import pad_batch
from jaxir.interop import model_dir
from jaxir.retrieval.encoding import text_encoder
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.text_encoder import EMBED, DualEncoder
from jaxir.runtime import cpu
from jaxir.runtime.cpu import has_quick_bfloat16

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "bert"


@pytest.fixture(scope="module")
def texts(toy) -> list[str]:
    return [*toy.random_texts(90), "", "w1", "w1 " * 100_000]


@pytest.mark.parametrize("tower", ["passage", pytest.param("query", marks=pytest.mark.slow)])
def test_equals_encoding_one_by_one(encoder, small_model, toy, texts, tower, monkeypatch):
    report = EncodingReport()
    vectors = encoder.encode(texts, tower=tower, report=report)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(texts), encoder.dimension) == (93, 32)
    assert report.texts == 93
    assert len(report.shapes) > 1
    loaded = model_dir.load(small_model)
    length = {"query": 16, "passage": toy.max_length}[tower]
    graph, state = nnx.split(loaded.model)
    alone = jax.jit(lambda ids: nnx.merge(graph, state).encode(ids, tower=tower))
    for row, tokens in zip(vectors, loaded.tokenizer.encode_batch(texts, max_length=length), strict=True):
        np.testing.assert_allclose(row, alone(pad_batch([tokens], length))[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    monkeypatch.setattr(text_encoder, "WINDOW", 10)
    np.testing.assert_allclose(encoder.encode(texts, tower=tower), vectors, atol=1e-5)
    assert encoder.encode([], tower=tower).shape == (0, 32)
    # Guard: the vectors of two texts differ, and those of the two towers.
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    other = encoder.encode(texts[:1], tower="passage" if tower == "query" else "query")
    assert np.abs(vectors[0] - other[0]).max() > 0.01


def test_each_shape_is_compiled_once(small_model, toy, texts):
    encoder = DualEncoder.load(small_model, batch_tokens=96)
    report = EncodingReport()
    compiled = count_compilations(lambda: encoder.encode(texts, tower="passage", report=report))
    assert 1 < compiled <= len(report.shapes) <= toy.max_length // 8 + 1
    assert count_compilations(lambda: encoder.encode_passages(texts)) == 0
    # A second model of the same architecture uses the programs of the first.
    again = DualEncoder.load(small_model, batch_tokens=96)
    assert count_compilations(lambda: again.encode_passages(texts)) == 0


@pytest.mark.skipif(not has_quick_bfloat16(), reason="a CPU that multiplies bfloat16 numbers is needed")
def test_bfloat16_products_are_accumulated_in_float32(small_model):
    encoder = DualEncoder.load(small_model, dtype="bfloat16")
    program = encoder.runner.program(EMBED["passage"])
    ids = jax.ShapeDtypeStruct((8, 16), np.int32)
    text = program.jitted.lower(encoder.runner.parameters, (ids,)).as_text()
    products = re.findall(r"dot_general.*: \(tensor<\S*x(\w+)>, tensor<\S*x\w+>\) -> tensor<\S*x(\w+)>", text)
    assert products.count(("bf16", "f32")) >= 6 and ("bf16", "bf16") not in products, products


@pytest.mark.parametrize(("quick", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_on_cpus_that_multiply_it_natively(small_model, monkeypatch, quick, chosen):
    monkeypatch.setattr(cpu, "has_quick_bfloat16", lambda: quick)
    encoder = DualEncoder.load(small_model, dtype="auto")
    assert encoder.model.config.backbone.dtype == chosen


def count_compilations(function) -> int:
    count = 0

    def listen(event: str, duration: float, **kwargs) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count


def test_batches_are_split_over_all_devices(encoder, texts):
    assert jax.device_count() == 4
    assert encoder.runner.partitioner.mesh.size == 4
    report = EncodingReport()
    encoder.encode(texts, tower="passage", report=report)
    assert all(rows % 4 == 0 for rows, _ in report.shapes)
    program = encoder.runner.program(EMBED["passage"])
    shape = max(report.shapes)
    sharding = program.executables[shape].result().input_shardings[0][1][0]
    assert sharding.shard_shape(shape) == (shape[0] // 4, shape[1])


def test_stream_is_read_one_list_ahead(encoder):
    drawn = []

    def windows():
        for i in range(5):
            drawn.append(i)
            yield encoder.tokens([f"w{i}"], "query")

    parts = encoder.encode_tokens(windows(), tower="query")
    next(parts)
    assert len(drawn) < 5
    rest = list(parts)
    assert len(rest) == 4
    assert drawn == list(range(5))


@pytest.mark.parametrize("wrong", [["a", None], [b"bytes"]])
def test_encode_refuses_other_than_lists_of_texts(encoder, wrong):
    with pytest.raises(TypeError, match="list of strings"):
        encoder.encode_queries(wrong)


def test_vectors_that_are_not_finite_are_refused(small_model):
    encoder = DualEncoder.load(small_model)
    encoder.runner.parameters = [p * np.float32(np.nan) for p in encoder.runner.parameters]
    with pytest.raises(UserError, match=r"a vector that has a number that is not finite: text 1, 'w1'$"):
        encoder.encode_queries(["w1"])


@pytest.mark.parametrize("form", ["", "st:", "hf:"])
def test_directory_with_a_colon_is_loaded_from_any_working_directory(tmp_path, monkeypatch, toy, form):
    place = tmp_path / "runs" / "12:30" / "model"
    if form:
        shutil.copytree(GOLDEN, place)
    else:
        place.parent.mkdir(parents=True)
        toy.save_model(place, seed=0)
    monkeypatch.chdir(tmp_path)
    encoder = DualEncoder.load(f"{form}runs/12:30/model")
    monkeypatch.chdir("/")
    assert encoder.spec == f"{form}{place}"
    assert DualEncoder.load(encoder.spec).fingerprint == encoder.fingerprint


@pytest.mark.parametrize("spec", ["hf:google/bert", "st:a@main", "t5x:gs://bucket/run", "gs://bucket/run"])
def test_hub_and_bucket_names_are_not_made_absolute(spec):
    assert model_dir.absolute(spec) == spec


def test_the_public_names():
    for name in jaxir.__all__:
        assert getattr(jaxir, name) is not None
        assert name in dir(jaxir)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = jaxir.nonsense

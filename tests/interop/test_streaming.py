"""Models are written array by array, so that they may exceed a host's memory."""

import asyncio
import dataclasses
import resource
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tensorstore

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir, t5x
from jaxir.interop.huggingface import sentence_transformers
from jaxir.interop.model import identity, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.lazy import LazyArray
from jaxir.interop.weights.quiet import quiet_orbax
from jaxir.interop.weights.weights import write_tensors
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.t5 import T5Config

T5 = T5Config(vocab_size=100, embed_dim=32, num_layers=5, num_heads=2, head_dim=16, mlp_dim=48)
TOKENIZER = Path(__file__).parent.parent / "golden" / "bert"


@pytest.fixture
def at_rest():
    """An unread model, and the most bytes of its arrays that were in memory at one time."""
    most, alive = [0], []

    def lazy(value: np.ndarray) -> LazyArray:
        def read(index):
            part = value[index].copy()
            alive[:] = [x for x in alive if x() is not None] + [weakref.ref(part)]
            most[0] = max(most[0], sum(x().nbytes for x in alive))
            return part

        return LazyArray(value.shape, read)

    rng = np.random.default_rng(0)
    config = DualEncoderConfig(backbone=T5)
    shapes = stored.model_shapes(config)
    params = {name: lazy(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    settings = EncoderSettings(query_max_length=8, passage_max_length=8)
    tokenizer = Tokenizer.load(TOKENIZER)
    return StoredModel(config=config, params=params, tokenizer=tokenizer, settings=settings), most


def write_st(directory, model):
    directory.mkdir()
    sentence_transformers.write(directory, model)


@pytest.mark.parametrize(
    ("write", "spec"),
    [(model_dir.write, "{}"), (write_st, "st:{}"), (t5x.write, "t5x:{}")],
    ids=["jaxir", "sentence_transformers", "t5x"],
)
def test_few_arrays_are_in_memory_at_a_time(tmp_path, at_rest, write, spec, capfd):
    model, most = at_rest
    write(tmp_path / "out", model)
    sizes = [4 * value.size for value in model.params.values()]
    assert max(sizes) <= most[0] <= 2 * max(sizes) < sum(sizes) / 4
    output = capfd.readouterr()
    assert output.err == output.out == ""
    written, fingerprint = model_dir.read(spec.format(tmp_path / "out"))
    for name, value in model.params.items():
        np.testing.assert_array_equal(written.params[name], np.asarray(value), err_msg=name)
    if fingerprint is not None:
        assert fingerprint == identity.fingerprint(model)


def test_a_file_of_tensors_is_the_one_that_the_library_writes(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"b.weight": (3, 5), "a": (7,), "b.bias": (), "none": (0, 4)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    write_tensors(tmp_path / "ours", tensors | {"b.weight": tensors["b.weight"].copy("F")})
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("write", [model_dir.write, t5x.write])
def test_full_disk_is_reported_in_the_systems_words(tmp_path, at_rest, write):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"(written|kernel|scale|embedding): file too large$"):
            write(tmp_path / "out", at_rest[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_where_an_array_cannot_be_read(tmp_path, at_rest):
    model, _ = at_rest
    broken = dict(model.params)

    def fail(index):
        raise OSError("gone")

    broken["encoder.norm.scale"] = LazyArray(broken["encoder.norm.scale"].shape, fail)
    with pytest.raises(UserError, match="the parameters could not be written: gone"):
        model_dir.write(tmp_path / "out", dataclasses.replace(model, params=broken))
    assert list(tmp_path.iterdir()) == []


def answer_after_the_loop_is_closed():
    """Imitates Orbax when one array of a checkpoint is broken while another is still being read."""
    promise, future = tensorstore.Promise.new()

    async def read():
        await future

    loop = asyncio.new_event_loop()
    reading = loop.create_task(read())
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    promise.set_result(1)
    return reading


def test_only_late_reads_of_orbax_are_ignored(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda details: reported.append(details.exc_value))
    answer_after_the_loop_is_closed()
    with quiet_orbax():
        pass
    answer_after_the_loop_is_closed()
    type("Failing", (), {"__del__": lambda self: 1 / 0})()
    assert [str(e) for e in reported] == ["Event loop is closed", "division by zero"], "the first is a guard"

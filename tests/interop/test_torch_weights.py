"""Weights that torch and Flax wrote (golden/make_weights.py) are those of the safetensors beside them."""

import json
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx, serialization

from jaxir.core.errors import UserError
from jaxir.interop.huggingface import hf
from jaxir.interop.weights.weights import read_tensors
from tests.interop.folders import GOLDEN, built, change, exchange
from tests.interop.test_hostile_weights import state, tensor

WEIGHTS = GOLDEN / "weights"
BIN, MSGPACK, SAFE = "pytorch_model.bin", "flax_model.msgpack", "model.safetensors"
MODELS = ["bert", "distilbert", "roberta", "t5"]
# Names of tied tensors in torch's files.
ALIASES = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}


def expected_of(model: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(WEIGHTS / model / SAFE)


@pytest.mark.parametrize(
    ("model", "form"),
    [(model, form) for model in MODELS for form in ("torch", "flax")]
    + [("t5", form) for form in ("torch_sharded", "flax_sharded", "protocol_4", "parameters")],
)
def test_tensors_are_those_of_safetensors(model, form):
    found, expected = read_tensors(WEIGHTS / model / form), expected_of(model)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(expected) - set(found) <= (tied if form == "flax" else set())
    assert set(found) - set(expected) <= ALIASES | tied
    for name in set(found) & set(expected):
        assert found[name].shape == expected[name].shape
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_read_to_the_bit(dtype):
    found, expected = read_tensors(WEIGHTS / "t5" / dtype), expected_of("t5")
    for name, value in expected.items():
        rounded = value.astype(jnp.dtype(dtype)).astype(np.float32)
        np.testing.assert_array_equal(found[name], rounded, err_msg=name)


@pytest.mark.parametrize(("model", "form"), [("t5", "torch"), ("bert", "flax")])
def test_an_encoder_computes_what_torch_does(tmp_path, model, form):
    shutil.copytree(WEIGHTS / model / form, tmp_path, dirs_exist_ok=True)
    shutil.copy(WEIGHTS / model / "config.json", tmp_path)
    encoder = hf.read_encoder(tmp_path)
    golden = np.load(WEIGHTS / model / "golden.npz")
    ours = exchange(golden["ids"], encoder.pad_id)
    output = np.asarray(nnx.jit(lambda m, x: m(x))(built(encoder), jnp.asarray(ours)))
    where = (ours != 0)[..., None]
    assert np.abs(np.where(where, output - golden["output"], 0.0)).max() < 5e-6


@pytest.mark.parametrize("kept", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_t5_table_has_several_names_but_is_never_lm_head(tmp_path, kept):
    shutil.copy(WEIGHTS / "t5" / "config.json", tmp_path)
    tensors = expected_of("t5")
    table = tensors.pop("shared.weight")
    assert "lm_head.weight" in tensors and not ALIASES & set(tensors)
    safetensors.numpy.save_file(tensors, tmp_path / SAFE)
    with pytest.raises(UserError, match=r"it lacks shared\.weight"):
        hf.read_encoder(tmp_path)
    safetensors.numpy.save_file(tensors | {kept: table}, tmp_path / SAFE)
    np.testing.assert_array_equal(hf.read_encoder(tmp_path).params["token.embedding"], table)


def test_safetensors_come_before_torch_and_torch_before_flax(tmp_path):
    (tmp_path / SAFE).write_bytes((WEIGHTS / "t5" / SAFE).read_bytes())
    shutil.copytree(WEIGHTS / "t5" / "torch_sharded", tmp_path, dirs_exist_ok=True)
    shutil.copy(WEIGHTS / "bert" / "flax" / MSGPACK, tmp_path)
    assert set(read_tensors(tmp_path)) == set(expected_of("t5"))
    (tmp_path / SAFE).unlink()
    assert set(read_tensors(tmp_path)) > set(expected_of("t5"))
    (tmp_path / f"{BIN}.index.json").unlink()
    assert "bert.embeddings.LayerNorm.weight" in read_tensors(tmp_path)


WHOLE = {"position_ids": "int64", "mask": "bool", "bytes": "uint8"}


def test_views_of_one_storage_are_read_by_any_slice():
    """Tensors of whole numbers are refused: they are ids, or weights without their scale."""
    expected, found = np.load(WEIGHTS / "odd" / "tensors.npz"), read_tensors(WEIGHTS / "odd")
    assert set(found) == set(expected.files)
    rng = np.random.default_rng(0)
    for name in expected.files:
        lazy, whole = found[name], expected[name]
        assert lazy.shape == whole.shape
        if name in WHOLE:
            with pytest.raises(UserError, match=rf"{BIN}: an array .* holds numbers of type {WHOLE[name]};"):
                np.asarray(lazy)
            continue
        np.testing.assert_array_equal(lazy, whole, err_msg=name)
        np.testing.assert_array_equal(lazy.T, whole.T, err_msg=name)
        for _ in range(4):
            bounds = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in whole.shape]
            index = tuple(slice(start, stop) for start, stop in bounds)
            part = lazy[index]
            np.testing.assert_array_equal(part, whole[index], err_msg=f"{name} {bounds}")
            assert part.dtype == np.float32 and part.flags.writeable


def test_six_gigabyte_file_is_read_by_slices(tmp_path):
    numbers, size = 3 << 29, 6 << 30
    pickled = state(w=tensor(count=numbers, shape=(numbers // 1024, 1024), strides=(1024, 1)))
    # This is the archive that torch would write, but a hole in the file stands for the numbers.
    with zipfile.ZipFile(tmp_path / BIN, "w") as archive:
        archive.writestr("pytorch_model/data.pkl", pickled)
        with archive.open("pytorch_model/data/0", "w", force_zip64=True) as member:
            raw = archive.fp
            start = raw.tell()
            raw.seek(start + size - 8)
            raw.write(struct.pack("<2f", 1.5, -2.0))
            member._file_size = member._compress_size = size
        archive.writestr("pytorch_model/version", "3\n")
        # Torch, configured without checksums, writes this member.
        archive.writestr("pytorch_model/byteorder", "little")
        archive.getinfo("pytorch_model/byteorder").CRC ^= 1
    assert (tmp_path / BIN).stat().st_size > size > (tmp_path / BIN).stat().st_blocks * 512
    with zipfile.ZipFile(tmp_path / BIN) as archive:
        assert archive.getinfo("pytorch_model/data/0").file_size == size
    tracemalloc.start()
    found = read_tensors(tmp_path)["w"]
    assert found.shape == (numbers // 1024, 1024)
    np.testing.assert_array_equal(found[-1:, -3:], [[0.0, 1.5, -2.0]])
    np.testing.assert_array_equal(found.T[-1:, -2:], [[0.0, -2.0]])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_array_in_chunks_is_read_by_slices(tmp_path, monkeypatch):
    # Flax splits larger arrays into chunks; its default is a gigabyte.
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    arrays = {"table": np.random.default_rng(0).normal(size=(17, 3, 5)).astype(np.float32)}
    arrays["half"] = np.arange(120).reshape(60, 2).astype(jnp.bfloat16)
    content = serialization.to_bytes({"a": arrays, "step": np.float32(3)})
    assert b"__msgpack_chunked_array__" in content
    (tmp_path / MSGPACK).write_bytes(content)
    found = read_tensors(tmp_path)
    assert set(found) == {"a.table", "a.half", "step"}
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[f"a.{name}"], value.astype(np.float32))
        np.testing.assert_array_equal(found[f"a.{name}"][5:11, 1:], value[5:11, 1:])
    assert found["step"][...] == 3


def test_weight_index_refuses_missing_files_and_tensors(tmp_path):
    folder = Path(shutil.copytree(WEIGHTS / "t5" / "torch_sharded", tmp_path / "sharded"))
    index = folder / f"{BIN}.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for changed, message in (
        ({"shared.weight": "../secret.bin"}, r"index\.json: .*lies outside"),
        ({"shared.weight": "a/b.bin"}, r"a/b\.bin: no such file|is not the name"),
        ({"shared.weight": 3}, r"index\.json: .*is not the name"),
        ({"odd.weight": weight_map["shared.weight"]}, r"index\.json: no file holds odd\.weight"),
    ):
        change(index, weight_map=weight_map | changed)
        with pytest.raises(UserError, match=message):
            read_tensors(folder)
    change(index, weight_map=weight_map)
    next(iter(folder.glob("*00002*"))).unlink()
    with pytest.raises(UserError, match=r"00002-of-00004\.bin: no such file, though pytorch_model\.bin\.ind"):
        read_tensors(folder)
    change(index, weight_map=[])
    with pytest.raises(UserError, match=r"\[\] is not the name of a file; copy"):
        read_tensors(folder)


def repack(change):
    """Returns a function that packs a file again after `change` of its members."""

    def spoil(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        how = change(members) or zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", how) as archive:
            for name, content in members.items():
                archive.writestr(f"archive/{name}", content)

    return spoil


def overwrite(content: bytes):
    return lambda path: path.write_bytes(content)


def flip_in_list(path: Path) -> None:
    content = path.read_bytes()
    assert content.count(b"shared.weight") == 1
    path.write_bytes(content.replace(b"shared.weight", b"sharee.weight"))


def flip_in_numbers(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        numbers = next(member for member in archive.infolist() if member.filename.endswith("/data/3"))
    content = bytearray(path.read_bytes())
    content[numbers.header_offset + 30 + len(numbers.filename) + len(numbers.extra) + 64] ^= 64
    path.write_bytes(content)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 990345061\n"
SPOILT = {
    "torch before 1.6": ("t5/legacy", None, "torch's format from before 1.6, which is not supported"),
    "TorchScript": ("script", None, "is a TorchScript program, not weights"),
    "training": ("t5/training", None, "is a training checkpoint, not only weights"),
    "float8": ("float8", None, "would run torch._utils._rebuild_tensor_v3, which weights in float32"),
    "git": ("t5/torch", overwrite(POINTER), "is a pointer of Git LFS"),
    "page": ("t5/torch", overwrite(b"<!doctype html>"), "truncated, or not a file of torch.save"),
    "cut": ("t5/torch", lambda p: p.write_bytes(p.read_bytes()[:9000]), "truncated or damaged"),
    "compressed": ("t5/torch", repack(lambda m: zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "another zip": ("t5/torch", repack(lambda m: m.pop("data.pkl") and None), "but not one of torch.save"),
    "big-endian": ("t5/torch", repack(lambda m: m.update(byteorder=b"big")), "on a big-endian machine"),
    "no storage": ("t5/torch", repack(lambda m: m.pop("data/3") and None), "its part data/3 is missing"),
    "damaged numbers": ("t5/torch", flip_in_numbers, "its part data/3 is damaged (wrong checksum)"),
    "damaged list": ("t5/torch", flip_in_list, "its list of tensors is damaged (wrong checksum)"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_damaged_and_foreign_torch_files_are_refused(tmp_path, how):
    source, spoil, sentence = SPOILT[how]
    path = Path(shutil.copy(WEIGHTS / source / BIN, tmp_path))
    if spoil:
        spoil(path)
    with pytest.raises(UserError) as caught:
        read_tensors(tmp_path)
    message = str(caught.value)
    assert sentence in message and message.startswith(str(path)) and "\n" not in message


@pytest.mark.parametrize(
    "content", [b"", b"\x81\xa1a\x01", b"\x81\xa1a\xc7\x0b\x01\x93\x91\x00\xa6object\xc4\x00"]
)
def test_damaged_msgpack_costs_one_sentence(tmp_path, content):
    (tmp_path / MSGPACK).write_bytes(content)
    with pytest.raises(UserError, match=r"truncated, or not a Flax model") as caught:
        read_tensors(tmp_path)
    assert "\n" not in str(caught.value)

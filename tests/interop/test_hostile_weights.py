"""A file of weights may come from anyone: no code in it runs, and damage is refused."""

import io
import pickle
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.interop.weights import torch_pickle
from jaxir.interop.weights.weights import read_tensors

WEIGHTS = Path(__file__).resolve().parent.parent / "golden" / "weights"
BIN = "pytorch_model.bin"


def save(directory: Path, pickled: bytes, **storages: bytes) -> Path:
    with zipfile.ZipFile(directory / BIN, "w") as archive:
        archive.writestr("pytorch_model/data.pkl", pickled)
        for key, content in storages.items():
            archive.writestr(f"pytorch_model/data/{key}", content)
    return directory


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def tensor(key="0", *, kind="FloatStorage", count=6, offset=0, shape=(2, 3), strides=(3, 1), rest=b"\x89}"):
    def numbers(values) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu")
    storage += numbers([count])[1:-1] + b"tQ"
    view = numbers([offset])[1:-1] + numbers(shape) + numbers(strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + view + rest + b"tR"


def state(**values: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in values.items()) + b"u."


class _Calls:
    def __init__(self, function, *arguments):
        self._reduced = (function, arguments)

    def __reduce__(self):
        return self._reduced


class _Sets:
    """Its pickle makes the object without a call, then passes the state to `__setstate__`."""

    def __init__(self, path):
        self.path = path

    def __setstate__(self, state):
        Path(state["path"]).mkdir()


def made_by_hand(pattern: bytes, protocol: bytes = b"\x80\x02"):
    """Returns the pickle instructions of `pattern`, with MARKER replaced by the text of a path."""
    return lambda marker: protocol + pattern.replace(b"MARKER", text(marker)) + b"."


# Pickles that run code when `pickle` reads them, and the name that the error must quote.
ATTACKS = {
    "reduce": (made_by_hand(b"}X\x01\x00\x00\x00acos\nmkdir\n(MARKERtRs"), "os.mkdir"),
    "inst": (made_by_hand(b"(MARKERios\nmkdir\n"), "os.mkdir"),
    "obj": (made_by_hand(b"(cpathlib\nPath\nMARKERo0cos\nmkdir\n(MARKERtR"), "pathlib.Path"),
    "newobj": (made_by_hand(b"cpathlib\nPath\n(MARKERt\x810cos\nmkdir\n(MARKERtR"), "pathlib.Path"),
    "build": (lambda marker: pickle.dumps({"w": _Sets(marker)}, 2), "test_hostile_weights._Sets|copyreg"),
    "protocol 5": (
        lambda marker: pickle.dumps({"w": _Calls(Path(marker).mkdir.__func__, Path(marker))}, 5),
        "pathlib|builtins.getattr",
    ),
    "state": (made_by_hand(b"ccollections\nOrderedDict\n)Rcos\nmkdir\n(MARKERtR}b"), "os.mkdir"),
    "dotted": (
        made_by_hand(b"\x8c\x07pathlib\x8c\x0aPath.mkdir\x93cpathlib\nPath\n(MARKERtR\x85R", b"\x80\x04"),
        "pathlib.Path",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_code_in_a_file_is_run(tmp_path, name):
    make, wanted = ATTACKS[name]
    marker = tmp_path / "it-ran"
    pickled = make(str(marker))
    try:
        pickle.loads(pickled)
    except Exception as error:  # the pickle's code may have run before it fails
        assert marker.exists(), error
    marker.rmdir()
    with pytest.raises(UserError, match=rf"would run .*({wanted}).*nothing in it was run"):
        read_tensors(save(tmp_path, pickled))
    assert not marker.exists()


CALL = b"cposix\nsystem\n(X\x04\x00\x00\x00truetR"


@pytest.mark.parametrize(
    ("pickled", "sentence"),
    [
        # Names: only exact known names are allowed.
        (state(w=tensor(rest=b"\x89" + CALL)), "would run posix.system"),  # the call is in a tensor's hooks
        (b"\x80\x02" + CALL + b"Q.", "would run posix.system"),  # the call is in the id of a storage
        (state(w=b"ctorch\nload\n(X\x01\x00\x00\x00xtR"), "would run torch.load"),
        (state(w=b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n)R"), "_rebuild_tensor_v2.__globals__"),
        (b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93)R.", "collections.OrderedDict.from"),
        (b"\x80\x02cos\n\x1b[2J\n.", r"would run os\.\\x1b\[2J, which"),
        # Known names that are used in another role.
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "'_Type' object is not callable"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.", "no attribute '__dict__'"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "missing 4 required positional arguments"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "damaged"),
        (b"\x80\x02\x82\x01.", "damaged"),
        (b"", "damaged"),
        (b"\x80\x02}r\x00\x00\x01\x00.", "damaged .a value has number 65536, but there are 9 bytes"),
        # Objects other than a state dict.
        (b"\x80\x02]X\x01\x00\x00\x00aa.", r"expected tensors by name .*, found an object of type list"),
        (b"\x80\x02" + tensor() + b".", r"expected tensors by name \(a state dict\), found one tensor"),
        (state(a=b"K\x01"), r"'a' must be a named tensor, but is an object of type int"),
        (b"\x80\x02}K\x01" + tensor() + b"s.", "1 must be a named tensor, but is one tensor"),
        # Tensors outside their storage.
        (state(w=tensor(shape=(2, 4))), "reaches beyond its storage"),
        (state(w=tensor(offset=-1)), "an impossible shape"),
        (state(w=tensor(shape=(2**62, 2**62, 2), strides=(1, 1, 1))), "reaches beyond its storage"),
        (state(w=tensor(shape=(2**40,), strides=(0,))), "far larger than its 6 stored numbers"),
        (state(w=tensor(shape=(6,))), "without a shape"),
        (state(w=tensor(count=-1)), "not a storage"),
        (state(w=tensor(count=7)), "needs 7 numbers, but has 24 bytes"),
        (state(w=tensor("../../../data/0")), r"its part data/\.\./.* is missing"),
        (state(w=tensor(rest=b"\x89}}X\x03\x00\x00\x00negK\x01s")), "with metadata"),
    ],
)
def test_malformed_pickles_are_refused(tmp_path, pickled, sentence):
    save(tmp_path, pickled, **{"0": bytes(24)})
    with pytest.raises(UserError, match=sentence) as caught:
        read_tensors(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_undamaged_tensors_of_these_tests_are_read(tmp_path):
    numbers = np.arange(6, dtype=np.float32)
    save(tmp_path, state(w=tensor(), t=tensor(shape=(3, 2), strides=(1, 3))), **{"0": numbers.tobytes()})
    found = read_tensors(tmp_path)
    np.testing.assert_array_equal(found["w"], numbers.reshape(2, 3))
    np.testing.assert_array_equal(found["t"], numbers.reshape(2, 3).T)


def spoilt(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] = rng.choice([rng.randrange(256), 0, 255])
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.1 else changed)


@pytest.mark.parametrize("kind", ["archive", "list", "msgpack"])
def test_any_damage_costs_one_sentence(tmp_path, kind):
    source = WEIGHTS / ("t5/flax/flax_model.msgpack" if kind == "msgpack" else f"odd/{BIN}")
    content = source.read_bytes()
    if kind == "list":
        content = zipfile.ZipFile(io.BytesIO(content)).read("pytorch_model/data.pkl")
    refused = 0
    for seed in range(40):
        damaged = spoilt(content, random.Random(seed))
        try:
            if kind == "list":
                torch_pickle.parse(damaged, source)
            else:
                (tmp_path / source.name).write_bytes(damaged)
                for value in read_tensors(tmp_path).values():
                    np.asarray(value)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 10, "others have changed numbers, or bytes that are never read"

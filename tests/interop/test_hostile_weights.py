"""A file of weights may be anyone's: nothing that it names runs, and no damage costs more than a sentence."""

import io
import pickle
import random
import re
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.interop.weights import torch_pickle
from jaxir.interop.weights.weights import read_tensors

WEIGHTS = Path(__file__).resolve().parent.parent / "golden" / "weights"
BIN, MSGPACK = "pytorch_model.bin", "flax_model.msgpack"


def save(directory: Path, pickled: bytes, **storages: bytes) -> Path:
    """Writes `pickled` as torch.save would have written it."""
    with zipfile.ZipFile(directory / BIN, "w") as archive:
        archive.writestr("pytorch_model/data.pkl", pickled)
        for key, content in storages.items():
            archive.writestr(f"pytorch_model/data/{key}", content)
    return directory


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def tensor(key="0", *, kind="FloatStorage", count=6, offset=0, shape=(2, 3), strides=(3, 1), rest=b"\x89}"):
    """The pickle of one tensor."""

    def numbers(values) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu")
    storage += numbers([count])[1:-1] + b"tQ"
    view = numbers([offset])[1:-1] + numbers(shape) + numbers(strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + view + rest + b"tR"


def state(**values: bytes) -> bytes:
    """The pickle of a state dict."""
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in values.items()) + b"u."


class _Calls:
    """Pickled, it is a call; of what and with what, its maker says."""

    def __init__(self, function, *arguments, state=None):
        self._reduced = (function, arguments, state)

    def __reduce__(self):
        return self._reduced


class _Sets:
    """Pickled, it is an object that is made without a call and then given its state."""

    def __init__(self, path):
        self.path = path

    def __setstate__(self, state):
        Path(state["path"]).mkdir()


def protocol(number: int, wrap=lambda call: {"weight": call}):
    """A call of os.mkdir in a pickle of this protocol."""
    return lambda marker: pickle.dumps(wrap(_Calls(Path(marker).mkdir.__func__, Path(marker))), number)


def made_by_hand(pattern: bytes):
    """The instructions of `pattern`, MARKER being the text of a path."""
    return lambda marker: b"\x80\x02" + pattern.replace(b"MARKER", text(marker)) + b"."


# What runs when `pickle` reads it (and is tried on it), and the name in the sentence.
ATTACKS = {
    "reduce": (made_by_hand(b"}X\x01\x00\x00\x00acos\nmkdir\n(MARKERtRs"), "os.mkdir"),
    "whole file": (made_by_hand(b"cos\nmkdir\n(MARKERtR"), "os.mkdir"),
    "inst": (made_by_hand(b"(MARKERios\nmkdir\n"), "os.mkdir"),
    "obj": (made_by_hand(b"(cpathlib\nPath\nMARKERo0cos\nmkdir\n(MARKERtR"), "pathlib.Path"),
    "newobj": (made_by_hand(b"cpathlib\nPath\n(MARKERt\x810cos\nmkdir\n(MARKERtR"), "pathlib.Path"),
    "build": (lambda marker: pickle.dumps({"w": _Sets(marker)}, 2), "test_hostile_weights._Sets|copyreg"),
    "protocol 4": (protocol(4), "pathlib|builtins.getattr"),
    "protocol 5": (protocol(5), "pathlib|builtins.getattr"),
    "nested": (protocol(2, lambda call: {"a": [{"b": (1, call)}]}), "pathlib|getattr"),
    "key": (made_by_hand(b"}cos\nmkdir\n(MARKERtRK\x01s"), "os.mkdir"),
    "state": (made_by_hand(b"ccollections\nOrderedDict\n)Rcos\nmkdir\n(MARKERtR}b"), "os.mkdir"),
    "eval": (
        lambda marker: pickle.dumps(_Calls(eval, f"__import__('os').mkdir({marker!r})"), 2),
        "__builtin__.eval",
    ),
    "dotted": (
        lambda marker: (
            b"\x80\x04\x8c\x07pathlib\x8c\x0aPath.mkdir\x93cpathlib\nPath\n(V"
            + marker.encode()
            + b"\ntR\x85R."
        ),
        "pathlib.Path",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_that_a_file_names_is_run(tmp_path, name):
    make, wanted = ATTACKS[name]
    marker = tmp_path / "it-ran"
    pickled = make(str(marker))
    try:
        pickle.loads(pickled)
    except Exception as error:  # it may end badly, but only after what it came for
        assert marker.exists(), error
    marker.rmdir()
    with pytest.raises(UserError) as caught:
        read_tensors(save(tmp_path, pickled))
    assert not marker.exists()
    assert re.search(f"opening it with torch would run .*({wanted})", str(caught.value))
    assert str(caught.value).endswith("do not need; nothing of it was run")


CALL = b"cposix\nsystem\n(X\x04\x00\x00\x00truetR"


@pytest.mark.parametrize(
    ("pickled", "wanted"),
    [
        (state(w=tensor(rest=b"\x89" + CALL)), "posix.system"),  # a hook
        (state(w=tensor(rest=b"\x89}" + CALL)), "posix.system"),  # metadata
        (b"\x80\x02" + CALL + b"Q.", "posix.system"),  # what a storage is asked for by
        (state(w=b"ctorch.hub\nload\n(X\x01\x00\x00\x00xtR"), "torch.hub.load"),
        (state(w=b"ctorch\nload\n(X\x01\x00\x00\x00xtR"), "torch.load"),
        (state(w=b"ctorch._utils\n_rebuild_qtensor\n)R"), "torch._utils._rebuild_qtensor"),
        (state(w=b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n)R"), "_rebuild_tensor_v2.__globals__"),
        (b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93)R.", "collections.OrderedDict.from"),
        (b"\x80\x04\x8c\x05torch\x8c\x15FloatStorage.__init__\x93)R.", "torch.FloatStorage.__init__"),
        (b"\x80\x02ctorch\nFloatStorage.from_file\n(X\x01\x00\x00\x00xtR.", "torch.FloatStorage.from_file"),
    ],
)
def test_a_name_is_known_whole_or_not_at_all(tmp_path, pickled, wanted):
    with pytest.raises(UserError, match=f"with torch would run .*{re.escape(wanted)}"):
        read_tensors(save(tmp_path, pickled, **{"0": bytes(24)}))


@pytest.mark.parametrize(
    ("pickled", "sentence"),
    [
        # Names that are known, used as what they are not.
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "'_Type' object is not callable"),
        (b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.", "no attribute '__dict__'"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.", "no attribute '__dict__'"),
        # An attribute that would hide a method of the dict is left out.
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb.", "{}"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "missing 4 required positional arguments"),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n(K\x01tR.", r"something else \(int\)"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "uses the instruction NEWOBJ, which"),
        (b"\x80\x02\x82\x01.", "uses the instruction EXT1, which"),
        (b"\x80\x02cos\n.", "damaged"),
        # Instructions that want much memory or never end.
        (b"\x80\x02}r\xff\xff\xff\xff.", "a value is kept as number 4294967295"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".", "a number beyond 64 bits"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02(0u.", "POP"),
        (b"\x80\x02h\x05.", "damaged"),
        (b"", "damaged"),
        # What would change the terminal, or could not be printed.
        (state(**{"w\n\x1b[2J": b"K\x01"}), "a text that cannot be printed"),
        (b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.", "a text that cannot be printed"),
        (b"\x80\x02cos\n\x1b[2J\n.", r"would run os\.\\x1b\[2J, which"),
        # Not a state dict.
        (
            b"\x80\x02]X\x01\x00\x00\x00aa.",
            r"no tensors by name .*, but something else \(list\)",
        ),
        (b"\x80\x02" + tensor() + b".", r"no tensors by name \(a state dict\), but one tensor"),
        (state(a=b"K\x01"), r"'a' is not a tensor with a name, but something else \(int\)"),
        (b"\x80\x02}K\x01" + tensor() + b"s.", "1 is not a tensor with a name, but one tensor"),
        # Tensors that reach where nothing of theirs is.
        (state(w=tensor(shape=(2, 4))), "reaches beyond its storage"),
        (state(w=tensor(offset=1)), "reaches beyond its storage"),
        (state(w=tensor(offset=-1)), "an impossible shape"),
        (state(w=tensor(strides=(-3, 1))), "an impossible shape"),
        (state(w=tensor(shape=(-2, -3))), "an impossible shape"),
        (state(w=tensor(shape=(2**62, 2**62, 2), strides=(1, 1, 1))), "reaches beyond its storage"),
        (state(w=tensor(shape=(2**40,), strides=(0,))), "repeats 6 numbers without end"),
        (state(w=tensor(shape=(1,) * 65, strides=(0,) * 65)), "an impossible shape"),
        (state(w=tensor(shape=(6,))), "without a shape"),
        (state(w=tensor(count=-1)), "a storage that is none"),
        (state(w=tensor(count=7)), "wants 7 numbers where 24 bytes are stored"),
        (state(w=tensor(count=2**60, shape=(2**60,), strides=(1,))), "numbers where 24 bytes are stored"),
        (state(w=tensor(kind="LongStorage")), "wants 6 numbers where 24 bytes are stored"),
        (state(w=tensor("../../../data/0")), r"its part data/\.\./.* is missing"),
        (state(w=tensor("/etc/passwd")), "its part data//etc/passwd is missing"),
        (state(w=tensor(rest=b"\x89}}X\x03\x00\x00\x00negK\x01s")), "with metadata"),
    ],
)
def test_malformed_pickles_are_refused_within_time_and_memory(tmp_path, pickled, sentence):
    save(tmp_path, pickled, **{"0": bytes(24)})
    began = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(UserError, match=sentence) as caught:
        if not read_tensors(tmp_path):
            raise UserError("{}")  # of no tensors
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert peak < 32 << 20 and time.perf_counter() - began < 20


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02" + b")" + b"\x85" * 30_000 + b"K\x01}\x86.",
        b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s.",
        b"\x80\x04)" + b"\x85" * 30_000 + b"\x8c\x01a\x93.",
        b"\x80\x02" + b"(" * 30_000 + b".",
    ],
    ids=["value", "key", "name", "marks"],
)
def test_deeply_nested_pickles_are_refused(tmp_path, pickled):
    with pytest.raises(UserError, match=r"its list of tensors is damaged|holds no tensors"):
        read_tensors(save(tmp_path, pickled))


def test_a_list_of_tensors_without_end_is_not_read(tmp_path):
    save(tmp_path, bytes((1 << 22) + 1))
    with pytest.raises(UserError, match=r"its data\.pkl has 4194305 bytes, which no state dict needs"):
        read_tensors(tmp_path)


def test_the_tensors_of_these_tests_are_read_where_they_are_right(tmp_path):
    numbers = np.arange(6, dtype=np.float32)
    save(tmp_path, state(w=tensor(), t=tensor(shape=(3, 2), strides=(1, 3))), **{"0": numbers.tobytes()})
    found = read_tensors(tmp_path)
    np.testing.assert_array_equal(found["w"], numbers.reshape(2, 3))
    np.testing.assert_array_equal(found["t"], numbers.reshape(2, 3).T)


def spoilt(content: bytes, rng: random.Random) -> bytes:
    """Changes a few bytes, or cuts."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] = rng.choice([rng.randrange(256), 0, 255])
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.1 else changed)


@pytest.mark.parametrize("kind", ["archive", "list", "msgpack"])
def test_every_damage_is_one_sentence(tmp_path, kind):
    source = WEIGHTS / ("t5/flax" if kind == "msgpack" else "odd") / (MSGPACK if kind == "msgpack" else BIN)
    content = source.read_bytes()
    if kind == "list":
        content = zipfile.ZipFile(io.BytesIO(content)).read("pytorch_model/data.pkl")
    refused, longest, most = 0, 0.0, 0
    tracemalloc.start()
    for seed in range(40):
        damaged = spoilt(content, random.Random(seed))
        began = time.perf_counter()
        tracemalloc.reset_peak()
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
        longest = max(longest, time.perf_counter() - began)
        most = max(most, tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    # The others have changed numbers, or what is never looked at.
    assert refused > 10
    assert longest < 10 and most < 64 << 20

"""Which errors are damage, and the checksums of arrays that are read in parts."""

import errno
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.interop.weights import array_checksums
from jaxir.training.run.damage import is_damage


def test_only_known_errors_count_as_damage():
    def caused(cause: Exception) -> Exception:
        error = Exception("Encountered error while reading array index")
        error.__cause__ = cause
        return error

    for passing in (
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17 bytes"),
        ConnectionResetError(),
        TimeoutError(),
        *(OSError(n, "") for n in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ENOMEM)),
        ValueError("ABORTED: All 1 retry attempts failed: Service Unavailable"),
        ValueError("PERMISSION_DENIED: Forbidden"),
        ValueError("RESOURCE_EXHAUSTED: Too many open files"),
        ValueError("Bad Request [http_response_code='400']"),
        UnicodeError("NOT_FOUND: in words like TensorStore's, and not by it"),
    ):
        assert not is_damage(passing) and not is_damage(caused(passing)), passing
    for damage in (
        *(OSError(n, "") for n in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)),
        KeyError("opt_state"),
        json.JSONDecodeError("Expecting value", "", 0),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ValueError("OUT_OF_RANGE: Requested byte range is not valid for value of size 3"),
        ValueError("DATA_LOSS: Error decoding manifest"),
        ValueError("NOT_FOUND: Metadata does not exist"),
        ValueError("FAILED_PRECONDITION: Error reading: Truncated Zstd-compressed stream"),
    ):
        assert is_damage(damage) and is_damage(caused(damage)), damage


def test_checksums_of_parts_add_up_however_an_array_is_cut():
    rng = np.random.default_rng(0)
    for shape in ((), (7,), (70_000,), (3, 5, 7), (300, 500), (4, 1), (2, 70_000)):
        values = rng.normal(size=shape).astype(np.float32)
        whole = array_checksums.of_part(values, [0] * len(shape), shape)
        assert whole == int(jax.jit(array_checksums.of_array)(values)), shape
        for axis, size in enumerate(shape):
            cut = int(rng.integers(0, size + 1))
            low, high = np.split(values, [cut], axis)
            starts = [cut if a == axis else 0 for a in range(len(shape))]
            parts = array_checksums.of_part(low, [0] * len(shape), shape) + array_checksums.of_part(
                high, starts, shape
            )
            assert parts % 2**32 == whole, shape
    for dtype in (jnp.bfloat16, np.float16, np.int32, np.int8):
        values = np.asarray(rng.normal(size=(6, 5)) * 50).astype(dtype)
        whole = array_checksums.of_part(values, (0, 0), (6, 5))
        assert whole == int(jax.jit(array_checksums.of_array)(values)), dtype
    square = rng.normal(size=(8, 8)).astype(np.float32)
    known = array_checksums.of_part(square, (0, 0), (8, 8))
    for changed in (square.T, -square, square[::-1], np.roll(square, 1), square + 1):
        assert array_checksums.of_part(np.ascontiguousarray(changed), (0, 0), (8, 8)) != known


def test_parts_of_an_array_that_are_read_again_are_counted_once():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    top, bottom = ((slice(0, 2), slice(0, 4)), (slice(2, 3), slice(0, 4)))
    known = array_checksums.of_part(values, (0, 0), (3, 4))
    for expected in (known, known + 1):
        reading = array_checksums.Reading("w", (3, 4), expected)
        for part, is_last in ((top, False), (top, False), (bottom, True), (bottom, False), (top, True)):
            if is_last and expected != known:
                with pytest.raises(UserError, match=r"^w is damaged"):
                    reading.add(part, values[part])
            else:
                reading.add(part, values[part])

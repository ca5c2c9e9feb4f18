"""Batches made ahead on a thread."""

import itertools
import threading

import pytest

from jaxir.training.prefetch import prefetch


def test_prefetch_keeps_order_passes_errors_on_and_ends_its_thread():
    def numbers():
        yield from range(5)
        raise ValueError("the sixth")

    with prefetch(numbers(), lambda x: 10 * x) as batches:
        assert [next(batches) for _ in range(5)] == [0, 10, 20, 30, 40]
        with pytest.raises(ValueError, match="the sixth"):
            next(batches)
    with prefetch(itertools.count(), lambda x: x) as batches:
        assert next(batches) == 0
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]

"""Batches made ahead on a thread."""

import itertools
import threading
import time

import pytest

from jaxir.training.step.prefetch import AHEAD, prefetch


def test_no_more_than_a_few_batches_are_made_ahead():
    made = []

    def numbers():
        for number in itertools.count():
            made.append(number)
            yield number

    with prefetch(numbers(), lambda x: x) as batches:
        for read in range(1, 4):
            assert next(batches) == read - 1
            time.sleep(0.2)
            assert (
                read + 1 < len(made) <= read + AHEAD + 1 == read + 3
            )  # one waits to be put beside the others


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

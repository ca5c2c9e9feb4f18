"""Comparing datasets and batches, with or without their order."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def rows(batch: Mapping[str, np.ndarray], lists: Sequence[str] = ()) -> list:
    """Returns the examples, sorted; repeated items of the features in `lists` count once."""
    names = sorted(set(batch) - set(lists))

    def example(i: int) -> tuple:
        items = {tuple(np.asarray(batch[name][i][j]).tobytes() for name in lists) for j in range(count)}
        return tuple(batch[name][i].tobytes() for name in names), sorted(items)

    count = batch[lists[0]].shape[1] if lists else 0
    return sorted(map(example, range(len(batch[names[0]]))))


def take(iterator: Iterator[Any], n: int) -> list[Any]:
    return list(itertools.islice(iterator, n))


def assert_equal(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype, name
        np.testing.assert_array_equal(ours[name], array, err_msg=name)

"""What a dataset holds, whatever its order."""

from collections.abc import Mapping, Sequence

import numpy as np


def rows(batch: Mapping[str, np.ndarray], lists: Sequence[str] = ()) -> list:
    """Returns the examples in one order for all datasets; of features that are `lists`, each item once."""
    names = sorted(set(batch) - set(lists))

    def example(i: int) -> tuple:
        items = {tuple(np.asarray(batch[name][i][j]).tobytes() for name in lists) for j in range(count)}
        return tuple(batch[name][i].tobytes() for name in names), sorted(items)

    count = batch[lists[0]].shape[1] if lists else 0
    return sorted(map(example, range(len(batch[names[0]]))))

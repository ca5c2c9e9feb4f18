"""Finds passages that may have a large MaxSim: those with tokens at centroids near the query's tokens.

As in WARP (Scheerer et al. 2025, arXiv 2501.17788), each query token looks at its nearest centroids only. A
passage with tokens at some of these centroids gets the largest of their products with the query token. Any
other passage gets the largest product of the centroids that were not looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PROBES = 32  # number of nearest centroids that each query token looks at


class TokenLists(NamedTuple):
    """The passages with a token nearest to each of C centroids: passages[ends[c] : ends[c + 1]] for c."""

    passages: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, nearest: np.ndarray, lengths: np.ndarray, centroids: int) -> TokenLists:
        """Makes the lists of N passages from the centroids [T] of their tokens and their lengths [N]."""
        owners = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        pairs = np.unique(nearest.astype(np.int64) * len(lengths) + owners)
        ends = np.searchsorted(pairs, np.arange(centroids + 1) * len(lengths))
        return cls((pairs % len(lengths)).astype(np.int32), ends)

    def candidates(self, products: np.ndarray, total: int, count: int) -> np.ndarray:
        """Returns at most `count` of `total` passages for a query whose tokens have products [C, Lq]."""
        scores, of_token = np.zeros(total, np.float32), np.zeros(total, np.float32)
        for row in np.ascontiguousarray(products.T):
            if len(row) > PROBES:
                chosen = np.argpartition(row, len(row) - PROBES - 1)[-PROBES - 1 :]
                least, *chosen = chosen[np.argsort(row[chosen])]
                floor = row[least]
            else:
                chosen, floor = np.argsort(row), row.min() - 1
            of_token.fill(0)
            # In ascending order, so that a passage's largest product is written last and kept.
            for centroid in chosen:
                members = self.passages[self.ends[centroid] : self.ends[centroid + 1]]
                of_token[members] = row[centroid] - floor
            scores += of_token
        found = np.flatnonzero(scores)
        if len(found) <= count:
            return found
        return found[np.argpartition(scores[found], len(found) - count)[-count:]]

"""The order of ids, and checks that ids are new to an index or known to it."""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxir.core.errors import UserError


def check_new(new: Sequence[str], known: Sequence[str]) -> None:
    if twice := set(new).intersection(known):
        verb = "is" if len(twice) == 1 else "are"
        raise UserError(f"{_documents(twice)} {verb} already in the index: delete old versions first")


def check_distinct(ids: Sequence[str]) -> None:
    if len(set(ids)) != len(ids):
        twice = next(i for i, other in itertools.pairwise(sorted(ids)) if i == other)
        raise UserError(f"the id {twice!r} occurs twice: give distinct ids")


def check_known(ids: Sequence[str], known: Sequence[str]) -> None:
    if unknown := set(ids).difference(known):
        verb = "is" if len(unknown) == 1 else "are"
        raise UserError(f"there {verb} no {_documents(unknown)} in the index to delete")


def _documents(ids: set[str]) -> str:
    first = ", ".join(map(repr, sorted(ids)[:3])) + (f" and {len(ids) - 3:,} more" if len(ids) > 3 else "")
    return f"document{'s' if len(ids) > 1 else ''} {first}"


def descending_ranks(ids: Sequence[str]) -> np.ndarray:
    """Returns the rank of each id in descending order, int32 [N]. It orders documents of equal score."""
    ranks = np.empty(len(ids), np.int32)
    ranks[sorted(range(len(ids)), key=ids.__getitem__, reverse=True)] = np.arange(len(ids), dtype=np.int32)
    return ranks

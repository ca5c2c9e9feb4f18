"""The order of ids, and what is said of those that are there already, or are not."""

from collections.abc import Sequence

import numpy as np

from jaxir.core.errors import UserError


def check_new(new: Sequence[str], there: Sequence[str]) -> None:
    """Raises a UserError that names the first of the `new` ids that are `there`."""
    if twice := set(new).intersection(there):
        one = len(twice) == 1
        raise UserError(f"{_documents(twice)} {'is' if one else 'are'} in the index already: delete first")


def check_there(ids: Sequence[str], there: Sequence[str]) -> None:
    """Raises a UserError that names the first of the `ids` that are not `there`."""
    if unknown := set(ids).difference(there):
        one = len(unknown) == 1
        raise UserError(f"there {'is' if one else 'are'} no {_documents(unknown)} to delete")


def _documents(ids: set[str]) -> str:
    first = ", ".join(map(repr, sorted(ids)[:3])) + (f" and {len(ids) - 3:,} more" if len(ids) > 3 else "")
    return f"document{'s' if len(ids) > 1 else ''} {first}"


def descending_ranks(ids: Sequence[str]) -> np.ndarray:
    """Returns [N] int32: the place of each id in descending order, which is how ties are broken."""
    ranks = np.empty(len(ids), np.int32)
    ranks[sorted(range(len(ids)), key=ids.__getitem__, reverse=True)] = np.arange(len(ids), dtype=np.int32)
    return ranks

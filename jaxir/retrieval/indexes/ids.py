"""What is said of ids that are there already, or are not."""

from collections.abc import Sequence

from jaxir.errors import UserError


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

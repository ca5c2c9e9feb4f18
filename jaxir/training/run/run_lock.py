"""A run's directory, held by the one process that trains there: by a lock on a disk, a lease in a bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import jax

from jaxir.storage.files import is_bucket, path_of
from jaxir.storage.leases import Lease
from jaxir.storage.locks import locked


class Hold(Protocol):
    """A directory that is held."""

    def check(self) -> None:
        """Raises a UserError if it is not held any more; called before a checkpoint is written or removed."""


class Undisputed:
    """Held by process 0."""

    def check(self) -> None:
        """Does nothing."""


@contextlib.contextmanager
def held(run_dir: str | Path) -> Iterator[Hold]:
    """Holds the directory of a run; of several processes of one run the first one does.

    Raises:
      UserError: another process trains there.
    """
    place = path_of(run_dir)
    with contextlib.ExitStack() as closing:
        hold: Hold = Undisputed()
        if jax.process_index() == 0:
            if is_bucket(place):
                hold = closing.enter_context(Lease(place, "trains in"))
            else:
                hold = closing.enter_context(locked(place, f"another process trains in {run_dir}"))
        yield hold

"""SeqIO tasks over BEIR folders."""

from __future__ import annotations

from jaxir.data.pair_sources import BeirPairs
from jaxir.data.seqio_tasks import add_task
from jaxir.data.sources import BeirFolder


def beir(*, directory: str, name: str | None = None) -> str:
    """Registers a task over a BEIR folder, with its splits; returns the task's name.

    Args:
      directory: the folder.
      name: of the task; by default it is made of the folder's path.

    Raises:
      UserError: no such folder.
    """
    splits = BeirFolder(directory).splits
    sources = {split: BeirPairs(directory=directory, split=split) for split in splits}
    return add_task("beir", sources, name=name)

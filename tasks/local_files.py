"""SeqIO tasks over files of training pairs. Each has the one split "train"."""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.pair_sources import JsonlPairs, TevatronPairs, TsvPairs


def jsonl_pairs(*, path: str, name: str | None = None) -> str:
    """Registers a task over {"query", "passage", "negatives"} lines; returns its name.

    Args:
      path: the file, optionally gzipped.
      name: of the task; by default derived from the path.
    """
    return add_task("jsonl", {"train": JsonlPairs(path=path)}, name=name)


def tsv_pairs(*, path: str, name: str | None = None) -> str:
    """Registers a task over query<TAB>passage[<TAB>negative...] lines; returns its name.

    Args:
      path: the file, optionally gzipped.
      name: of the task; by default derived from the path.
    """
    return add_task("tsv", {"train": TsvPairs(path=path)}, name=name)


def tevatron_pairs(*, path: str, name: str | None = None) -> str:
    """Registers a task over lines in Tevatron's format; returns its name.

    Args:
      path: the file, optionally gzipped.
      name: of the task; by default derived from the path.
    """
    return add_task("tevatron", {"train": TevatronPairs(path=path)}, name=name)

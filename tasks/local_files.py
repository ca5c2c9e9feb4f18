"""Registers SeqIO tasks over files of training pairs. The only split of each task is "train"."""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.pair_sources import JsonlPairs, TevatronPairs, TsvPairs


def jsonl_pairs(*, path: str, name: str | None = None) -> str:
    """Registers a SeqIO task over a .jsonl of {"query", "passage", "negatives"}; returns the task's name.

    Args:
      path: path of the file, which may be gzipped.
      name: name of the task; by default derived from the path.
    """
    return add_task("jsonl", {"train": JsonlPairs(path=path)}, name=name)


def tsv_pairs(*, path: str, name: str | None = None) -> str:
    """Registers a SeqIO task over lines query<TAB>passage[<TAB>negative...]; returns the task's name.

    Args:
      path: path of the file, which may be gzipped.
      name: name of the task; by default derived from the path.
    """
    return add_task("tsv", {"train": TsvPairs(path=path)}, name=name)


def tevatron_pairs(*, path: str, name: str | None = None) -> str:
    """Registers a SeqIO task over a .jsonl in Tevatron's format; returns the task's name.

    Args:
      path: path of the file, which may be gzipped.
      name: name of the task; by default derived from the path.
    """
    return add_task("tevatron", {"train": TevatronPairs(path=path)}, name=name)

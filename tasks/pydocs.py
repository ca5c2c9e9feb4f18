"""Registers a SeqIO task over the documentation of the installed Python packages."""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.package_docs import SPLITS
from jaxir.data.sets.pair_sources import PydocsPairs


def pydocs() -> str:
    """Registers the SeqIO task "pydocs" with the splits train, dev and test; returns the name "pydocs"."""
    return add_task("pydocs", {split: PydocsPairs(split=split) for split in SPLITS}, name="pydocs")

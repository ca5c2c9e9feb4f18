"""The SeqIO task over the documentation of the installed Python packages."""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.package_docs import SPLITS
from jaxir.data.sets.pair_sources import PydocsPairs


def pydocs() -> str:
    """Registers the task "pydocs" with splits train, dev and test; returns its name."""
    return add_task("pydocs", {split: PydocsPairs(split=split) for split in SPLITS}, name="pydocs")

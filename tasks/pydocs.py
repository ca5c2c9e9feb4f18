"""The SeqIO task over the documentation of the installed Python packages."""

from __future__ import annotations

from jaxir.data.pair_sources import PydocsPairs
from jaxir.data.pydocs import SPLITS
from jaxir.data.seqio_tasks import add_task


def pydocs() -> str:
    """Registers the task "pydocs" with splits train, dev and test; returns its name."""
    return add_task("pydocs", {split: PydocsPairs(split=split) for split in SPLITS}, name="pydocs")

"""SeqIO tasks over BEIR's data sets, from BEIR folders or TFDS, with their splits."""

from __future__ import annotations

from pathlib import Path

from jaxir.data.formats.sources import BeirFolder
from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets import beir_sets
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.data.sets.tfds_beir import TfdsBeirPairs


def beir(*, directory: str, name: str | None = None) -> str:
    """Registers a task over any BEIR folder, with its splits; returns the task's name.

    Args:
      directory: the folder.
      name: of the task; by default derived from the folder's path.
    """
    splits = BeirFolder(directory).splits
    sources = {split: BeirPairs(directory=directory, split=split) for split in splits}
    return add_task("beir", sources, name=name)


def beir_set(*, dataset: str, directory: str, name: str | None = None) -> str:
    """Registers a task over one of BEIR's data sets as downloaded; returns the task's name.

    Args:
      dataset: its name: "scifact", "cqadupstack/android", ...; one of `beir_sets.BEIR_SETS`, or "msmarco".
      directory: the folder with the unpacked archives, such as `directory/scifact`.
      name: of the task; by default derived from the path.
    """
    folder = BeirFolder(Path(directory) / dataset)
    sources = {}
    for split in beir_sets.beir_set(dataset).splits:
        folder.qrels_path(split)
        sources[split] = BeirPairs(directory=str(folder.directory), split=split)
    return add_task(f"beir_{_word(dataset)}", sources, name=name)


def tfds_beir(*, dataset: str, data_dir: str | None = None, name: str | None = None) -> str:
    """Registers a task over one of BEIR's public data sets as TFDS prepares it; returns the task's name.

    Args:
      dataset: its name, as in `beir_set`.
      data_dir: TFDS's directory; None: its default.
      name: of the task.
    """
    tfds_name = beir_sets.tfds_name(dataset)
    sources = {
        split: TfdsBeirPairs(name=tfds_name, split=beir_sets.tfds_split(split), data_dir=data_dir)
        for split in beir_sets.beir_set(dataset).splits
    }
    return add_task(f"tfds_beir_{_word(dataset)}", sources, name=name)


def _word(dataset: str) -> str:
    return dataset.replace("/", "_").replace("-", "_")

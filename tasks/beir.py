"""Registers SeqIO tasks over BEIR's data sets, from BEIR folders or TFDS, with the data sets' splits."""

from __future__ import annotations

from pathlib import Path

from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets import beir_sets
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.data.sets.tfds_beir import TfdsBeirPairs


def beir(*, directory: str, name: str | None = None) -> str:
    """Registers a SeqIO task over any BEIR folder, with the folder's splits; returns the task's name.

    Args:
      directory: the BEIR folder.
      name: name of the task; by default derived from the folder's path.
    """
    splits = BeirFolder(directory).splits
    sources = {split: BeirPairs(directory=directory, split=split) for split in splits}
    return add_task("beir", sources, name=name)


def beir_set(*, dataset: str, directory: str, name: str | None = None) -> str:
    """Registers a SeqIO task over a downloaded data set of BEIR; returns the task's name.

    Args:
      dataset: BEIR's name: "scifact", "cqadupstack/android", ... (`beir_sets.BEIR_SETS`), or "msmarco".
      directory: folder that holds the unpacked archive, such as `directory/scifact`.
      name: name of the task; by default derived from the path.
    """
    folder = BeirFolder(Path(directory) / dataset)
    sources = {}
    for split in beir_sets.beir_set(dataset).splits:
        folder.qrels_path(split)
        sources[split] = BeirPairs(directory=str(folder.directory), split=split)
    return add_task(f"beir_{_word(dataset)}", sources, name=name)


def tfds_beir(*, dataset: str, data_dir: str | None = None, name: str | None = None) -> str:
    """Registers a SeqIO task over a public data set of BEIR that TFDS has prepared; returns the task's name.

    Args:
      dataset: BEIR's name of the data set, as in `beir_set`.
      data_dir: TFDS's data directory; None: TFDS's default.
      name: name of the task; by default derived from the data set.
    """
    tfds_name = beir_sets.tfds_name(dataset)
    sources = {
        split: TfdsBeirPairs(name=tfds_name, split=beir_sets.tfds_split(split), data_dir=data_dir)
        for split in beir_sets.beir_set(dataset).splits
    }
    return add_task(f"tfds_beir_{_word(dataset)}", sources, name=name)


def _word(dataset: str) -> str:
    return dataset.replace("/", "_").replace("-", "_")

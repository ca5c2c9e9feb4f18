"""Registers SeqIO tasks over the downloaded files of MS MARCO passage ranking.

For TFDS's version, use `jaxir.tasks.beir.tfds_beir(dataset="msmarco")`.
"""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.msmarco import MsMarcoFolder, MsMarcoPairs, MsMarcoTriples


def msmarco(*, directory: str, name: str | None = None) -> str:
    """Registers a SeqIO task over judged pairs, with a split per qrels.SPLIT.tsv; returns the task's name.

    Args:
      directory: folder with collection.tsv, queries.train.tsv, qrels.train.tsv, queries.dev.small.tsv, ...
      name: name of the task; by default derived from the path.
    """
    splits = MsMarcoFolder(directory).splits
    sources = {split: MsMarcoPairs(directory=directory, split=split) for split in splits}
    return add_task("msmarco", sources, name=name)


def msmarco_triples(
    *,
    directory: str,
    triples: str = "qidpidtriples.train.full.2.tsv.gz",
    max_negatives: int = 32,
    name: str | None = None,
) -> str:
    """Registers a SeqIO task over pairs with hard negatives; returns its name. The only split is "train".

    Args:
      directory: folder with MS MARCO's downloaded files, as in `msmarco`.
      triples: file of id triples in this folder; see `MsMarcoTriples`.
      max_negatives: maximum number of negatives per pair.
      name: name of the task; by default derived from the path.
    """
    source = MsMarcoTriples(directory=directory, triples=triples, max_negatives=max_negatives)
    return add_task("msmarco_triples", {"train": source}, name=name)

"""SeqIO tasks over MS MARCO passage ranking as downloaded.

The task over TFDS's version is `jaxir.tasks.beir.tfds_beir(dataset="msmarco")`.
"""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.msmarco import MsMarcoFolder, MsMarcoPairs, MsMarcoTriples


def msmarco(*, directory: str, name: str | None = None) -> str:
    """Registers a task over judged pairs; returns its name. Splits are those of qrels.SPLIT.tsv.

    Args:
      directory: collection.tsv, queries.train.tsv, qrels.train.tsv, queries.dev.small.tsv, ...
      name: of the task; by default derived from the path.
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
    """Registers a task over pairs with hard negatives, with the one split "train"; returns its name.

    Args:
      directory: as in `msmarco`.
      triples: the file of id triples; see `MsMarcoTriples`.
      max_negatives: the most negatives of a pair.
      name: of the task; by default derived from the path.
    """
    source = MsMarcoTriples(directory=directory, triples=triples, max_negatives=max_negatives)
    return add_task("msmarco_triples", {"train": source}, name=name)

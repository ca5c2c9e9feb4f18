"""SeqIO tasks over MS MARCO passage ranking as downloaded.

From TFDS it is `jaxir.tasks.beir.tfds_beir(dataset="msmarco")`.
"""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.msmarco import MsMarcoFolder, MsMarcoPairs, MsMarcoTriples


def msmarco(*, directory: str, name: str | None = None) -> str:
    """Registers a task over judged pairs; its splits are those of queries.SPLIT.tsv and qrels.SPLIT.tsv.

    Args:
      directory: collection.tsv, queries.train.tsv, qrels.train.tsv, queries.dev.small.tsv, ...
      name: of the task; by default it is made of the path.

    Returns:
      The task's name.

    Raises:
      UserError: no such folder.
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
      max_negatives: negatives kept of a pair.
      name: of the task; by default it is made of the path.
    """
    source = MsMarcoTriples(directory=directory, triples=triples, max_negatives=max_negatives)
    return add_task("msmarco_triples", {"train": source}, name=name)

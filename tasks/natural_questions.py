"""SeqIO tasks over Natural Questions: long answers, from the simplified files or TFDS, and DPR's open NQ."""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.dpr import DprPairs
from jaxir.data.sets.natural_questions import NaturalQuestionsPairs, TfdsNaturalQuestionsPairs


def natural_questions(*, train: str, dev: str, name: str | None = None) -> str:
    """Registers a task from question to long answer; returns its name.

    Args:
      train: the file v1.0-simplified_simplified-nq-train.jsonl.gz.
      dev: the file v1.0-simplified_nq-dev-all.jsonl.gz.
      name: of the task; by default derived from the paths.
    """
    sources = {"train": NaturalQuestionsPairs(path=train), "dev": NaturalQuestionsPairs(path=dev)}
    return add_task("natural_questions", sources, name=name)


def tfds_natural_questions(*, data_dir: str | None = None, name: str | None = None) -> str:
    """Registers the same task from TFDS's "natural_questions/default"; returns its name.

    Args:
      data_dir: TFDS's directory; None: its default.
      name: of the task.
    """
    sources = {
        split: TfdsNaturalQuestionsPairs(split=tfds_split, data_dir=data_dir)
        for split, tfds_split in (("train", "train"), ("dev", "validation"))
    }
    return add_task("tfds_natural_questions", sources, name=name)


def open_natural_questions(*, train: str, dev: str, name: str | None = None) -> str:
    """Registers a task over DPR's files, passages of Wikipedia with BM25's hard negatives; returns its name.

    Args:
      train: the file biencoder-nq-train.json.gz.
      dev: the file biencoder-nq-dev.json.gz.
      name: of the task; by default derived from the paths.
    """
    return add_task("open_nq", {"train": DprPairs(path=train), "dev": DprPairs(path=dev)}, name=name)

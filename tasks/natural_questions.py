"""Registers SeqIO tasks over Natural Questions: its long answers (from files or TFDS), or DPR's open NQ."""

from __future__ import annotations

from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.dpr import DprPairs
from jaxir.data.sets.natural_questions import NaturalQuestionsPairs, TfdsNaturalQuestionsPairs


def natural_questions(*, train: str, dev: str, name: str | None = None) -> str:
    """Registers a SeqIO task of (question, long answer) pairs; returns the task's name.

    Args:
      train: path of v1.0-simplified_simplified-nq-train.jsonl.gz.
      dev: path of v1.0-simplified_nq-dev-all.jsonl.gz.
      name: name of the task; by default derived from the paths.
    """
    sources = {"train": NaturalQuestionsPairs(path=train), "dev": NaturalQuestionsPairs(path=dev)}
    return add_task("natural_questions", sources, name=name)


def tfds_natural_questions(*, data_dir: str | None = None, name: str | None = None) -> str:
    """Like `natural_questions`, from TFDS's "natural_questions/default": registers a task, returns its name.

    Args:
      data_dir: TFDS's data directory; None: TFDS's default.
      name: name of the task; by default derived from the data directory.
    """
    sources = {
        split: TfdsNaturalQuestionsPairs(split=tfds_split, data_dir=data_dir)
        for split, tfds_split in (("train", "train"), ("dev", "validation"))
    }
    return add_task("tfds_natural_questions", sources, name=name)


def open_natural_questions(*, train: str, dev: str, name: str | None = None) -> str:
    """Registers a SeqIO task over DPR's NQ files (Wikipedia passages, BM25's negatives); returns its name.

    Args:
      train: path of biencoder-nq-train.json.gz.
      dev: path of biencoder-nq-dev.json.gz.
      name: name of the task; by default derived from the paths.
    """
    return add_task("open_nq", {"train": DprPairs(path=train), "dev": DprPairs(path=dev)}, name=name)

"""Registers SeqIO tasks over MultiReQA: NaturalQuestions, SQuAD, TriviaQA, SearchQA and HotpotQA."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxir.core.errors import UserError, suggest
from jaxir.data.seqio.seqio_tasks import add_task
from jaxir.data.sets.multireqa import MultiReqaPairs, TfdsMultiReqaPairs

SPLITS = {"train": "train", "dev": "validation"}


class DataSet(NamedTuple):
    """The names of a data set in MRQA (its file names, which differ between releases) and in TFDS."""

    mrqa: tuple[str, ...]
    tfds: str


# {MultiReQA's name: other names}. The splits are "train" and "dev", which MultiReQA's papers call "test".
DATA_SETS = {
    "NaturalQuestions": DataSet(("NaturalQuestionsShort", "NaturalQuestions"), "mrqa/natural_questions"),
    "SQuAD": DataSet(("SQuAD",), "mrqa/squad"),
    "TriviaQA": DataSet(("TriviaQA-web", "TriviaQA"), "mrqa/trivia_qa"),
    "SearchQA": DataSet(("SearchQA",), "mrqa/search_qa"),
    "HotpotQA": DataSet(("HotpotQA",), "mrqa/hotpot_qa"),
}


def multireqa(
    *,
    dataset: str,
    mrqa_directory: str,
    multireqa_directory: str,
    with_context: bool = True,
    name: str | None = None,
) -> str:
    """Registers a SeqIO task over downloaded files, with the splits "train" and "dev"; returns its name.

    Args:
      dataset: "NaturalQuestions", "SQuAD", "TriviaQA", "SearchQA" or "HotpotQA".
      mrqa_directory: folder with MRQA's train/SQuAD.jsonl.gz, dev/SQuAD.jsonl.gz, ...
      multireqa_directory: folder data/ of MultiReQA's repository, with train/SQuAD/candidates.json.gz, ...
      with_context: whether a passage is the answer sentence followed by its context, or only the sentence.
      name: name of the task; by default derived from the paths.
    """
    known = _data_set(dataset)
    sources = {
        split: MultiReqaPairs(
            mrqa=str(_existing([Path(mrqa_directory) / split / f"{n}.jsonl.gz" for n in known.mrqa])),
            candidates=_candidates(multireqa_directory, split, dataset),
            with_context=with_context,
        )
        for split in SPLITS
    }
    return add_task(f"multireqa_{dataset.lower()}", sources, name=name)


def tfds_multireqa(
    *,
    dataset: str,
    multireqa_directory: str,
    data_dir: str | None = None,
    with_context: bool = True,
    name: str | None = None,
) -> str:
    """Like `multireqa`, but with the contexts from TFDS: registers a SeqIO task and returns its name.

    Args:
      dataset: "NaturalQuestions", "SQuAD", "TriviaQA", "SearchQA" or "HotpotQA".
      multireqa_directory: folder data/ of MultiReQA's repository, because TFDS lacks the sentences.
      data_dir: TFDS's data directory; None: TFDS's default.
      with_context: whether a passage is the answer sentence followed by its context, or only the sentence.
      name: name of the task; by default derived from the paths.
    """
    known = _data_set(dataset)
    sources = {
        split: TfdsMultiReqaPairs(
            name=known.tfds,
            split=tfds_split,
            candidates=_candidates(multireqa_directory, split, dataset),
            data_dir=data_dir,
            with_context=with_context,
        )
        for split, tfds_split in SPLITS.items()
    }
    return add_task(f"tfds_multireqa_{dataset.lower()}", sources, name=name)


def _data_set(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise UserError(
            f"MultiReQA has no training data {name!r} (has: {', '.join(DATA_SETS)}){suggest(name, DATA_SETS)}"
        )
    return DATA_SETS[name]


def _candidates(directory: str, split: str, dataset: str) -> str:
    return str(_existing([Path(directory) / split / dataset / "candidates.json.gz"]))


def _existing(paths: list[Path]) -> Path:
    for path in paths:
        if path.is_file():
            return path
    raise UserError(f"there is no {' nor '.join(map(str, paths))}: download it, or give another directory")

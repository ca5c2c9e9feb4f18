"""Command: writes a published data set as a BEIR folder."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from jaxir import cli
from jaxir.errors import UserError, suggest

SOURCES = {
    "msmarco": "DIR",
    "multireqa": "MRQA_FILE,CANDIDATES_FILE",
    "nq": "FILE",
    "tfds": "beir/NAME",
}


def prepare(
    *,
    dataset: str,
    output: str,
    splits: list[str] | None = None,
    with_context: bool = True,
    data_dir: str | None = None,
    on_bad_input: Literal["stop", "skip"] = "stop",
) -> None:
    """Writes a published data set as a BEIR folder.

    The folder has a corpus, queries and judgements: encode, index and evaluate take it, and training does as
    BeirPairs. --dataset is one of

      msmarco:DIR                                MS MARCO passages: collection.tsv, queries.*.tsv, qrels.*.tsv
      multireqa:MRQA_FILE,CANDIDATES_FILE        MultiReQA: an MRQA file (SQuAD.jsonl.gz) and its sentences
      nq:FILE                                    Natural Questions' long answers, from a simplified file
      tfds:beir/NAME                             a set of BEIR that TensorFlow Datasets has prepared

    Args:
      dataset: what to read.
      output: the folder to make.
      splits: splits to write judgements of (default: test), such as dev.small of MS MARCO or validation of
        TFDS; a data set that is one file has one split, which gets this name.
      with_context: whether a passage of MultiReQA is the sentence followed by its context, or the sentence.
      data_dir: where TFDS keeps its data sets; its default if not given.
      on_bad_input: stop at the first malformed record, or skip and count them.

    Raises:
      UserError: no such data set or split, or the folder exists.
      BadInputError: a malformed record, unless they are skipped.
    """
    from jaxir.data.collection_files import write_collection
    from jaxir.data.lines import OnBadInput
    from jaxir.files import atomic_directory

    splits, collector = splits or ["test"], OnBadInput(on_bad_input)
    kind, _, where = dataset.partition(":")
    if kind not in SOURCES or not where:
        forms = ", ".join(f"{name}:{form}" for name, form in SOURCES.items())
        raise UserError(f"--dataset must be one of {forms}, not {dataset!r}{suggest(kind, SOURCES)}")
    with atomic_directory(output) as folder:
        collection = _read(kind, where, splits, with_context, data_dir, collector)
        counts = write_collection(folder, **collection)
    collector.report()
    judged = ", ".join(f"{count:,} judgements ({split})" for split, count in counts.qrels.items())
    print(f"{output}: {counts.documents:,} passages, {counts.queries:,} queries, {judged}")
    print(
        f"evaluate on it: python -m jaxir.evaluate --model=MODEL --dataset=beir:{output} --split={splits[0]}"
    )


def _read(
    kind: str, where: str, splits: list[str], with_context: bool, data_dir: str | None, on_bad_input: Any
) -> dict[str, Any]:
    """Returns the documents, queries and judgements of a data set, as `write_collection` takes them."""
    if kind == "msmarco":
        from jaxir.data.msmarco import MsMarcoFolder

        folder = MsMarcoFolder(where, on_bad_input)
        queries = itertools.chain.from_iterable([folder.queries(split) for split in splits])
        return {
            "documents": folder.documents(),
            "queries": queries,
            "qrels": {s: folder.qrels(s) for s in splits},
        }
    if kind == "tfds":
        from jaxir.data.tfds_beir import TfdsBeir

        whole = TfdsBeir(where, data_dir, on_bad_input)
        qrels = {split: whole.qrels(split) for split in splits}
        return {"documents": whole.documents(), "queries": whole.queries(), "qrels": qrels}
    if len(splits) > 1:
        raise UserError(f"{kind}: has one split, which --splits names: {', '.join(splits)} are {len(splits)}")
    if kind == "multireqa":
        from jaxir.data.multireqa import MultiReqaPairs

        mrqa, comma, candidates = where.partition(",")
        if not comma:
            raise UserError("--dataset=multireqa: takes two files, MRQA_FILE,CANDIDATES_FILE")
        source = MultiReqaPairs(mrqa=mrqa, candidates=candidates, with_context=with_context)
    else:
        from jaxir.data.natural_questions import NaturalQuestionsPairs

        source = NaturalQuestionsPairs(path=where)
    documents, queries, judged = source.answers(on_bad_input).collection()
    return {"documents": documents, "queries": queries, "qrels": {splits[0]: judged}}


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.prepare:prepare",
            example="python -m jaxir.prepare --dataset=msmarco:DIR --splits=train,dev.small --output=beir\n"
            "  python -m jaxir.prepare --output=squad-test"
            " --dataset=multireqa:mrqa/dev/SQuAD.jsonl.gz,MultiReQA/data/dev/SQuAD/candidates.json.gz",
        )
    )

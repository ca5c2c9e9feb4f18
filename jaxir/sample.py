"""Command: writes a smaller BEIR folder, for a first look at an experiment."""

from __future__ import annotations

from jaxir import cli
from jaxir.core.values import Count, Seed
from jaxir.storage.outputs import writes


@writes(output="directory")
def sample(*, dataset: str, output: str, train: Count, split: str = "train", seed: Seed = 0) -> None:
    """Writes a smaller BEIR folder, for a first look at an experiment.

    Keeps randomly drawn judgements of the training split, all judgements of the other splits, and the queries
    and documents that these judge. Metrics are higher in the smaller corpus, so compare them only on the same
    sample.

    Args:
      dataset: beir:DIR, the folder to draw from.
      output: directory to write; it must not exist.
      train: number of judgements of the training split to keep.
      split: the name of the training split.
      seed: seed for the random draw.
    """
    from jaxir.evaluation.datasets import parse_dataset
    from jaxir.experiments.subsample import write_sample

    _, directory = parse_dataset(dataset, "beir")
    documents, queries = write_sample(directory, output, train=train, split=split, seed=seed)
    print(f"{output}: {documents:,} documents, {queries:,} queries, {train:,} {split} judgements")


if __name__ == "__main__":
    cli.start("jaxir.sample:sample", "--dataset=beir:DIR --train=5000 --output=SMALL")

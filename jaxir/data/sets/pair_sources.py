"""Where training pairs come from: one small settings class per kind of source.

Sources of one published collection have a module of their own: `msmarco`, `multireqa`, `natural_questions`,
`dpr`, `tfds_beir`. `mixture.Mixture` trains on several.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxir.core.errors import UserError, suggest
from jaxir.core.features import Features, Record
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.text_data import RecordSource, TextData
from jaxir.data.formats import pair_files
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import BeirFolder, PairExample, splits_in
from jaxir.data.sets import package_docs
from jaxir.data.text.tokenizer import Tokenizer


class PairSource(RecordSource):
    """Pairs with optional negatives: the fields query, passage, negatives. A kind defines `examples`."""

    @abc.abstractmethod
    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pairs."""

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        """Yields the pairs by field.

        Raises:
          UserError: `examples` gave something else than a `PairExample`.
        """
        for number, example in enumerate(self.examples(on_bad_input)):
            if not isinstance(example, PairExample):
                raise UserError(
                    f"example {number}: {type(self).__name__}.examples must yield"
                    f" PairExample(query_id, query, passage_id, passage), but it yielded {example!r:.60}"
                )
            yield example.record()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeirPairs(PairSource):
    """The relevant judgements of one split of a BEIR folder."""

    directory: str
    split: str = "train"

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields a pair for each relevant judgement."""
        return BeirFolder(self.directory, on_bad_input).pairs(self.split)


def dev_pairs(directory: str, split: str | None) -> BeirPairs | None:
    """Returns the pairs of a BEIR folder to evaluate on while training; without a split None, for nothing.

    Raises:
      UserError: the folder has other splits only. The sentence names the settings of the recipes.
    """
    if split is None:
        return None
    splits = splits_in(Path(str(directory).removeprefix("beir:")) / "qrels", "")
    if splits and split not in splits:
        others = [name for name in splits if name != "train"]
        take = f"--dev_split={others[0]} evaluates on another, " if others else ""
        raise UserError(
            f"{directory} has no split {split!r} (has: {', '.join(splits)}) to evaluate on while training"
            f"{suggest(split, others)}: {take}--dev_split=None evaluates nothing; of your own pairs,"
            f" jaxir.prepare --dataset=pairs:FILE --dev=0.1 holds some out"
        )
    return BeirPairs(directory=directory, split=split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlPairs(PairSource):
    """A file of {"query", "passage", "negatives"} lines; see `pair_files.read_pairs_jsonl`."""

    path: str

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pair of each line."""
        return pair_files.read_pairs_jsonl(self.path, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetPairs(PairSource):
    """A Parquet file with the columns query, passage, negatives; see `pair_files.read_pairs_parquet`."""

    path: str

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pair of each row."""
        return pair_files.read_pairs_parquet(self.path, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TsvPairs(PairSource):
    """A file of query<TAB>passage[<TAB>negative...] lines, such as MS MARCO's triples.train.small.tsv."""

    path: str

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pair of each line."""
        return pair_files.read_pairs_tsv(self.path, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TevatronPairs(PairSource):
    """A file in Tevatron's format; see `pair_files.read_tevatron`."""

    path: str

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields a pair for each positive passage of each line."""
        return pair_files.read_tevatron(self.path, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PydocsPairs(PairSource):
    """The documentation of the installed Python packages: "train", "dev" or "test" packages."""

    split: str = "train"

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields (summary line, rest of the docstring) pairs."""
        return package_docs.read_pairs(self.split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPairs(TextData):
    """Examples tokenised before, by `ArrayDataset.save`. None of them can be malformed."""

    directory: str

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> ArrayDataset:
        """Opens the arrays; tokenizer, lengths and prompts must be those they were made with.

        Raises:
          UserError: no such arrays, or made with another tokenizer, other lengths or other prompts.
        """
        dataset = ArrayDataset.load(self.directory, features)
        if dataset.tokenizer_fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{self.directory} was made with another tokenizer than the model's; make it again"
            )
        return dataset

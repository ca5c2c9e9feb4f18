"""Where training pairs come from: one small settings class per kind of source, all with the same `build`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

from jaxir.data import pair_files, pydocs
from jaxir.data.lines import OnBadInput, Policy
from jaxir.data.pairs import PairDataset
from jaxir.data.sources import BeirFolder, PairExample
from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError


class PairSource(abc.ABC):
    """What is common: examples -> token arrays. A new kind of source defines `examples`."""

    @abc.abstractmethod
    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pairs."""

    def build(
        self,
        tokenizer: Tokenizer,
        *,
        query_length: int,
        passage_length: int,
        num_negatives: int = 0,
        query_prompt: str = "",
        passage_prompt: str = "",
        on_bad_input: OnBadInput | Policy = "stop",
    ) -> PairDataset:
        """Reads everything, tokenises it and reports what was skipped.

        Args:
          tokenizer: makes the ids.
          query_length: most tokens of a query.
          passage_length: most tokens of a passage or negative.
          num_negatives: negatives of a pair in a batch.
          query_prompt: put before each query, as the encoder will.
          passage_prompt: put before each passage and negative.
          on_bad_input: what to do with malformed records.

        Raises:
          BadInputError: a malformed record, unless they are skipped.
          UserError: nothing to read, or negatives wanted where a pair has none.
        """
        collector = on_bad_input if isinstance(on_bad_input, OnBadInput) else OnBadInput(on_bad_input)
        dataset = PairDataset.from_examples(
            self.examples(collector),
            tokenizer,
            query_length=query_length,
            passage_length=passage_length,
            num_negatives=num_negatives,
            query_prompt=query_prompt,
            passage_prompt=passage_prompt,
        )
        collector.report()
        return dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeirPairs(PairSource):
    """The relevant judgements of one split of a BEIR folder."""

    directory: str
    split: str = "train"

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields a pair for each relevant judgement."""
        return BeirFolder(self.directory, on_bad_input).pairs(self.split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlPairs(PairSource):
    """A file of {"query", "passage", "negatives"} lines; see `pair_files.read_pairs_jsonl`."""

    path: str

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pair of each line."""
        return pair_files.read_pairs_jsonl(self.path, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TsvPairs(PairSource):
    """A file of query<TAB>passage[<TAB>negative...] lines."""

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
        return pydocs.read_pairs(self.split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPairs:
    """Pairs tokenised before, by `PairDataset.save`."""

    directory: str

    def build(
        self,
        tokenizer: Tokenizer,
        *,
        query_length: int,
        passage_length: int,
        num_negatives: int = 0,
        query_prompt: str = "",
        passage_prompt: str = "",
        on_bad_input: OnBadInput | Policy = "stop",
    ) -> PairDataset:
        """Opens the arrays; the arguments must be those they were made with. (None can be malformed.)

        Raises:
          UserError: no such arrays, or made with another tokenizer, other lengths or other prompts.
        """
        del on_bad_input
        dataset = PairDataset.load(self.directory, num_negatives=num_negatives)
        if dataset.tokenizer_fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{self.directory} was made with another tokenizer than the model's; make it again"
            )
        for name, wanted in (
            ("query_length", query_length),
            ("passage_length", passage_length),
            ("query_prompt", query_prompt),
            ("passage_prompt", passage_prompt),
        ):
            if (made := getattr(dataset, name)) != wanted:
                raise UserError(f"{self.directory} was made with {name} {made!r}, not {wanted!r}")
        return dataset

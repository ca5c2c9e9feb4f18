"""What a training run gets as its data: settings that build a dataset for a model's tokenizer."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from jaxir.data.lines import OnBadInput, Policy
from jaxir.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairFormat:
    """How pairs of texts become token arrays.

    Attributes:
      query_length: most tokens of a query.
      passage_length: most tokens of a passage or negative.
      num_negatives: negatives of a pair in a batch.
      query_prompt: put before each query, as the encoder will.
      passage_prompt: put before each passage and negative.
    """

    query_length: int
    passage_length: int
    num_negatives: int = 0
    query_prompt: str = ""
    passage_prompt: str = ""


class TextPairs(abc.ABC):
    """What is common to all kinds of data: one `build`. A kind defines `dataset`."""

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
    ) -> Any:
        """Reads the files through once, before the first batch, and reports what was skipped.

        Args:
          tokenizer: makes the ids.
          query_length: as in `PairFormat`, like the four after it.
          passage_length: see there.
          num_negatives: see there.
          query_prompt: see there.
          passage_prompt: see there.
          on_bad_input: what to do with malformed records.

        Returns:
          What a trainer reads: `num_examples`, `features` and `batches(...)`, as in `pairs.PairDataset`.

        Raises:
          BadInputError: a malformed record, unless they are skipped.
          UserError: nothing to read, or negatives wanted where a pair has none.
        """
        collector = on_bad_input if isinstance(on_bad_input, OnBadInput) else OnBadInput(on_bad_input)
        form = PairFormat(
            query_length=query_length,
            passage_length=passage_length,
            num_negatives=num_negatives,
            query_prompt=query_prompt,
            passage_prompt=passage_prompt,
        )
        dataset = self.dataset(tokenizer, form, collector)
        collector.report()
        return dataset

    @abc.abstractmethod
    def dataset(self, tokenizer: Tokenizer, form: PairFormat, on_bad_input: OnBadInput) -> Any:
        """Builds the dataset; malformed records go to `on_bad_input`, which the caller reports."""

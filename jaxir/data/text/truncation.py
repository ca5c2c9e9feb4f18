"""Counts texts that are truncated, because they have more tokens than a model reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxir.core.features import TextFormat

FLAGS = ("--query_length", "--passage_length")
ARGUMENTS = ("query_max_length", "passage_max_length")  # arguments of `Pretrained` and similar settings


@dataclasses.dataclass
class Truncation:
    """Counts of texts and of truncated texts; the counts add up over calls.

    Attributes:
      length: maximum number of tokens per text, special tokens included.
      texts: number of texts that were tokenised.
      cut: number of texts that had more tokens and were truncated.
    """

    length: int
    texts: int = 0
    cut: int = 0

    def add(self, texts: int, cut: int) -> None:
        self.texts += texts
        self.cut += cut

    def in_words(self, what: str) -> str:
        """Returns e.g. "2,010 of 3,000 passages (67.0 %) at 128 tokens"."""
        share = 100 * self.cut / max(1, self.texts)
        percent = f"{share:.0f}" if share in (0, 100) else f"{min(max(share, 0.1), 99.9):.1f}"
        return f"{self.cut:,} of {self.texts:,} {what} ({percent} %) at {self.length:,} tokens"


def truncation_note(counts: Mapping[str, Truncation], change: str) -> str:
    """Returns one line on truncated texts; `change` says how to change the lengths."""
    parts = ", ".join(count.in_words(what) for what, count in counts.items())
    return f"truncated: {parts}; {change}"


def dataset_truncation_note(dataset: Any, form: TextFormat, names: tuple[str, str]) -> str | None:
    """Returns `truncation_note` for training data, or None if the dataset has no counts.

    `names` are the flags or settings of the query length and of the passage length.
    """
    counts = dataset.truncation
    if not counts:
        return None
    lengths = {count.length for count in counts.values()}
    both = zip(names, (form.query_length, form.passage_length), strict=True)
    named = [name for name, length in both if length in lengths] or names
    texts = {name if name.endswith("s") else f"{name}s": count for name, count in counts.items()}
    return truncation_note(texts, f"{' and '.join(named)} set{'' if named[1:] else 's'} this")


def as_json(counts: Mapping[str, Truncation]) -> dict[str, dict[str, int]]:
    return {name: dataclasses.asdict(count) for name, count in counts.items()}


def from_json(found: Any) -> dict[str, Truncation]:
    """Returns the counts that `as_json` wrote; an empty dict for None, which older versions wrote."""
    return {name: Truncation(**count) for name, count in (found or {}).items()}

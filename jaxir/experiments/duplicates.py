"""Training pairs in which many queries share a passage, as in TriviaQA (Moiseev et al. 2023, section 3.4)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated

from jaxir.core.errors import UserError
from jaxir.core.values import Within, checked
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import MalformedRecord, OnBadInput, json_object, parsed_lines, string_field
from jaxir.data.formats.sources import PairExample
from jaxir.data.sets.pair_sources import PairSource


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DuplicateRich(PairSource):
    """The pairs of a BEIR folder, reduced to few unique passages by `merge_passages`.

    Attributes:
      directory: the BEIR folder.
      split: the split with the pairs.
      unique: maximum number of unique passages per pair; TriviaQA's training split has 0.17 (paper).
      group_by: the field of a document's `metadata` that names its group.
      mask_duplicates: whether a repeated passage keeps its id, so that the loss leaves it out of the
        negatives. Otherwise every pair has its own ids, and a passage can become its own negative.
    """

    directory: str
    split: str = "train"
    unique: Annotated[float, Within(0, 1, without="low")] = 0.17
    group_by: str = "source"
    mask_duplicates: bool = True

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        folder = BeirFolder(self.directory, on_bad_input)
        group_of = read_groups(folder, self.group_by, on_bad_input)
        pairs = list(folder.pairs(self.split))
        merged = merge_passages(pairs, [group_of[pair.passage_id] for pair in pairs], unique=self.unique)
        if self.mask_duplicates:
            return iter(merged)
        return (
            pair._replace(query_id=f"{pair.query_id} {row}", passage_id=f"{pair.passage_id} {row}")
            for row, pair in enumerate(merged)
        )


def merge_passages(
    pairs: Sequence[PairExample], groups: Sequence[str], *, unique: float
) -> list[PairExample]:
    """Gives all queries of a group its first pair's passage, and keeps the largest groups.

    Groups are taken in order of their number of pairs, then name, while at most `unique` passages per pair
    remain. Pairs must have no negatives, since a negative may be another pair's passage.
    """
    sizes = collections.Counter(groups)
    ranked = sorted(sizes, key=lambda group: (-sizes[group], group))
    kept, count = 0, 0
    # Groups get smaller, so the share of unique passages rises with every group: stop at the limit.
    for group in ranked:
        if kept + 1 > unique * (count + sizes[group]):
            break
        kept, count = kept + 1, count + sizes[group]
    if not kept:
        largest = max(sizes.values(), default=0)
        raise UserError(
            f"the largest group has {largest} pairs, so unique={unique} is impossible: give a larger value"
        )
    wanted = set(ranked[:kept])
    first: dict[str, PairExample] = {}
    merged = []
    for pair, group in zip(pairs, groups, strict=True):
        if group in wanted:
            shared = first.setdefault(group, pair)
            merged.append(pair._replace(passage_id=shared.passage_id, passage=shared.passage))
    return merged


def read_groups(folder: BeirFolder, field: str, on_bad_input: OnBadInput) -> dict[str, str]:
    """Returns `metadata`.`field` of each document of a corpus, by document id."""

    def parse(line: str, _: int) -> tuple[str, str]:
        record = json_object(line)
        metadata = record.get("metadata")
        if not isinstance(metadata, dict) or not isinstance(metadata.get(field), str):
            raise MalformedRecord(f"its metadata has no text in {field!r}")
        return string_field(record, "_id"), metadata[field]

    return dict(parsed_lines(folder.corpus_path, parse, on_bad_input))

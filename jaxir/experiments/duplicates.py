"""Training pairs in which many queries share a passage, as in TriviaQA (Moiseev et al. 2023, section 3.4)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated

from jaxir.core.errors import UserError
from jaxir.core.values import Within, checked
from jaxir.data.formats.lines import MalformedRecord, OnBadInput, json_object, parsed_lines, string_field
from jaxir.data.formats.sources import BeirFolder, PairExample
from jaxir.data.sets.pair_sources import PairSource


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DuplicateRich(PairSource):
    """The pairs of a BEIR folder, brought down to few unique passages.

    See `merge_passages` for how. Nothing is written and nothing is random.

    Attributes:
      directory: the BEIR folder.
      split: whose judgements are the pairs.
      unique: unique passages over pairs, at most; 0.17 is what the paper counts in TriviaQA's training split.
      group_by: the field of a document's `metadata` that names its group.
      mask_duplicates: whether a repeated passage keeps its id, so that the loss knows the repetitions and
        leaves them out of the negatives. Otherwise every pair has ids of its own, as where a data set
        does not say which of its passages are the same, and a passage becomes its own negative.
    """

    directory: str
    split: str = "train"
    unique: Annotated[float, Within(0, 1, without="low")] = 0.17
    group_by: str = "source"
    mask_duplicates: bool = True

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        """Yields the pairs.

        Raises:
          BadInputError: a malformed line, or a document without the field.
          UserError: no choice of groups has so few unique passages.
        """
        folder = BeirFolder(self.directory, on_bad_input)
        group_of = read_groups(folder, self.group_by, on_bad_input)
        pairs = list(folder.pairs(self.split))
        merged = merge_passages(pairs, [group_of[pair.passage_id] for pair in pairs], unique=self.unique)
        return iter(merged if self.mask_duplicates else map(_with_own_ids, range(len(merged)), merged))


def merge_passages(
    pairs: Sequence[PairExample], groups: Sequence[str], *, unique: float
) -> list[PairExample]:
    """Gives all queries of a group one passage, and keeps the largest groups.

    A group's passage is that of its first pair. Groups are taken from the largest on (by number of pairs,
    then by name), as many as leave at most `unique` passages per pair. With Debian's packages grouped by
    source package, the synopses of a family of packages all ask for the description of its first member.

    Args:
      pairs: the pairs; negatives must not be given, for one may be another pair's passage.
      groups: the group of each.
      unique: passages over pairs, at most; in (0, 1].

    Returns:
      The pairs that are kept, in their order.

    Raises:
      UserError: `unique` is out of range, or even the largest group alone has more unique passages.
    """
    if not 0 < unique <= 1:
        raise UserError(f"unique must be more than 0 and at most 1, not {unique}")
    sizes = collections.Counter(groups)
    ranked = sorted(sizes, key=lambda group: (-sizes[group], group))
    kept, count = 0, 0
    # Sizes fall, so the share of unique passages rises from group to group: the first excess is the end.
    for group in ranked:
        if kept + 1 > unique * (count + sizes[group]):
            break
        kept, count = kept + 1, count + sizes[group]
    if not kept:
        largest = max(sizes.values(), default=0)
        raise UserError(
            f"the largest group has {largest} pairs: that is more than {unique} unique passages a pair"
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
    """Returns the value of `metadata`.`field` of each document of a corpus.jsonl[.gz], by document id.

    Raises:
      BadInputError: a line that is no JSON object, or has no such text.
    """

    def parse(line: str, _: int) -> tuple[str, str]:
        record = json_object(line)
        metadata = record.get("metadata")
        if not isinstance(metadata, dict) or not isinstance(metadata.get(field), str):
            raise MalformedRecord(f"its metadata has no text {field!r}")
        return string_field(record, "_id"), metadata[field]

    return dict(parsed_lines(folder.corpus_path, parse, on_bad_input))


def _with_own_ids(row: int, pair: PairExample) -> PairExample:
    return pair._replace(query_id=f"{pair.query_id} {row}", passage_id=f"{pair.passage_id} {row}")

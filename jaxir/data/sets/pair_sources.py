"""Sources of training pairs.

Files may be gzipped. An id with two texts is an error, because duplicate masking compares ids, not texts.
Sources of published collections have their own modules: `msmarco`, `multireqa`, `natural_questions`, `dpr`,
`tfds_beir`.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxir.core.errors import UserError, suggest
from jaxir.core.features import Record
from jaxir.core.values import fits
from jaxir.data.batches.text_data import RecordSource
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.collection_names import folder_of
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    Policy,
    as_object,
    has_text,
    json_object,
    list_field,
    needed_text,
    parsed_lines,
    string_field,
)
from jaxir.data.formats.pair_table import Ids, check_no_header
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import Document, PairExample, Query, joined, splits_in, text_id
from jaxir.data.formats.tables import parsed_rows
from jaxir.data.sets import package_docs

Text = tuple[str, str]  # (id, text)


class PairSource(RecordSource):
    """Pairs with the fields query, passage and (optional) negatives. A subclass defines `examples`."""

    @abc.abstractmethod
    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        """Yields the pairs as `PairExample`s."""

    def records(self, on_bad_input: OnBadInput | Policy) -> Iterator[Record]:
        for number, example in enumerate(self.examples(on_bad_input)):
            if not isinstance(example, PairExample):
                raise UserError(
                    f"example {number}: {type(self).__name__}.examples must yield"
                    f" PairExample(query_id, query, passage_id, passage), but it yielded {example!r:.60}"
                )
            yield example.record()


class AnswerSource(PairSource):
    """Questions, and passages that may answer them. A subclass defines `judged`."""

    @abc.abstractmethod
    def judged(self, on_bad_input: OnBadInput) -> Iterator[tuple[Iterable[Document], list[PairExample]]]:
        """Yields for each source text its passages, and the (question, passage) pairs among them."""

    def examples(self, on_bad_input: OnBadInput) -> Iterator[PairExample]:
        return itertools.chain.from_iterable(pairs for _, pairs in self.judged(on_bad_input))

    def collection(self, on_bad_input: OnBadInput) -> tuple[Iterator[Document], list[Query], list[Qrel]]:
        """Returns all passages, the answered questions, and the judgements.

        The two lists are filled while the passages are read.
        """
        queries: list[Query] = []
        qrels: list[Qrel] = []

        def documents() -> Iterator[Document]:
            seen: set[str] = set()
            yielded: set[str] = set()
            for passages, pairs in self.judged(on_bad_input):
                for passage in passages:
                    if passage.id not in yielded:
                        yielded.add(passage.id)
                        yield passage
                for pair in pairs:
                    if pair.query_id not in seen:
                        seen.add(pair.query_id)
                        queries.append(Query(pair.query_id, pair.query))
                    qrels.append(Qrel(pair.query_id, pair.passage_id, 1))

        return documents(), queries, qrels


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeirPairs(PairSource):
    """The (query, relevant document) pairs of one split of a BEIR folder."""

    directory: str
    split: str = "train"

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        return BeirFolder(self.directory, on_bad_input).pairs(self.split)


def dev_pairs(directory: str, split: str | None) -> BeirPairs | None:
    """Returns the pairs of a BEIR folder to evaluate on while training; None if `split` is None."""
    if split is None:
        return None
    splits = splits_in(folder_of(directory) / "qrels", "")
    if splits and split not in splits:
        others = [name for name in splits if name != "train"]
        take = f"--dev_split={others[0]} evaluates on another split, " if others else ""
        raise UserError(
            f"{directory} has no split {split!r} (has: {', '.join(splits)}) to evaluate on while training"
            f"{suggest(split, others)}: {take}--dev_split=None evaluates on none; to hold out a dev split of"
            f" your own pairs, run jaxir.prepare --dataset=pairs:FILE --dev=0.1"
        )
    return BeirPairs(directory=directory, split=split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlPairs(PairSource):
    """Pairs from lines such as {"query": "...", "passage": "...", "negatives": ["...", ...]}.

    Optional: `query_id`, `passage_id` (default: a hash of the text) and `negatives`, a list of texts or of
    objects {"passage_id": "...", "passage": "..."}.
    """

    path: str

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        ids = Ids()
        return parsed_lines(self.path, lambda line, n: _pair(json_object(line), ids, n), on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetPairs(PairSource):
    """Pairs from a Parquet file whose columns are the fields of `JsonlPairs`, read 4,096 rows at a time."""

    path: str

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        ids, columns = Ids(), ("query", "passage", "negatives", "query_id", "passage_id")
        return parsed_rows(self.path, lambda row, n: _pair(row, ids, n), on_bad_input, columns=columns)


def _pair(record: dict[str, Any], ids: Ids, number: int) -> PairExample:
    def text(of: dict[str, Any], kind: str) -> Text:
        text = needed_text(of, kind)
        return ids.given(kind, string_field(of, f"{kind}_id", None), text, number), text

    query, passage = text(record, "query"), text(record, "passage")
    negatives = [
        {"passage": item} if isinstance(item, str) else as_object(item, "negatives")
        for item in list_field(record, "negatives")
    ]
    return PairExample(*query, *passage, tuple(text(item, "passage") for item in negatives))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TsvPairs(PairSource):
    """Pairs from lines query<TAB>passage[<TAB>negative...], such as MS MARCO's triples.train.small.tsv.

    Ids are hashes of the texts.
    """

    path: str

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        def parse(line: str, number: int) -> PairExample:
            texts = [column.strip() for column in line.split("\t")]
            if len(texts) < 2:
                expected = "expected query<TAB>passage[<TAB>negative...]"
                raise MalformedRecord(expected, "but the line has no tab")
            if not all(found := list(map(has_text, texts))):
                raise MalformedRecord("an empty column", f"(number {found.index(False) + 1})")
            if number == 1:
                check_no_header(*texts[:2])
            query, passage, *negatives = ((text_id(text), text) for text in texts)
            return PairExample(*query, *passage, tuple(negatives))

        return parsed_lines(self.path, parse, on_bad_input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TevatronPairs(PairSource):
    """Pairs from lines in Tevatron's format, such as

        {"query_id": "...", "query": "...", "positive_passages": [{"docid", "title", "text"}, ...],
         "negative_passages": [{"docid", "title", "text"}, ...]}

    `title` and `negative_passages` are optional. Each pair has all negatives of its line, except those that
    are also positive. If all passages have a `score` (from `jaxir.mine --teacher`), each pair has scores.
    """

    path: str

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        ids = Ids()

        def parse(line: str, number: int) -> list[PairExample]:
            record = json_object(line)
            query = needed_text(record, "query")
            query_id = ids.given("query", string_field(record, "query_id"), query, number)
            positives, negatives = (
                [_tevatron_passage(ids, item, name, number) for item in list_field(record, name)]
                for name in ("positive_passages", "negative_passages")
            )
            if not positives:
                raise MalformedRecord("'positive_passages' has no passage")
            every = [text for text, _ in positives]
            found = []
            for text, score in positives:
                of_pair = [(n, s) for n, s in negatives if is_negative(n, text, every)]
                texts, scores = tuple(n for n, _ in of_pair), tuple(s for _, s in of_pair)
                found.append(PairExample(query_id, query, *text, texts, score, scores))
            if any(score is None for _, score in (*positives, *negatives)):
                return [pair._replace(passage_score=None, negative_scores=None) for pair in found]
            return found

        return itertools.chain.from_iterable(parsed_lines(self.path, parse, on_bad_input))


def _tevatron_passage(ids: Ids, item: Any, field: str, number: int) -> tuple[Text, float | None]:
    record = as_object(item, field)
    score = record.get("score")
    if score is not None and not fits(score, float):
        raise MalformedRecord(f"a passage of {field!r} has a score that is not a number:", repr(score))
    text = joined(string_field(record, "title", ""), string_field(record, "text"))
    if not has_text(text):
        raise MalformedRecord(f"a passage of {field!r} has neither title nor text")
    return (ids.given("passage", string_field(record, "docid"), text, number), text), score


def is_negative(text: Text, passage: Text, positives: Sequence[Text]) -> bool:
    """Returns whether a text may be a pair's negative: it is not another positive passage of the query.

    Negatives equal to the pair's own passage are dropped later, because two texts may become equal when
    they are truncated.
    """
    return text[1] == passage[1] or all(text[1] != other for _, other in positives)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PydocsPairs(PairSource):
    """Pairs from the documentation of the installed Python packages; see `package_docs`."""

    split: str = "train"

    def examples(self, on_bad_input: OnBadInput | Policy) -> Iterator[PairExample]:
        return package_docs.read_pairs(self.split)

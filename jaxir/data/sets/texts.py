"""Texts by themselves, without labels, and texts to be written for texts: where there are no pairs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import Record
from jaxir.data.batches.text_data import RecordSource
from jaxir.data.formats.lines import (
    MalformedRecord,
    OnBadInput,
    decode_line,
    has_text,
    json_object,
    needed_text,
    parsed_lines,
    raw_lines,
)
from jaxir.data.formats.sources import find_file, read_corpus, read_lines
from jaxir.data.formats.tables import KINDS
from jaxir.data.text.sentences import sentences_of
from jaxir.storage.files import local_path

SOURCE = ".source"
_TABLES = tuple(ending for ending in KINDS if ending != ".jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts(RecordSource):
    """Texts: the field `text`, known by its words: those that are the same are one text, wherever they stand.

    Attributes:
      path: a file with a text on each line; a .jsonl[.gz] of documents (`_id`, `text`, maybe `title`), as the
        corpus of a BEIR folder; or a folder with such a corpus.
      sentences: whether each text is cut into its sentences (`jaxir.data.text.sentences`): then a record is a
        sentence, `text`, and the one after it, `next_text`, which is empty after the last one of a text.
    """

    path: str
    sentences: bool = False

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        """Yields the texts or their sentences; documents without any are left out."""
        texts = self._texts(on_bad_input)
        return _sentences(texts) if self.sentences else ({"text": named(text)} for text in texts)

    def _texts(self, on_bad_input: OnBadInput) -> Iterator[str]:
        place = local_path(self.path)
        if place.is_dir():
            place = find_file(place, "corpus.jsonl", "a folder with a corpus")
        elif place.name.lower().removesuffix(".gz").endswith(_TABLES):
            raise UserError(
                f"{self.path}: not read as texts, which are a file with a text on each line (.txt), a .jsonl"
                " of documents (_id, text) or a folder with such a corpus.jsonl, as jaxir.prepare makes of a"
                f" table of pairs (--dataset=pairs:{self.path})"
            )
        if ".jsonl" in Path(place.name.lower()).suffixes:
            documents = read_corpus(place, on_bad_input)
            return (document.contents for document in documents if has_text(document.contents))
        return (line.text for line in read_lines(place, on_bad_input))


def named(text: str) -> tuple[str, str]:
    """Returns a text with its id, which is the text: losses take two of one id for no negatives."""
    return text, text


def _sentences(texts: Iterable[str]) -> Iterator[Record]:
    for text in texts:
        found = [named(sentence) for sentence in sentences_of(text)]
        for sentence, following in zip(found, [*found[1:], ("", "")], strict=True):
            yield {"text": sentence, "next_text": following}


def dev_targets(path: str | None) -> SourcesAndTargets | None:
    """Returns what a generator is evaluated on while it trains; without a file None, for nothing."""
    return None if path is None else SourcesAndTargets(path=path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcesAndTargets(RecordSource):
    """What a generator learns to write for what: the fields `source` and `target`.

    Attributes:
      path: a .jsonl[.gz] of {"source", "target"}; or as GAR has them a NAME.source[.gz] with a text on each
        line, and beside it NAME.target[.gz].
    """

    path: str

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        """Yields the examples."""

        def parse(line: str, number: int) -> Record:
            record = json_object(line)
            return {name: (str(number), needed_text(record, name)) for name in ("source", "target")}

        place = local_path(self.path)
        if SOURCE in place.suffixes:
            return _lines_of_two(place, on_bad_input)
        return parsed_lines(place, parse, on_bad_input)


def _lines_of_two(sources: Path, on_bad_input: OnBadInput) -> Iterator[Record]:
    targets = sources.with_name(sources.name.replace(SOURCE, ".target"))
    both = itertools.zip_longest(raw_lines(sources), raw_lines(targets))
    for number, pair in enumerate(both, 1):
        if None in pair:
            short, long = (sources, targets) if pair[0] is None else (targets, sources)
            raise BadInputError(short, None, f"it has {number - 1:,} lines, and {long.name} has more")
        record = {}
        for name, path, (_, raw) in zip(("source", "target"), (sources, targets), pair, strict=True):
            try:
                record[name] = (str(number), needed_text({name: decode_line(raw).strip()}, name))
            except MalformedRecord as fault:
                on_bad_input.record(path, number, fault.kind, fault.detail)
        if len(record) == len(pair):
            yield record

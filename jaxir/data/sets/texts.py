"""Single texts without labels, and pairs of source and target texts."""

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
    """Texts: the field `text`. Equal texts are one text.

    Attributes:
      path: a file with a text on each line; a .jsonl[.gz] of documents (`_id`, `text`, optional `title`), as
        the corpus of a BEIR folder; or a folder with such a corpus.
      sentences: whether each text is split into sentences (`jaxir.data.text.sentences`). A record is then a
        sentence, `text`, and the next one, `next_text`, which is empty after a text's last sentence.
    """

    path: str
    sentences: bool = False

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        texts = self._texts(on_bad_input)
        return _sentences(texts) if self.sentences else ({"text": named(text)} for text in texts)

    def _texts(self, on_bad_input: OnBadInput) -> Iterator[str]:
        place = local_path(self.path)
        if place.is_dir():
            place = find_file(place, "corpus.jsonl", "a folder with a corpus")
        elif place.name.lower().removesuffix(".gz").endswith(_TABLES):
            raise UserError(
                f"{self.path}: texts are read from a file with a text on each line (.txt), a .jsonl of"
                " documents (_id, text) or a folder with such a corpus.jsonl, not from a table. From a table"
                f" of pairs, jaxir.prepare --dataset=pairs:{self.path} --output=DIR makes such a folder"
            )
        if ".jsonl" in Path(place.name.lower()).suffixes:
            documents = read_corpus(place, on_bad_input)
            return (document.contents for document in documents if has_text(document.contents))
        return (line.text for line in read_lines(place, on_bad_input))


def named(text: str) -> tuple[str, str]:
    """Returns a text with its id, which is the text: losses do not use two texts with one id as negatives."""
    return text, text


def _sentences(texts: Iterable[str]) -> Iterator[Record]:
    for text in texts:
        found = [named(sentence) for sentence in sentences_of(text)]
        for sentence, following in zip(found, [*found[1:], ("", "")], strict=True):
            yield {"text": sentence, "next_text": following}


def dev_targets(path: str | None) -> SourcesAndTargets | None:
    """Returns the targets that evaluate a generator while it trains; None without a file."""
    return None if path is None else SourcesAndTargets(path=path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcesAndTargets(RecordSource):
    """Sources and the targets that a generator learns to write for them: the fields `source` and `target`.

    Attributes:
      path: a .jsonl[.gz] of {"source", "target"}; or, as in GAR, a NAME.source[.gz] with a text on each line,
        beside a NAME.target[.gz].
    """

    path: str

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
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
            raise BadInputError(short, None, f"the file has {number - 1:,} lines, but {long.name} has more")
        record = {}
        for name, path, (_, raw) in zip(("source", "target"), (sources, targets), pair, strict=True):
            try:
                record[name] = (str(number), needed_text({name: decode_line(raw).strip()}, name))
            except MalformedRecord as fault:
                on_bad_input.record(path, number, fault.kind, fault.detail)
        if len(record) == len(pair):
            yield record

"""Training data of single texts without labels, and of source and target texts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import Record
from jaxir.data.batches.text_data import RecordSource
from jaxir.data.formats.collection_names import folder_of
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
    """Single texts, with the field `text`. Repeated texts have the same id.

    Attributes:
      path: a file with one text per line; a .jsonl[.gz] of documents (`_id`, `text`, optional `title`), like
        the corpus of a BEIR folder; or a folder with such a corpus.jsonl[.gz]; or hf:NAME, ir_datasets:ID.
      sentences: whether each text is split into sentences (`jaxir.data.text.sentences`). A record then has
        a sentence, `text`, and the sentence after it, `next_text`, which is "" for a text's last sentence.
    """

    path: str
    sentences: bool = False

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        texts = self._texts(on_bad_input)
        return _sentences(texts) if self.sentences else ({"text": named(text)} for text in texts)

    def _texts(self, on_bad_input: OnBadInput) -> Iterator[str]:
        place = folder_of(self.path)
        if place.is_dir():
            place = find_file(place, "corpus.jsonl", "a folder with a corpus")
        elif place.name.lower().removesuffix(".gz").endswith(_TABLES):
            raise UserError(
                f"{self.path}: texts are read from a file with one text per line (.txt), a .jsonl of"
                " documents (_id, text) or a folder with such a corpus.jsonl, not from a table. From a table"
                f" of pairs, jaxir.prepare --dataset=pairs:{self.path} --output=DIR makes such a folder"
            )
        if ".jsonl" in Path(place.name.lower()).suffixes:
            documents = read_corpus(place, on_bad_input)
            return (document.contents for document in documents if has_text(document.contents))
        return (line.text for line in read_lines(place, on_bad_input))


def named(text: str) -> tuple[str, str]:
    """Returns (id, text) with the text as id: losses never use texts with equal ids as negatives."""
    return text, text


def _sentences(texts: Iterable[str]) -> Iterator[Record]:
    for text in texts:
        found = [named(sentence) for sentence in sentences_of(text)]
        for sentence, following in zip(found, [*found[1:], ("", "")], strict=True):
            yield {"text": sentence, "next_text": following}


def dev_targets(path: str | None) -> SourcesAndTargets | None:
    """Returns the sources and targets to evaluate a generator on while training; None if `path` is None."""
    return None if path is None else SourcesAndTargets(path=path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcesAndTargets(RecordSource):
    """Source texts and the targets that a generator learns to write, with the fields `source` and `target`.

    Attributes:
      path: a .jsonl[.gz] of {"source", "target"}; or, as in GAR, a NAME.source[.gz] with one text per line,
        and in the same folder NAME.target[.gz].
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
            raise BadInputError(
                short, None, f"the file has {number - 1:,} lines, but {long.name} has more: make them equal"
            )
        record = {}
        for name, path, (_, raw) in zip(("source", "target"), (sources, targets), pair, strict=True):
            try:
                record[name] = (str(number), needed_text({name: decode_line(raw).strip()}, name))
            except MalformedRecord as fault:
                on_bad_input.record(path, number, fault.kind, fault.detail)
        if len(record) == len(pair):
            yield record

"""Writes examples into ArrayRecord files, and reads them in any order.

A record holds the tokens and key of each text, the numbers and the lists of one example. A record consists
of little-endian words of 32 bits, so that numpy can decode all records of a batch at once:

  tag [2], number of the example [2], number of items in its lists [1];
  for each single field: a text [4] (its key, the offset of its tokens in the record, their number) or a
    float32 [1];
  for each list: a text [4] or a float32 [1] for every item;
  the tokens, uint16 or int32.

The tag is random and the same in all records of a directory. Tag and number detect files of another
directory and renamed files. ArrayRecord's own hashes detect damaged bytes when a record is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Numbers, Record, Tokens, fields_of
from jaxir.core.installation import require
from jaxir.core.progress import progress
from jaxir.data.batches.record_arrays import ListCounts, RecordArrays, RecordReader
from jaxir.data.batches.text_table import TextTable, with_padding_tokens
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.data.text.truncation import Truncation, as_json, from_json
from jaxir.storage.files import atomic_directory

FORMAT = 1
META = "records.json"
FILE_BYTES = 1 << 30
# With one record per group, reading an example reads no others. Token ids compress badly.
WRITER_OPTIONS = "group_size:1,uncompressed"
REMAKE = "make it again with jaxir.prepare records"
MEND = f"copy it again, or {REMAKE}"
_AT_ONCE = 1024
_HEAD, _TEXT = 5, 4  # number of 32-bit words in a record's head, and in a text's entry

Fields = Mapping[str, Tokens | Numbers]


class Written(NamedTuple):
    """The content of `records.json`.

    Attributes:
      fields: the stored form of each field.
      tokenizer_fingerprint: fingerprint of the tokenizer that made the ids.
      counts: counts of the examples and their list items.
      token_bytes: 2 or 4, the size of a token.
      tag: the tag of every record; hex.
      hash: hash of all records without their tags; hex.
      files: the number of records and of bytes of each file, in order.
      truncation: counts of truncated texts, by the name of `Tokens.table`; empty if unknown.
    """

    fields: Fields
    tokenizer_fingerprint: str
    counts: ListCounts
    token_bytes: int
    tag: str
    hash: str
    files: Mapping[str, tuple[int, int]]
    truncation: Mapping[str, Truncation]


def write_records(
    directory: str | Path,
    records: Iterable[Record],
    tokenizer: Tokenizer,
    features: Features,
    *,
    file_bytes: int = FILE_BYTES,
) -> Written:
    """Tokenises examples and writes them atomically into a new directory, with a progress bar.

    Memory holds only some thousand examples, so texts with the same id are not compared. The fields of
    `features` are stored. Each file has about `file_bytes` bytes.
    """
    require("grain", "grain", "array_record")
    with atomic_directory(directory) as temporary:
        reader, counts = RecordReader(tokenizer, features), ListCounts(0, 0, 0, 0, 0)
        fields, tag, digest = fields_of(features), secrets.token_bytes(8), hashlib.blake2b(digest_size=32)
        token_bytes = 2 if tokenizer.vocab_size <= 1 << 16 else 4
        remaining = iter(progress(records, what="tokenising pairs", unit="pairs"))
        with _Files(temporary, file_bytes) as files:
            while block := list(islice(remaining, _AT_ONCE)):
                arrays = reader.arrays(block)
                for content in _contents(arrays, fields, counts.examples, token_bytes):
                    digest.update(content)
                    files.write(tag + content)
                empty = int(np.sum(np.diff(arrays.offsets) == 0))
                block_counts = (len(block), int(arrays.offsets[-1]), empty, *arrays[-2:])
                counts = ListCounts(*map(sum, zip(counts, block_counts, strict=True)))
        if not counts.examples:
            raise UserError("there are no training examples: the data have no records")
        reader.warn_of_equal_tokens()
        written = Written(
            fields=fields,
            tokenizer_fingerprint=tokenizer.fingerprint,
            counts=counts,
            token_bytes=token_bytes,
            tag=tag.hex(),
            hash=digest.hexdigest(),
            files={name: (count, (temporary / name).stat().st_size) for name, count in files.counts.items()},
            truncation=reader.truncation(),
        )
        content = {"format": FORMAT} | written._asdict()
        content["fields"] = {name: dataclasses.asdict(field) for name, field in fields.items()}
        content["counts"], content["truncation"] = counts._asdict(), as_json(written.truncation)
        (temporary / META).write_text(json.dumps(content, indent=2) + "\n")
    return written


class _Files:
    """Consecutive files of records; `counts` has the number of records by file name."""

    def __init__(self, directory: Path, file_bytes: int):
        self.counts: dict[str, int] = {}
        self._directory, self._most, self._bytes, self._writer = directory, file_bytes, 0, None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def write(self, record: bytes) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        if self._writer is None or self._bytes >= self._most:
            self.__exit__()
            self._name, self._bytes = f"examples-{len(self.counts):05}.array_record", 0
            self.counts[self._name] = 0
            self._writer = ArrayRecordWriter(str(self._directory / self._name), WRITER_OPTIONS)
        self._writer.write(record)
        self._bytes += len(record)
        self.counts[self._name] += 1


def _contents(arrays: RecordArrays, fields: Fields, first: int, token_bytes: int) -> Iterator[bytes]:
    """Yields the records, without the tag, of examples that are numbered from `first` on."""
    tokens = _token_type(token_bytes)
    layout, offsets = Layout(fields), arrays.offsets
    for example in range(len(offsets) - 1):
        items = slice(offsets[example], offsets[example + 1])
        count = int(items.stop - items.start)
        words = np.zeros(layout.words(count), "<i4")
        words[2:4] = np.array([first + example], "<i8").view("<i4")
        words[4] = count
        end, texts = len(words) * 4 // token_bytes, []
        for name, field in fields.items():
            chosen = arrays.columns[name][items if field.count is not None else slice(example, example + 1)]
            place = layout.begin(name, count)
            if isinstance(field, Numbers):
                words[place : place + len(chosen)] = chosen.astype("<f4").view("<i4")
                continue
            table = arrays.tables[field.table]
            for row in chosen.tolist():
                text = table.flat[table.offsets[row] : table.offsets[row + 1]]
                words[place : place + _TEXT] = (*table.keys[row], end, len(text))
                texts.append(text)
                place, end = place + _TEXT, end + len(text)
        ids = b"".join(text.astype(tokens).tobytes() for text in texts)
        yield words[2:].tobytes() + ids + bytes(-len(ids) % 4)


def _token_type(token_bytes: int) -> np.dtype:
    return np.dtype("<u2" if token_bytes == 2 else "<i4")


class Layout:
    """The positions of an example's fields in the words of its record."""

    def __init__(self, fields: Fields):
        self._single: dict[str, int] = {}
        self._lists: dict[str, int] = {}
        self._fixed, self._of_item = _HEAD, 0
        for name, field in fields.items():
            width = _TEXT if isinstance(field, Tokens) else 1
            if field.count is None:
                self._single[name], self._fixed = self._fixed, self._fixed + width
            else:
                self._lists[name], self._of_item = self._of_item, self._of_item + width

    def words(self, count: Any) -> Any:
        """Returns the number of words before the tokens, if lists have `count` items (an int or [b])."""
        return self._fixed + count * self._of_item

    def begin(self, name: str, count: Any) -> Any:
        """Returns the index of a field's first word, if lists have `count` items (an int or [b])."""
        if name in self._single:
            return self._single[name] + 0 * count
        return self._fixed + count * self._lists[name]


class Block:
    """The records of b examples, decoded together; implements `dataset.Block`."""

    def __init__(self, records: Sequence[bytes], written: Written):
        """Decodes the records; raises ValueError if one belongs to another directory."""
        self._fields, self._layout = written.fields, Layout(written.fields)
        self._per_word = 4 // written.token_bytes
        sizes = np.array([len(record) for record in records], np.int64)
        content = b"".join(records)
        self._words = np.frombuffer(content, "<i4")
        self._tokens = np.frombuffer(content, _token_type(written.token_bytes))
        self._at = (np.cumsum(sizes) - sizes) // 4
        self._head = self._words[self._at[:, None] + np.arange(_HEAD)]
        self.counts = self._head[:, 4].astype(np.int64)
        if (self._head[:, :2] != np.frombuffer(bytes.fromhex(written.tag), "<i4")).any():
            raise ValueError("it contains a record file of another directory")

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of the examples: int64 [b]."""
        return np.ascontiguousarray(self._head[:, 2:4]).view("<i8")[:, 0]

    def values(self, name: str, items: np.ndarray | None) -> np.ndarray:
        return self._words[self._places(name, items, 1)].view("<f4").astype(np.float32)

    def keys(self, name: str, items: np.ndarray | None) -> np.ndarray:
        return self._texts(name, items)[..., :2].astype(np.int32)

    def ids(self, name: str, items: np.ndarray | None, length: int) -> np.ndarray:
        texts = self._texts(name, items)
        columns = np.arange(length)
        real = columns < texts[..., 3:]
        places = np.where(real, self._begin(texts, items)[..., None] + columns, 0)
        return np.where(real, with_padding_tokens(self._tokens[places]), 0)

    def table(self, name: str, wanted: np.ndarray) -> TextTable:
        """Returns the texts of a single field for the examples where `wanted` (bool [b]) is true."""
        texts = self._texts(name, None)
        begin, sizes = self._begin(texts, None)[wanted], texts[wanted, 3].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        places = np.repeat(begin - offsets[:-1], sizes) + np.arange(offsets[-1])
        return TextTable(self._tokens[places], offsets, texts[wanted, :2].astype(np.int32))

    def _begin(self, texts: np.ndarray, items: np.ndarray | None) -> np.ndarray:
        at = self._at * self._per_word
        return (at if items is None else at[:, None]) + texts[..., 2]

    def _texts(self, name: str, items: np.ndarray | None) -> np.ndarray:
        return self._words[self._places(name, items, _TEXT)[..., None] + np.arange(_TEXT)]

    def _places(self, name: str, items: np.ndarray | None, width: int) -> np.ndarray:
        begin = self._at + self._layout.begin(name, self.counts)
        return begin if items is None else begin[:, None] + width * items


def read_description(directory: Path) -> Written:
    """Reads `records.json` and checks that all files have their recorded sizes."""
    try:
        content = json.loads((directory / META).read_text())
    except FileNotFoundError:
        raise UserError(
            f"{directory} has no {META}: give a directory that jaxir.prepare records wrote"
        ) from None
    except ValueError as error:
        raise UserError(f"{directory} is damaged: {META}: {error}; {MEND}") from error
    if content.pop("format") != FORMAT:
        raise UserError(f"{directory} has a format that this version of jaxir cannot read; {REMAKE}")
    content["fields"] = {
        name: Tokens(**field) if "length" in field else Numbers(**field)
        for name, field in content["fields"].items()
    }
    content["counts"] = ListCounts(**content["counts"])
    content["truncation"] = from_json(content.get("truncation"))
    written = Written(**content)
    for name, (_, size) in written.files.items():
        if not (directory / name).is_file() or (directory / name).stat().st_size != size:
            raise UserError(f"{directory} is damaged: {name} is missing or not {size:,} bytes long; {MEND}")
    return written

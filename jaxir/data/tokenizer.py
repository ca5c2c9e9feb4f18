"""Text -> token ids: Hugging Face tokenizers and T5-style SentencePiece behind one small class."""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxir.data.truncation import Truncation
from jaxir.errors import UserError
from jaxir.features import PADDING_TOKEN
from jaxir.files import path_of
from jaxir.reading import open_to_read
from jaxir.simple_types import fits

_JSON = "tokenizer.json"
# What makes a tokenizer directory: these are copied by `save`, so that an export is what was loaded.
_SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tokenizer.model",
)
FILES = (_JSON, *_SIDE_FILES)  # all that `Tokenizer.load` reads, but for SentencePiece models (*.model)
_CONVERTIBLE = (
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spm.model",
    "tokenizer.model",
    "spiece.model",
)
_DEBERTA = "spm.model"  # which no other architecture names so
_MASK_NAMES = ("[MASK]", "<mask>")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>")
# One call into a tokenizer library holds all its intermediate results: keep that to some tens of megabytes.
_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1024, 1_000_000
# A cut before "space, letter" after an ordinary character: see `_cut`.
_WORD_START = re.compile(r"(?<=[A-Za-z0-9.,;:!?)\"])(?= [A-Za-z])")
_LOCAL_NORMALIZERS = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "StripAccents",
    "Precompiled",
    "Strip",
}
# DeBERTa's: at no cut are there such spaces.
_SPACES = ({"Regex": r"\s{2,}|[\n\r\t]"}, {"Regex": " {2,}"})
_WORD_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace"}
_OTHER_PRE_TOKENIZERS = {"Punctuation", "Digits"}


class Tokenizer:
    """Turns texts into int32 token ids in which 0 is padding and nothing else.

    Special tokens ([CLS] and [SEP], <s> and </s>, EOS) are added and survive truncation. Truncation and
    padding settings stored in a tokenizer.json are ignored: lengths belong to the caller. One whose own
    padding id is not 0 (RoBERTa: 1) has the two ids exchanged in everything it returns; `pad_swap` says so.
    Where a text spells out the padding token ("[PAD]"), or a template adds it (a padding token that is also
    the end of a text), its id is `features.PADDING_TOKEN`.

    Use `Tokenizer.load`. Safe to share between threads.

    Attributes:
      vocab_size: number of ids, added tokens included.
      mask_id: the id of its mask token, None where it has none.
      model_file: the name of the SentencePiece model that is read; None where tokenizer.json is.
      pad_swap: the tokenizer's own padding id where it was exchanged with id 0, else None.
      fingerprint: SHA-256 (hex) of what determines the ids.
    """

    def __init__(self, backend: _Backend, files: dict[str, bytes]):
        self._backend = backend
        self._files = files
        self.vocab_size, self.model_file = backend.vocab_size, backend.model_file
        self.pad_swap = backend.pad_id or None
        swap = {self.pad_swap: 0, 0: self.pad_swap} if self.pad_swap is not None else {}
        self.mask_id = swap.get(backend.mask_id, backend.mask_id)
        content = backend.content + b"\0" + str(backend.pad_id).encode()
        self.fingerprint = hashlib.sha256(content).hexdigest()

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Reads a Hugging Face tokenizer directory, or one with a T5-style SentencePiece model.

        tokenizer.json is read as it is; without one, vocab.txt, vocab.json, DeBERTa's spm.model and the like
        are converted by transformers; another lone SentencePiece model is read by sentencepiece and EOS is
        appended to each text.

        Raises:
          UserError: no such directory, no tokenizer in it, or a damaged file.
        """
        directory = path_of(directory)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: no tokenizer to load")
        names = [*FILES, *sorted(p.name for p in directory.glob("*.model"))]
        files = {}
        for name in names:
            if (directory / name).is_file():
                with open_to_read(directory / name) as file:
                    files[name] = file.read()
        config = _read_json(directory, files, "tokenizer_config.json")
        if _JSON in files:
            return cls(_read_tokenizer_json(directory, files, config), files)
        models = [name for name in files if name.endswith(".model")]
        default = "DebertaV2Tokenizer" if _DEBERTA in files else "T5Tokenizer"
        is_t5 = str(config.get("tokenizer_class", default)).startswith("T5Tokenizer")
        plain = [name for name in _CONVERTIBLE if name in files and not name.endswith(".model")]
        if models and not plain and is_t5:
            return cls(_SentencePieceBackend(files[models[0]], directory / models[0]), files)
        if plain or models:
            for name in plain:
                if b"\0" in files[name]:
                    raise UserError(f"{directory / name} is damaged: there are zero bytes in it")
            if _DEBERTA in files:  # of what is none transformers says that tiktoken is missing
                _sentencepiece(files[_DEBERTA], directory / _DEBERTA)
            files[_JSON] = _convert(directory)
            return cls(_read_tokenizer_json(directory, files, config), files)
        raise UserError(f"{directory} holds no tokenizer: none of {_JSON}, vocab.txt, vocab.json or *.model")

    @functools.cached_property
    def vocabulary(self) -> str:
        """SHA-256 (hex) of which token has which id: two models with the same one read the same arrays."""
        tokens = json.dumps([self._backend.pad_id, *self._backend.tokens()])
        return hashlib.sha256(tokens.encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size:,} ids)"

    def encode_batch(
        self, texts: Sequence[str], *, max_length: int, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        """Returns the ids of each text: int32 [n] with special tokens, n <= `max_length`, not padded.

        An empty text gives the special tokens alone. Work is spread over the cores by the tokenizer library's
        own threads (the environment variable TOKENIZERS_PARALLELISM=false turns that off).

        Args:
          texts: the texts.
          max_length: most tokens of a text.
          truncation: adds the counts of texts, and of texts that were cut, to this.

        Raises:
          UserError: `max_length` leaves no room for text, or a text is not a valid Unicode string.
        """
        if max_length <= self._backend.num_special:
            raise UserError(
                f"max_length is {max_length}, but this tokenizer adds {self._backend.num_special} special"
                " tokens to each text: give a larger one"
            )
        bad = next((text for text in texts if not isinstance(text, str)), "")
        if bad != "":
            raise UserError(f"texts must be strings, got {type(bad).__name__}: {bad!r:.80}")
        ids: list[np.ndarray] = [np.empty(0, np.int32)] * len(texts)
        longer = np.zeros(len(texts), bool)
        short, enough = list(range(len(texts))), 8 * max_length + 128
        while short:
            heads = [self._cut(texts[i], enough) for i in short]
            was_cut = [len(head) < len(texts[i]) for i, head in zip(short, heads, strict=True)]
            for i, (row, is_longer), cut in zip(short, self._encode(heads, max_length), was_cut, strict=True):
                ids[i], longer[i] = row, is_longer or cut
            short = [i for i, cut in zip(short, was_cut, strict=True) if cut and len(ids[i]) < max_length]
            enough *= 4
        if truncation is not None:
            truncation.add(len(texts), int(longer.sum()))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without special tokens and padding."""
        own = {0: self._backend.pad_id, PADDING_TOKEN: self._backend.pad_id, self.pad_swap: 0}
        return self._backend.decode([own.get(int(i), int(i)) for i in ids])

    def own_ids(self, ids: Sequence[int]) -> np.ndarray:
        """Returns the ids of a text as they are numbered here, int32 [n], from those of its file."""
        row = np.array(ids, np.int32)
        padding_token = row == self._backend.pad_id
        if self.pad_swap is not None:
            row[row == 0] = self.pad_swap
        row[padding_token] = PADDING_TOKEN
        return row

    def cut_at(self, text: str, *, max_length: int) -> int | None:
        """Returns where `encode_batch` cuts a text: how many characters stand before the part without an id.

        None means that nothing is cut.
        """
        head = self._cut(text, 8 * max_length + 128)
        cut = self._backend.cut_at(head, max_length)
        return cut if cut is not None or head == text else self._backend.cut_at(text, max_length)

    def knows(self, token: str) -> bool:
        """Whether one of its ids is that of `token`, as it stands here."""
        return self._backend.knows(token)

    def save(self, directory: str | Path) -> None:
        """Writes the files it was loaded from (and the converted tokenizer.json, if any) into `directory`."""
        directory = path_of(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (directory / name).write_bytes(content)

    def _cut(self, text: str, enough: int) -> str:
        """Returns a prefix of `text` of about `enough` characters, or `text` where there is no safe one.

        Nothing after a cut may change the tokens before it. That holds where each word is tokenised by itself
        and the normaliser looks at no context beyond a character: a prefix then gives a prefix of the tokens.
        The caller tries a longer one where it turns out to have too few.
        """
        if len(text) <= 2 * enough or not self._backend.words_are_independent:
            return text
        found = _WORD_START.search(text, enough)
        return text[: found.start()] if found else text

    def _encode(self, texts: Sequence[str], max_length: int) -> Iterator[tuple[np.ndarray, bool]]:
        """Yields the ids of each text, and whether it has more."""
        rows: list[np.ndarray] = []
        longer: list[bool] = []
        for block in _blocks(texts):
            try:
                for ids, is_longer in self._backend.encode(block, max_length):
                    rows.append(self.own_ids(ids))
                    longer.append(is_longer)
            except (TypeError, UnicodeEncodeError) as error:
                bad = next((t for t in block if not _is_unicode(t)), None)
                raise UserError(f"a text is not a valid Unicode string: {bad!r:.80}") from error
        return zip(rows, longer, strict=True)


def pad_batch(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Returns int32 [N, `length`]: each row, then zeros.

    Raises:
      ValueError: a row is longer than `length`.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if len(rows) and lengths.max() > length:
        raise ValueError(f"a row of {lengths.max()} ids does not fit in {length}")
    out = np.zeros((len(rows), length), np.int32)
    if len(rows):
        out[np.arange(length)[None, :] < lengths[:, None]] = np.concatenate(rows)
    return out


class _Backend:
    """What the two libraries have in common."""

    content: bytes
    pad_id: int
    vocab_size: int
    mask_id: int | None = None
    model_file: str | None = None
    num_special: int
    words_are_independent: bool
    # (texts, length) -> of each text the ids that are kept, and whether it has more
    encode: Callable[[list[str], int], list[tuple[list[int], bool]]]
    decode: Callable[[list[int]], str]
    cut_at: Callable[[str, int], int | None]
    tokens: Callable[[], list[str | None]]
    knows: Callable[[str], bool]


class _HuggingFaceBackend(_Backend):
    def __init__(self, tokenizer: tokenizers.Tokenizer, content: bytes, pad_id: int, mask_id: int | None):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.content = content
        self.pad_id, self.mask_id = pad_id, mask_id
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.num_special = tokenizer.num_special_tokens_to_add(False)
        self.words_are_independent = _words_are_independent(json.loads(tokenizer.to_str()))

    def encode(self, texts: list[str], max_length: int) -> list[tuple[list[int], bool]]:
        with self._lock:  # the length is a state of the tokenizer
            self._tokenizer.enable_truncation(max_length)
            found = ((e.ids, e) for e in self._tokenizer.encode_batch_fast(texts))
            # `overflowing` copies what was cut off: look only where there can be something.
            return [(ids, len(ids) == max_length and bool(e.overflowing)) for ids, e in found]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def cut_at(self, text: str, max_length: int) -> int | None:
        with self._lock:
            self._tokenizer.enable_truncation(max_length)
            found = self._tokenizer.encode(text)
        kept = zip(found.offsets, found.special_tokens_mask, strict=True)
        return (
            max((end for (_, end), special in kept if not special), default=0) if found.overflowing else None
        )

    def tokens(self) -> list[str | None]:
        return [self._tokenizer.id_to_token(i) for i in range(self.vocab_size)]

    def knows(self, token: str) -> bool:
        return self._tokenizer.token_to_id(token) is not None


class _SentencePieceBackend(_Backend):
    """T5's convention: pad 0, EOS at the end, no other special token."""

    num_special = 1

    def __init__(self, content: bytes, path: Path):
        self._processor = processor = _sentencepiece(content, path)
        self._eos = processor.eos_id()
        if processor.pad_id() != 0 or self._eos < 0:
            raise UserError(
                f"{path}: padding id {processor.pad_id()} and EOS id {self._eos}, where T5's convention has"
                " padding 0 and an EOS; give a directory with a tokenizer.json"
            )
        self.content, self.pad_id, self.model_file = content, 0, path.name
        self.vocab_size = processor.get_piece_size()
        pieces = (processor.id_to_piece(i) for i in range(self.vocab_size))
        self.words_are_independent = not any("\u2581" in piece.lstrip("\u2581") for piece in pieces)

    def encode(self, texts: list[str], max_length: int) -> list[tuple[list[int], bool]]:
        rows = self._processor.encode(texts, num_threads=os.cpu_count() or 1)
        return [([*row[: max_length - 1], self._eos], len(row) >= max_length) for row in rows]

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode([i for i in ids if i not in (0, self._eos)])

    def cut_at(self, text: str, max_length: int) -> int | None:
        row = self._processor.encode(text)
        if len(row) < max_length:
            return None
        # Releases of sentencepiece differ in how they return offsets, so find the shortest text of these ids.
        kept = row[: max_length - 1]
        return bisect.bisect_left(
            range(len(text)), True, key=lambda n: self._processor.encode(text[:n])[: len(kept)] == kept
        )

    def tokens(self) -> list[str | None]:
        return [self._processor.id_to_piece(i) for i in range(self.vocab_size)]

    def knows(self, token: str) -> bool:
        return self._processor.id_to_piece(self._processor.piece_to_id(token)) == token


def _sentencepiece(content: bytes, path: Path) -> Any:
    """Returns the `SentencePieceProcessor` of a file."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise UserError(f"{path} is not a SentencePiece model") from error
    return processor


def _read_tokenizer_json(
    directory: Path, files: dict[str, bytes], config: dict[str, Any]
) -> _HuggingFaceBackend:
    spec = _read_json(directory, files, _JSON)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(files[_JSON])
    except Exception as error:  # the library raises bare Exception and ValueError
        raise UserError(f"{directory / _JSON} is not a tokenizer: {error}") from error
    special = _read_json(directory, files, "special_tokens_map.json")

    def id_of(token: str, *more: Any) -> int | None:
        named = [config.get(token), special.get(token), *more]
        names = [n.get("content") if isinstance(n, dict) else n for n in named if n]
        if not fits(names, list[str]):
            raise UserError(f"{directory}: the tokenizer's {token} is no text")
        return next((i for i in map(tokenizer.token_to_id, names) if i is not None), None)

    pad_id = id_of("pad_token", (spec.get("padding") or {}).get("pad_token"), *_PAD_NAMES)
    if pad_id is None:
        raise UserError(
            f"{directory}: the tokenizer has no padding token; set pad_token in tokenizer_config.json"
        )
    return _HuggingFaceBackend(tokenizer, files[_JSON], pad_id, id_of("mask_token", *_MASK_NAMES))


def _convert(directory: Path) -> bytes:
    """Returns the tokenizer.json that transformers makes of an older tokenizer directory."""
    # Else it says that there is no PyTorch, which nothing here wants.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # DeBERTa's published folders name no class, and a directory of a tokenizer alone has no config.json.
    deberta = (directory / _DEBERTA).is_file()
    kind = transformers.DebertaV2Tokenizer if deberta else transformers.AutoTokenizer
    try:
        fast = kind.from_pretrained(str(directory), local_files_only=True)
        return fast.backend_tokenizer.to_str().encode()
    except Exception as error:  # whatever transformers raises on a damaged or unknown directory
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{directory}: transformers cannot read this tokenizer: {reason}") from error


def _read_json(directory: Path, files: dict[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{directory / name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{directory / name} does not hold a JSON object")
    return content


def _words_are_independent(spec: dict[str, Any]) -> bool:
    """Whether a tokenizer.json splits at every space before it applies its model (see `Tokenizer._cut`)."""

    def parts(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
        if component is None:
            return []
        return component[key] if component["type"] == "Sequence" else [component]

    def splits(part: dict[str, Any]) -> bool:
        return part["type"] in _WORD_SPLITTERS and part.get("use_regex", True) and part.get("split", True)

    normalizers = parts(spec["normalizer"], "normalizers")
    pre_tokenizers = parts(spec["pre_tokenizer"], "pretokenizers")
    return (
        all(n["type"] in _LOCAL_NORMALIZERS or n.get("pattern") in _SPACES for n in normalizers)
        and all(p["type"] in _WORD_SPLITTERS | _OTHER_PRE_TOKENIZERS for p in pre_tokenizers)
        and any(map(splits, pre_tokenizers))
        and not any(" " in token["content"] for token in spec["added_tokens"])
    )


def _blocks(texts: Sequence[str]) -> list[list[str]]:
    blocks: list[list[str]] = []
    characters = 0
    for text in texts:
        if not blocks or len(blocks[-1]) >= _BLOCK_TEXTS or characters + len(text) > _BLOCK_CHARACTERS:
            blocks.append([])
            characters = 0
        blocks[-1].append(text)
        characters += len(text)
    return blocks


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

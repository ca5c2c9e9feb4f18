"""Converts texts to token ids, with Hugging Face tokenizers or T5-style SentencePiece models."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.data.text.tokenizer_backends import (
    DEBERTA,
    JSON,
    Backend,
    SentencePieceBackend,
    convert,
    read_json,
    read_tokenizer_json,
    sentencepiece_processor,
)
from jaxir.data.text.truncation import Truncation
from jaxir.storage.files import path_of
from jaxir.storage.open_files import open_to_read

# Files of a tokenizer directory in addition to tokenizer.json; `save` copies them.
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
FILES = (JSON, *_SIDE_FILES)  # read by `Tokenizer.load`, which also reads SentencePiece models (*.model)
# Maximum texts and characters per call into a tokenizer library, so that its results take tens of MB.
_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1024, 1_000_000
# A text can be cut before a space and a letter that follow a letter, digit or mark (`Tokenizer._cut`).
_WORD_START = re.compile(r"(?<=[A-Za-z0-9.,;:!?)\"])(?= [A-Za-z])")


class Tokenizer:
    """Turns texts into int32 token ids in which 0 is padding and nothing else. Use `Tokenizer.load`.

    Special tokens ([CLS] and [SEP], <s> and </s>, EOS) are added and survive truncation. Truncation and
    padding settings stored in a tokenizer.json are ignored. If the tokenizer's own padding id is not 0
    (RoBERTa: 1), both ids are exchanged everywhere (`pad_swap`). A padding token inside a text ("[PAD]", or a
    padding token that also ends texts) has the id `features.PADDING_TOKEN`. Safe to share between threads.

    Attributes:
      vocab_size: the largest id plus 1, added tokens included.
      mask_id: the id of the mask token, or None.
      model_file: file name of the SentencePiece model in use; None if tokenizer.json is used.
      pad_swap: the tokenizer's own padding id if it was exchanged with id 0, else None.
      fingerprint: SHA-256 (hex) of what determines the ids.
    """

    def __init__(self, backend: Backend, files: dict[str, bytes]):
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

        Without a tokenizer.json, transformers converts vocab.txt, vocab.json, DeBERTa's spm.model and the
        like. Any other SentencePiece model is read by sentencepiece, and EOS is appended to each text.

        Raises:
          UserError: the directory does not exist, holds no tokenizer, or has a damaged file.
        """
        directory = path_of(directory)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: give one with tokenizer.json or a *.model file")
        names = [*FILES, *sorted(p.name for p in directory.glob("*.model"))]
        files = {}
        for name in names:
            if (directory / name).is_file():
                with open_to_read(directory / name) as file:
                    files[name] = file.read()
        config = read_json(directory, files, "tokenizer_config.json")
        if JSON in files:
            return cls(read_tokenizer_json(directory, files, config), files)
        models = [name for name in files if name.endswith(".model")]
        default = "DebertaV2Tokenizer" if DEBERTA in files else "T5Tokenizer"
        is_t5 = str(config.get("tokenizer_class", default)).startswith("T5Tokenizer")
        plain = [name for name in ("vocab.txt", "vocab.json") if name in files]
        if models and not plain and is_t5:
            return cls(SentencePieceBackend(files[models[0]], directory / models[0]), files)
        if plain or models:
            for name in plain:
                if b"\0" in files[name]:
                    raise UserError(f"{directory / name} is damaged: it contains NUL bytes; copy it again")
            # Check it first: for a damaged file, transformers only reports that tiktoken is missing.
            if DEBERTA in files:
                sentencepiece_processor(files[DEBERTA], directory / DEBERTA)
            files[JSON] = convert(directory)
            return cls(read_tokenizer_json(directory, files, config), files)
        raise UserError(f"{directory} holds no tokenizer: it needs {JSON}, vocab.txt, vocab.json or *.model")

    @functools.cached_property
    def vocabulary(self) -> str:
        """SHA-256 (hex) of the map from tokens to ids: models with equal hashes can read the same ids."""
        tokens = json.dumps([self._backend.pad_id, *self._backend.tokens()])
        return hashlib.sha256(tokens.encode()).hexdigest()

    @functools.cached_property
    def effect(self) -> str:
        """SHA-256 (hex) of all that affects tokenising; unlike `fingerprint` it omits ignored settings."""
        content = self._backend.content
        if self.model_file is None:
            without = json.loads(content) | {"padding": None, "truncation": None}
            content = json.dumps(without, sort_keys=True).encode()
        return hashlib.sha256(content + b"\0" + str(self._backend.pad_id).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size:,} ids)"

    def encode_batch(
        self, texts: Sequence[str], *, max_length: int, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        """Returns the ids of each text: int32 [n] with special tokens, n <= `max_length`, not padded.

        The tokenizer library uses all cores, unless the environment has TOKENIZERS_PARALLELISM=false.

        Args:
          texts: the texts.
          max_length: maximum number of tokens per text.
          truncation: a counter, to which the numbers of texts and of truncated texts are added.

        Raises:
          UserError: `max_length` leaves no room for text, or a text is not a valid Unicode string.
        """
        if max_length <= self._backend.num_special:
            raise UserError(
                f"max_length is {max_length}, but this tokenizer adds {self._backend.num_special} special"
                " tokens to each text: give a larger max_length"
            )
        bad = next((text for text in texts if not isinstance(text, str)), "")
        if bad != "":
            raise UserError(f"texts must be strings, got {type(bad).__name__}: {bad!r:.80}")
        ids: list[np.ndarray] = [np.empty(0, np.int32)] * len(texts)
        longer = np.zeros(len(texts), bool)
        pending, enough = list(range(len(texts))), 8 * max_length + 128
        while pending:
            heads = [self._cut(texts[i], enough) for i in pending]
            was_cut = [len(head) < len(texts[i]) for i, head in zip(pending, heads, strict=True)]
            rows = self._encode(heads, max_length)
            for i, (row, is_longer), cut in zip(pending, rows, was_cut, strict=True):
                ids[i], longer[i] = row, is_longer or cut
            pending = [i for i, cut in zip(pending, was_cut, strict=True) if cut and len(ids[i]) < max_length]
            enough *= 4
        if truncation is not None:
            truncation.add(len(texts), int(longer.sum()))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        own = {0: self._backend.pad_id, PADDING_TOKEN: self._backend.pad_id, self.pad_swap: 0}
        return self._backend.decode([own.get(int(i), int(i)) for i in ids])

    def own_ids(self, ids: Sequence[int]) -> np.ndarray:
        """Converts the ids of the tokenizer's file to the ids used here: int32 [n]."""
        row = np.array(ids, np.int32)
        padding_token = row == self._backend.pad_id
        if self.pad_swap is not None:
            row[row == 0] = self.pad_swap
        row[padding_token] = PADDING_TOKEN
        return row

    def own_tokens(self) -> list[str | None]:
        """Returns the tokens by the ids of the tokenizer's file; None for an id without a token."""
        return self._backend.tokens()

    def cut_at(self, text: str, *, max_length: int) -> int | None:
        """Returns how many characters `encode_batch` keeps of a text; None if all."""
        head = self._cut(text, 8 * max_length + 128)
        cut = self._backend.cut_at(head, max_length)
        return cut if cut is not None or head == text else self._backend.cut_at(text, max_length)

    def prompt_length(self, prompt: str) -> int:
        """Returns how many tokens at the start of a text its prompt takes, with special tokens before it."""
        if not prompt:
            return 0
        alone, empty = (self.encode_batch([text], max_length=10_000)[0] for text in (prompt, ""))
        # An empty text has only special tokens. If the last of them also ends the prompt, it follows every
        # text, so it is not part of the prompt.
        return len(alone) - int(len(empty) > 0 and len(alone) > 0 and empty[-1] == alone[-1])

    def knows(self, token: str) -> bool:
        """Returns whether `token` is in the vocabulary."""
        return self._backend.id_of(token) is not None

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, as `encode_batch` gives it; None if it is not in the vocabulary."""
        found = self._backend.id_of(token)
        return None if found is None else int(self.own_ids([found])[0])

    def save(self, directory: str | Path) -> None:
        """Writes the loaded files (and a converted tokenizer.json, if any) into `directory`."""
        directory = path_of(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (directory / name).write_bytes(content)

    def _cut(self, text: str, enough: int) -> str:
        """Returns a prefix of `text` of about `enough` characters, or `text` if no cut is safe.

        Tokens before the cut must not depend on what follows. That holds if each word is tokenised by itself
        and the normaliser reads single characters. The caller retries with a longer prefix if the tokens are
        too few.
        """
        if len(text) <= 2 * enough or not self._backend.words_are_independent:
            return text
        found = _WORD_START.search(text, enough)
        return text[: found.start()] if found else text

    def _encode(self, texts: Sequence[str], max_length: int) -> Iterator[tuple[np.ndarray, bool]]:
        for block in _blocks(texts):
            try:
                encoded = self._backend.encode(block, max_length)
            except (TypeError, UnicodeEncodeError) as error:
                raise UserError(f"a text is not valid Unicode ({error}): correct it") from error
            for ids, is_longer in encoded:
                yield self.own_ids(ids), is_longer


def pad_batch(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Returns int32 [N, `length`]: each row, padded with zeros."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if len(rows) and lengths.max() > length:
        raise ValueError(f"a row has {lengths.max()} ids, more than the padded length of {length}")
    out = np.zeros((len(rows), length), np.int32)
    if len(rows):
        out[np.arange(length)[None, :] < lengths[:, None]] = np.concatenate(rows)
    return out


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

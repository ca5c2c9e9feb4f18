"""The libraries behind `Tokenizer`: tokenizers, and SentencePiece in T5's convention."""

from __future__ import annotations

import bisect
import json
import os
import threading
from pathlib import Path
from typing import Any

import tokenizers

from jaxir.core.errors import UserError
from jaxir.core.values import fits

JSON = "tokenizer.json"
DEBERTA = "spm.model"  # only DeBERTa's SentencePiece model has this name
_MASK_NAMES = ("[MASK]", "<mask>")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>")
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
# DeBERTa's normalizers merge repeated spaces. They are accepted, because no text is cut at such spaces.
_SPACES = ({"Regex": r"\s{2,}|[\n\r\t]"}, {"Regex": " {2,}"})
_WORD_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace"}
_OTHER_PRE_TOKENIZERS = {"Punctuation", "Digits"}


class HuggingFaceBackend:
    model_file = None

    def __init__(self, tokenizer: tokenizers.Tokenizer, content: bytes, pad_id: int, mask_id: int | None):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.content = content
        self.pad_id, self.mask_id = pad_id, mask_id
        # Ids may have gaps, so the largest id may exceed the number of tokens.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.num_special = tokenizer.num_special_tokens_to_add(False)
        self.words_are_independent = _words_are_independent(json.loads(tokenizer.to_str()))

    def encode(self, texts: list[str], max_length: int) -> list[tuple[list[int], bool]]:
        """Returns the ids of each text, at most `max_length`, and whether the text was truncated."""
        with self._lock:  # `enable_truncation` changes the tokenizer, which threads share
            self._tokenizer.enable_truncation(max_length)
            found = ((e.ids, e) for e in self._tokenizer.encode_batch_fast(texts))
            # Reading `overflowing` copies the tokens that were cut off, so it is only read for full rows.
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

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


class SentencePieceBackend:
    """SentencePiece with T5's special tokens: padding id 0, EOS at the end, no others."""

    num_special = 1
    mask_id = None

    def __init__(self, content: bytes, path: Path):
        self._processor = processor = sentencepiece_processor(content, path)
        self._eos = processor.eos_id()
        if processor.pad_id() != 0 or self._eos < 0:
            raise UserError(
                f"{path} has padding id {processor.pad_id()} and EOS id {self._eos}, but T5's convention"
                " requires padding id 0 and an EOS; give a directory with a tokenizer.json"
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
        # Find the shortest prefix with these ids, because releases of sentencepiece differ in offsets.
        kept = row[: max_length - 1]
        return bisect.bisect_left(
            range(len(text)), True, key=lambda n: self._processor.encode(text[:n])[: len(kept)] == kept
        )

    def tokens(self) -> list[str | None]:
        return [self._processor.id_to_piece(i) for i in range(self.vocab_size)]

    def id_of(self, token: str) -> int | None:
        found = self._processor.piece_to_id(token)
        return found if self._processor.id_to_piece(found) == token else None


Backend = HuggingFaceBackend | SentencePieceBackend


def sentencepiece_processor(content: bytes, path: Path) -> Any:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise UserError(f"{path} is not a SentencePiece model: replace it by one") from error
    return processor


def read_tokenizer_json(
    directory: Path, files: dict[str, bytes], config: dict[str, Any]
) -> HuggingFaceBackend:
    spec = read_json(directory, files, JSON)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(files[JSON])
    except Exception as error:  # the library raises Exception itself, and ValueError
        raise UserError(f"{directory / JSON} is not a tokenizer ({error}): replace the file") from error
    special = read_json(directory, files, "special_tokens_map.json")

    def id_of(token: str, *more: Any) -> int | None:
        named = [config.get(token), special.get(token), *more]
        names = [n.get("content") if isinstance(n, dict) else n for n in named if n]
        if not fits(names, list[str]):
            raise UserError(f"{directory}: the tokenizer's {token} must be a string in tokenizer_config.json")
        return next((i for i in map(tokenizer.token_to_id, names) if i is not None), None)

    pad_id = id_of("pad_token", (spec.get("padding") or {}).get("pad_token"), *_PAD_NAMES)
    if pad_id is None:
        raise UserError(
            f"{directory}: the tokenizer has no padding token; set pad_token in tokenizer_config.json"
        )
    return HuggingFaceBackend(tokenizer, files[JSON], pad_id, id_of("mask_token", *_MASK_NAMES))


def convert(directory: Path) -> bytes:
    """Returns the tokenizer.json that transformers makes from an older tokenizer directory."""
    # Silence transformers' warning that PyTorch is missing, which is not needed here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # DeBERTa's published folders name no tokenizer class, and may have no config.json.
    deberta = (directory / DEBERTA).is_file()
    kind = transformers.DebertaV2Tokenizer if deberta else transformers.AutoTokenizer
    try:
        fast = kind.from_pretrained(str(directory), local_files_only=True)
        return fast.backend_tokenizer.to_str().encode()
    except Exception as error:  # transformers raises many types of errors for a damaged or unknown directory
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{directory}: transformers cannot read this tokenizer ({reason}): give another directory"
        ) from error


def read_json(directory: Path, files: dict[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{directory / name} is not valid JSON ({error}): correct the file, or copy it again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{directory / name} does not contain a JSON object: replace the file")
    return content


def _words_are_independent(spec: dict[str, Any]) -> bool:
    """Returns whether a tokenizer.json splits at every space before its model (see `Tokenizer._cut`)."""

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

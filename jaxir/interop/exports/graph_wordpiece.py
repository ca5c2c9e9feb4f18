"""BERT's WordPiece as TensorFlow operations that give the ids of the `tokenizers` library.

That library normalises text with its own Unicode tables (of several versions), which no TensorFlow operation
has. The export therefore records what the library does to each character, and the graph holds this table.
TensorFlow Text then splits the words into pieces.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from jaxir.core.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf

# Normalisers that change characters independently, except that some sort combining marks (`_mark_orders`).
_LOCAL = {"BertNormalizer", "Lowercase", "NFD", "NFKD", "StripAccents"}
_NUM_CHARACTERS = 0x110000
_CHARACTERS = [chr(c) for c in range(_NUM_CHARACTERS) if not 0xD800 <= c < 0xE000]
_STOP = chr(0xD800)  # a surrogate, so never in a text; marks on its two sides are sorted separately
_BLOCK = 256  # characters that are given to the library at a time
_NO_LIMIT = 1 << 20  # maximum bytes of a word, never reached, because longer words are replaced beforehand
# Each character becomes a list of items, int32: order * _ORDER + kind * _KIND + code point.
_KIND, _ORDER = 1 << 21, 1 << 23
_IN_WORD, _ALONE, _BOUNDARY, _DROPPED = range(4)


class WordPiece:
    """BERT's kind of tokenizer.json as TensorFlow operations; a SavedModel must hold its `state`."""

    def __init__(self, spec: dict[str, Any]):
        import tensorflow as tf

        check(spec)
        model = spec["model"]
        self._added = {t["content"]: t["id"] for t in spec["added_tokens"]}
        splits, items = character_table(*(json.dumps(spec[name]) for name in ("normalizer", "pre_tokenizer")))
        pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
        self._max_characters = model["max_input_chars_per_word"]
        self._unknown = next(c for c in map(chr, range(0x4E00, 0x10000)) if c not in model["vocab"])
        self.state = tf.Module()
        self.state.table_splits = tf.Variable(splits, trainable=False)
        self.state.table_items = tf.Variable(items, trainable=False)
        ids = np.array([model["vocab"][piece] for piece in pieces], np.int32)
        self.state.ids = tf.Variable(ids, trainable=False)
        buffer = _fast_wordpiece(pieces, model["continuing_subword_prefix"], model["unk_token"])
        self.state.pieces = tf.Variable(np.frombuffer(buffer, np.uint8), trainable=False)

    def __call__(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the ids, int32 [B, None], of texts, valid UTF-8 [B]."""
        import tensorflow as tf

        parts, added = self._split_added(texts)
        found = self._encode(parts.flat_values)
        if added is not None:
            found = tf.concat([found, added], axis=1)
        return parts.with_flat_values(found).merge_dims(1, 2)

    def _split_added(self, texts: tf.Tensor) -> tuple[tf.RaggedTensor, tf.RaggedTensor | None]:
        """Returns texts split at added tokens [B, None], "" for such a token, and its id [parts, 0 or 1]."""
        import tensorflow as tf

        if not self._added:
            return tf.RaggedTensor.from_tensor(texts[:, None]), None
        # If several match at one position, the longest wins.
        names = sorted(self._added, key=len, reverse=True)
        # Mark tokens by the byte 0xFF, which valid text never contains, because tensorflow_text.regex_split
        # stops at NUL.
        marked = tf.strings.regex_replace(texts, "|".join(map(re.escape, names)), b"\xff\\0\xff")
        parts = tf.strings.split(marked, b"\xff")
        flat = parts.flat_values
        matches = flat[:, None] == tf.constant(names)[None, :]
        is_added = tf.reduce_any(matches, axis=1)
        ids = tf.gather(tf.constant([self._added[n] for n in names], tf.int32), tf.argmax(matches, axis=1))
        lengths = tf.cast(is_added, tf.int64)
        added = tf.RaggedTensor.from_row_lengths(tf.boolean_mask(ids, is_added), lengths)
        return parts.with_flat_values(tf.where(is_added, "", flat)), added

    def _encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the ids [S, None] of texts [S] without added tokens."""
        import tensorflow as tf
        import tensorflow_text

        characters = tf.strings.unicode_decode(texts, "UTF-8", errors="strict")
        table = tf.RaggedTensor.from_row_splits(
            self.state.table_items, self.state.table_splits, validate=False
        )
        items = tf.gather(table, characters.flat_values).with_row_splits_dtype(tf.int64)
        items = characters.with_flat_values(items).merge_dims(1, 2)
        words, words_of_text = _words(_sorted_marks(items))
        too_long = words.row_lengths() > self._max_characters
        written = tf.strings.unicode_encode(words, "UTF-8")
        written = tf.where(too_long, self._unknown, written)
        tokenizer = tensorflow_text.FastWordpieceTokenizer(
            model_buffer=tf.identity(self.state.pieces), token_out_type=tf.int32
        )
        pieces = tokenizer.tokenize(written)
        ids = pieces.with_flat_values(tf.gather(self.state.ids, pieces.flat_values))
        return tf.RaggedTensor.from_row_lengths(ids, words_of_text, validate=False).merge_dims(1, 2)


def check(spec: dict[str, Any]) -> None:
    """Refuses a tokenizer.json that `WordPiece` cannot reproduce."""
    model, normalizer, pre_tokenizer = spec["model"], spec["normalizer"], spec["pre_tokenizer"]
    if model["type"] != "WordPiece":
        raise _refusal(f"its model is {model['type']}, not WordPiece")
    if (pre_tokenizer or {}).get("type") != "BertPreTokenizer":
        raise _refusal(f"its pre-tokenizer is {(pre_tokenizer or {}).get('type')}, not BertPreTokenizer")
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    for step in steps:
        if step["type"] not in _LOCAL:
            raise _refusal(f"its normaliser {step['type']} looks at more than one character")
    for token in spec["added_tokens"]:
        if token["normalized"] or token["single_word"]:
            raise _refusal(
                f"its added token {token['content']!r} is"
                f" {'matched after normalisation' if token['normalized'] else 'only matched as a word'}"
            )


def _refusal(reason: str) -> UserError:
    return UserError(
        f"this tokenizer cannot be written into a TensorFlow graph: {reason}; export with --signatures=ids"
        " and tokenise before the request"
    )


@functools.lru_cache(maxsize=4)
def character_table(normalizer: str, pre_tokenizer: str) -> tuple[np.ndarray, np.ndarray]:
    """Records what the `tokenizers` library makes of each of the 1,114,112 code points.

    Returns (row splits int32 [1,114,113], items int32): code point c becomes items[splits[c]:splits[c + 1]].
    """
    parts = {"normalizer": json.loads(normalizer), "pre_tokenizer": json.loads(pre_tokenizer)}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parts | {"model": model, "version": "1.0"}))
    normalize = (lambda x: x) if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str
    changed = _changed_characters(normalize)
    survivors = sorted(set(_CHARACTERS) - changed.keys() | set("".join(changed.values())))
    item = np.arange(_NUM_CHARACTERS, dtype=np.int32)
    for c, kind in _kinds(tokenizer.pre_tokenizer.pre_tokenize_str, survivors).items():
        item[ord(c)] += kind * _KIND
    orders = _mark_orders(normalize, changed, survivors)
    for c, order in orders.items():
        item[ord(c)] += order * _ORDER
    if orders:
        ends = (min(orders, key=orders.__getitem__), max(orders, key=orders.__getitem__))
        item[ord(_STOP)] = _DROPPED * _KIND
        changed |= dict.fromkeys(_stops(normalize, [c for c in changed if not changed[c]], *ends), _STOP)
    lengths = np.ones(_NUM_CHARACTERS, np.int64)
    lengths[list(map(ord, changed))] = list(map(len, changed.values()))
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    same = np.ones(_NUM_CHARACTERS, bool)
    same[list(map(ord, changed))] = False
    items = np.empty(splits[-1], np.int32)
    items[splits[:-1][same]] = item[same]
    places = np.ones(len(items), bool)
    places[splits[:-1][same]] = False
    items[places] = item[[ord(c) for text in changed.values() for c in text]]
    return splits, items


def _changed_characters(normalize: Callable[[str], str]) -> dict[str, str]:
    """Returns the normalised form of each character that changes, in order."""
    changed = {}
    for block in _blocks(_CHARACTERS):
        joined = "|".join(block)
        normalized = normalize(joined)
        if normalized == joined:
            continue
        results = normalized.split("|")
        if len(results) != len(block):  # a character of the block is the separator
            results = [normalize(c) for c in block]
        changed |= {c: result for c, result in zip(block, results, strict=True) if c != result}
    return changed


def _kinds(pre_tokenize: Callable[[str], list[tuple[str, Any]]], characters: list[str]) -> dict[str, int]:
    """Returns the kinds of the characters that are single words or separate words; all others form words."""
    kinds = {}
    for block in _blocks(characters):
        if len(pre_tokenize(f"a{''.join(block)}a")) == 1:
            continue
        for c in block:
            pieces = len(pre_tokenize(f"a{c}a"))
            if pieces > 1:
                kinds[c] = _BOUNDARY if pieces == 2 else _ALONE
    return kinds


def _mark_orders(
    normalize: Callable[[str], str], changed: dict[str, str], characters: list[str]
) -> dict[str, int]:
    """Returns the rank, from 1 on, of each combining mark in the order that the normaliser sorts them into.

    Decomposing normalisers sort consecutive marks by their canonical combining class; others need no ranks.
    """
    classes = {unicodedata.combining(c): c for c in characters if unicodedata.combining(c)}
    known = [classes[i] for i in sorted(classes)]
    if len(known) < 2 or normalize(known[-1] + known[0]) == known[-1] + known[0]:
        return {}
    orders = {}
    for block in _blocks(characters):
        pairs = [known[-1] + c for c in block] + [c + known[0] for c in block]
        if normalize("a".join(pairs)) == "a".join("".join(changed.get(c, c) for c in p) for p in pairs):
            continue
        for c in block:
            larger = sum(normalize(c + other) != changed.get(c, c) + other for other in known)
            smaller = sum(normalize(other + c) != other + changed.get(c, c) for other in known)
            if larger or smaller:
                orders[c] = 1 + larger + len(known) - smaller
    return orders


def _stops(normalize: Callable[[str], str], characters: list[str], low: str, high: str) -> Iterator[str]:
    """Yields the dropped `characters` past which the normaliser does not sort marks."""
    for block in _blocks(characters):
        if normalize("a".join(high + c + low for c in block)) != "a".join([low + high] * len(block)):
            yield from (c for c in block if normalize(high + c + low) == high + low)


def _blocks(items: list[str]) -> Iterator[list[str]]:
    return (items[start : start + _BLOCK] for start in range(0, len(items), _BLOCK))


def _sorted_marks(items: tf.RaggedTensor) -> tf.RaggedTensor:
    """Sorts consecutive combining marks, as Unicode's canonical ordering does."""
    import tensorflow as tf

    flat = items.flat_values
    order = tf.cast(flat // _ORDER, tf.int64)

    def sort() -> tf.Tensor:
        runs = tf.cumsum(tf.cast(order == 0, tf.int64)) + _rows(items)
        return tf.gather(flat, tf.argsort(runs * 1024 + order, stable=True))

    return items.with_flat_values(tf.cond(tf.reduce_any(order > 0), sort, lambda: flat))


def _rows(ragged: tf.RaggedTensor) -> tf.Tensor:
    """Returns the row of each value; `ragged.value_rowids` would allocate rows x the longest row."""
    import tensorflow as tf

    values = tf.range(tf.size(ragged.flat_values, tf.int64))
    return tf.searchsorted(ragged.row_splits[1:], values, side="right", out_type=tf.int64)


def _words(items: tf.RaggedTensor) -> tuple[tf.RaggedTensor, tf.Tensor]:
    """Returns the words, code points [W, None], of items [S, None], and the number of words of each text."""
    import tensorflow as tf

    kinds = items.flat_values % _ORDER // _KIND
    kept = kinds != _DROPPED
    flat, kinds = tf.boolean_mask(items.flat_values, kept), tf.boolean_mask(kinds, kept)
    texts = tf.boolean_mask(_rows(items), kept)
    new_text = tf.concat([[True], texts[1:] != texts[:-1]], 0)[: tf.size(texts)]
    after_word = tf.concat([[True], kinds != _IN_WORD], 0)[:-1]
    real = kinds != _BOUNDARY
    starts = real & (new_text | after_word | (kinds == _ALONE))
    words = tf.cumsum(tf.cast(starts, tf.int64)) - 1
    words = tf.RaggedTensor.from_value_rowids(
        tf.boolean_mask(flat % _KIND, real),
        tf.boolean_mask(words, real),
        nrows=tf.reduce_sum(tf.cast(starts, tf.int64)),
        validate=False,
    )
    return words, tf.math.unsorted_segment_sum(tf.cast(starts, tf.int64), texts, items.nrows())


def _fast_wordpiece(pieces: list[str], prefix: str, unknown: str) -> bytes:
    """Returns the model of tensorflow_text.FastWordpieceTokenizer for single words."""
    from tensorflow_text.core.pybinds import pywrap_fast_wordpiece_tokenizer_model_builder as builder

    try:
        return builder.build_fast_wordpiece_model(pieces, _NO_LIMIT, prefix, unknown, True, False)
    except RuntimeError as error:
        raise _refusal(f"tensorflow_text reports {error}") from error

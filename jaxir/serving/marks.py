"""Which words of a document a question has, and the part of a document worth showing.

Words are the same if BM25 in Lucene takes them for the same: in lower case, without 's, by their Porter stem.
Lucene's 33 English stop words are not marked, unless the question has no other word. Places are counted in
Unicode code points.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from typing import NamedTuple

import snowballstemmer

SNIPPET = 300  # characters shown of a text
READ = 3_000  # characters of a text in which the best part is looked for
STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these"
    " they this to was will with"
)
# Chinese and Japanese characters are words of their own, as they are to Lucene's tokenizer.
_CHARACTERS = "\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_LETTERS = rf"[^\W{_CHARACTERS}]+"
_WORD = re.compile(rf"{_LETTERS}(?:['’]{_LETTERS})*|[{_CHARACTERS}]")
_STEMMER = snowballstemmer.stemmer("porter")
_STEMMER_LOCK = threading.Lock()  # a stemmer holds the word it works on

Spans = list[tuple[int, int]]


class Shown(NamedTuple):
    """A part of a text, and where in it the question's words are, as [start, end)."""

    text: str
    matches: Spans


class Marker:
    """Finds a question's words in documents.

    Args:
      question: the question.
    """

    def __init__(self, question: str):
        stems = {_stem_of(word) for word in _WORD.finditer(question)}
        self._stems = stems - _STOP_STEMS or stems

    def matches(self, text: str) -> Spans:
        """Returns where in `text` the question's words are."""
        return [word.span() for word in _WORD.finditer(text) if _stem_of(word) in self._stems]

    def mark(self, text: str) -> Shown:
        """Returns all of a text with its marks."""
        return Shown(text, self.matches(text))

    def snippet(self, text: str) -> Shown:
        """Returns the part of a text, cut at words, that holds most different words of the question."""
        text = " ".join(text[:READ].split())
        matches = self.matches(text)
        if len(text) <= SNIPPET:
            return Shown(text, matches)
        start, end = _cut(text, max(self._windows(text, matches), default=(0, 0, 0))[2])
        inside = [(a - start, b - start) for a, b in matches if start <= a and b <= end]
        before, after = "… " if start else "", " …" if end < len(text) else ""
        shift = len(before)
        return Shown(before + text[start:end] + after, [(a + shift, b + shift) for a, b in inside])

    def _windows(self, text: str, matches: Spans) -> Iterator[tuple[int, int, int]]:
        """Yields (different words, minus start, start) of a window that begins before each match."""
        stems = [_stem(text[a:b]) for a, b in matches]
        for first, (start, _) in enumerate(matches):
            inside = {
                s for s, (_, end) in zip(stems[first:], matches[first:], strict=True) if end <= start + 240
            }
            start = max(0, min(start - 40, len(text) - SNIPPET))
            yield len(inside), -start, start


def _cut(text: str, start: int) -> tuple[int, int]:
    """Returns `start` and `SNIPPET` beyond it, moved to where words begin and end, if that is near."""
    if start:
        space = text.find(" ", start, start + 40)
        start = space + 1 if space >= 0 else start
    end = min(start + SNIPPET, len(text))
    if end < len(text):
        space = text.rfind(" ", end - 40, end)
        end = space if space >= 0 else end
    return start, end


def _stem_of(word: re.Match[str]) -> str:
    return _stem(word.group()[:100])


@functools.lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    word = word.lower().replace("’", "'").removesuffix("'s")
    with _STEMMER_LOCK:
        return _STEMMER.stemWord(word)


_STOP_STEMS = frozenset(map(_stem, STOP_WORDS.split()))

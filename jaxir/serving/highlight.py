"""Highlights a question's words in documents, and selects snippets.

Two words match as in Lucene's BM25, if their Porter stems are equal in lower case and without 's. English
stop words never match. Positions are in Unicode code points.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from typing import NamedTuple

import snowballstemmer

SNIPPET = 300  # maximum number of characters of a snippet
READ = 3_000  # number of characters at the start of a text among which the snippet is chosen
HEADING = 80  # number of characters of a text that are shown instead of a missing title
# Snowball's English stop words, and auxiliary verbs. Lucene's own list lacks "how", "what", "do" and "I".
STOP_WORDS = (
    "a about above after again against all also am an and any are as at be because been before being"
    " below between both but by can cannot could did do does doing down during each few for from further"
    " had has have having he her here hers herself him himself his how i if in into is it its itself just"
    " may me might more most must my myself no nor not of off on once only or other ought our ours"
    " ourselves out over own same shall she should so some such than that the their theirs them themselves"
    " then there these they this those through to too under until up very was we were what when where"
    " whether which while who whom whose why will with would you your yours yourself yourselves aren't"
    " can't couldn't didn't doesn't don't hadn't hasn't haven't isn't mustn't shan't shouldn't wasn't"
    " weren't won't wouldn't"
)
_STOP = frozenset(STOP_WORDS.split())
_CONTRACTION = re.compile("'(?:s|m|re|ve|d|ll)$")
# Chinese and Japanese characters are single words, as in Lucene's tokenizer.
_CHARACTERS = "\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_LETTERS = rf"[^\W{_CHARACTERS}]+"
_WORD = re.compile(rf"{_LETTERS}(?:['’]{_LETTERS})*|[{_CHARACTERS}]")
_STEMMER = snowballstemmer.stemmer("porter")
_STEMMER_LOCK = threading.Lock()  # the stemmer is not thread-safe

Spans = list[tuple[int, int]]


class Highlighted(NamedTuple):
    """A part of a text, and the positions (start, end) of the question's words in it."""

    text: str
    matches: Spans


class Highlighter:
    """Finds a question's words in documents."""

    def __init__(self, question: str):
        self._stems = {_stem_of(word) for word in _WORD.finditer(question)} - {""}

    def matches(self, text: str) -> Spans:
        """Returns the positions of the question's words in a text."""
        return [word.span() for word in _WORD.finditer(text) if _stem_of(word) in self._stems]

    def heading(self, title: str, text: str) -> Highlighted:
        """Returns the highlighted title, or the first words of the text if there is no title."""
        if title.strip():
            return self.highlight(title)
        text = " ".join(text[:READ].split())
        end = _end(text, HEADING)
        return Highlighted(text[:end] + (" …" if end < len(text) else ""), self.matches(text[:end]))

    def highlight(self, text: str) -> Highlighted:
        """Returns all of a text, with the positions of the question's words."""
        return Highlighted(text, self.matches(text))

    def snippet(self, text: str) -> Highlighted:
        """Returns the part of a text with the most distinct words of the question, cut between words."""
        text = " ".join(text[:READ].split())
        matches = self.matches(text)
        if len(text) <= SNIPPET:
            return Highlighted(text, matches)
        start, end = _cut(text, max(self._windows(text, matches), default=(0, 0, 0))[2])
        inside = [(a - start, b - start) for a, b in matches if start <= a and b <= end]
        before, after = "… " if start else "", " …" if end < len(text) else ""
        shift = len(before)
        return Highlighted(before + text[start:end] + after, [(a + shift, b + shift) for a, b in inside])

    def _windows(self, text: str, matches: Spans) -> Iterator[tuple[int, int, int]]:
        """Yields (number of distinct question words, -start, start) of a window around each match."""
        stems = [_stem(text[a:b]) for a, b in matches]
        for first, (start, _) in enumerate(matches):
            inside = {
                s for s, (_, end) in zip(stems[first:], matches[first:], strict=True) if end <= start + 240
            }
            start = max(0, min(start - 40, len(text) - SNIPPET))
            yield len(inside), -start, start


def _cut(text: str, start: int) -> tuple[int, int]:
    """Returns `start` and `start + SNIPPET`, moved to nearby word boundaries."""
    if start:
        space = text.find(" ", start, start + 40)
        start = space + 1 if space >= 0 else start
    return start, _end(text, start + SNIPPET)


def _end(text: str, end: int) -> int:
    """Returns `end`, moved to a nearby end of a word."""
    if end >= len(text):
        return len(text)
    space = text.rfind(" ", end - 40, end)
    return space if space >= 0 else end


def _stem_of(word: re.Match[str]) -> str:
    return _stem(word.group()[:100])


@functools.lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    """Returns a word's stem; "" for a stop word."""
    word = word.lower().replace("’", "'")
    if word in _STOP or _CONTRACTION.sub("", word) in _STOP:
        return ""
    with _STEMMER_LOCK:
        return _STEMMER.stemWord(word.removesuffix("'s"))

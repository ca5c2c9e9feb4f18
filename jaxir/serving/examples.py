"""Example queries from documents, for the start page."""

from __future__ import annotations

import random
import re

from jaxir.data.formats.sources import Document
from jaxir.retrieval.indexes.base_index import Index

LONGEST = 80  # maximum number of characters of an example
READ = 1_000  # number of characters at the start of a text that are split into sentences
FIRST = 2  # number of first sentences of a text to consider; later sentences need context
TRIED = 15  # maximum number of documents to try for each example
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|[\n。！？]+")


def examples(index: Index, count: int, chooser: random.Random) -> list[str]:
    """Returns at most `count` example queries: titles, or else first sentences, of random documents."""
    drawn = chooser.sample(range(len(index.ids)), min(len(index.ids), TRIED * count))
    phrases: dict[str, None] = {}
    for row in drawn:
        if len(phrases) == count:
            break
        phrase = phrase_of(index.documents[index.ids[row]])
        if phrase is not None:
            phrases[phrase] = None
    return list(phrases)


def phrase_of(document: Document) -> str | None:
    """Returns a document's title, or else a first sentence, if it resembles a query; else None."""
    title = " ".join(document.title.split())
    if _reads(title, fewest=2):
        return title
    parts = _SENTENCE_END.split(document.text[:READ].strip())[:FIRST]
    sentences = (" ".join(part.split()).rstrip(".") for part in parts)
    return next((s for s in sentences if _reads(s, fewest=3)), None)


def _reads(phrase: str, *, fewest: int) -> bool:
    """Returns whether a phrase has a suitable length and consists mostly of letters.

    In text that is not ASCII, four characters count as a word, for languages without spaces.
    """
    letters = sum(c.isalpha() or c == " " for c in phrase)
    words = len(phrase.split()) if phrase.isascii() else max(len(phrase.split()), len(phrase) // 4)
    whole = phrase[:1].isalnum() and not phrase.endswith(":")
    return whole and len(phrase) <= LONGEST and fewest <= words <= 14 and letters >= 0.85 * len(phrase)

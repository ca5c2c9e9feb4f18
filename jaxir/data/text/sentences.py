"""Splits texts into sentences."""

from __future__ import annotations

import re

# A sentence ends at a line end; at ., ! or ? with closing quotes or brackets, if space and a possible
# sentence start follow; or at a Chinese or Japanese full stop, even without a space.
_END = re.compile(
    r"""\s*\n\s* | (?<=[.!?])["'”’»)\]]*\s+(?=["'“‘«(\[]*[^\W_a-z]) | (?<=[。！？])["”’」』）]*\s*""",
    re.VERBOSE,
)


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a text, stripped.

    A sentence ends at a line end, or at ".", "!" or "?" before white space that no letter a to z follows.
    So "e.g. this" is not split, and "Dr. Smith" is.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        kept = len(end[0].rstrip())  # closing quotes belong to the sentence
        found.append(text[start : end.start() + kept])
        start = end.end()
    found.append(text[start:])
    return [sentence.strip() for sentence in found if sentence.strip()]

"""Splits texts into sentences."""

from __future__ import annotations

import re

# A line end; or ., ! or ?, optional closing quotes or brackets, and space before a possible sentence start;
# or a full stop of Chinese and Japanese, which no space follows.
_END = re.compile(
    r"""\s*\n\s* | (?<=[.!?])["'”’»)\]]*\s+(?=["'“‘«(\[]*[^\W_a-z]) | (?<=[。！？])["”’」』）]*\s*""",
    re.VERBOSE,
)


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a text, stripped.

    A sentence ends with its line, or with ".", "!" or "?" before white space that no letter a to z follows.
    So "e.g. this" is not split, and "Dr. Smith" is.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        kept = len(end[0].rstrip())  # closing quotes belong to the sentence
        found.append(text[start : end.start() + kept])
        start = end.end()
    found.append(text[start:])
    return [sentence.strip() for sentence in found if sentence.strip()]

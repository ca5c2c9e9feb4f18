"""Where a sentence of a text ends."""

from __future__ import annotations

import re

# A line's end; or ., ! or ?, maybe closing quotes or brackets, then space before what can begin a sentence;
# or a full stop of Chinese and Japanese, after which there is no space.
_END = re.compile(
    r"""\s*\n\s* | (?<=[.!?])["'”’»)\]]*\s+(?=["'“‘«(\[]*[^\W_a-z]) | (?<=[。！？])["”’」』）]*\s*""",
    re.VERBOSE,
)


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a text, without the white space around them.

    One ends with its line, or with ".", "!" or "?" before white space and then anything but a letter a to z.
    So "e.g. this" is not cut, and "Dr. Smith" is.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        kept = len(end[0].rstrip())  # closing quotes are the sentence's
        found.append(text[start : end.start() + kept])
        start = end.end()
    found.append(text[start:])
    return [sentence.strip() for sentence in found if sentence.strip()]

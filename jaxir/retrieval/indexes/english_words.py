"""English words as Lucene's English analyzer finds them: words by UAX #29, no stop words, Porter's stems.

The steps are those of Pyserini's default: Lucene's StandardTokenizer, possessives, lower case, Lucene's 33
stop words, Porter's stemmer. Characters are classified by the Unicode version of the package `regex`.
"""

from __future__ import annotations

import functools

import regex

from jaxir.retrieval.indexes.porter_stemmer import stem

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these"
    " they this to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
MAX_LENGTH = 255  # characters; Lucene's tokenizer cuts a longer word into pieces of this length
_KEPT_STEMS = 1 << 18  # maximum number of words whose stems are kept in memory


# Characters that join the letter before, such as accents.
_MARKS = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]*+"


def _class(*names: str) -> str:
    members = "".join(rf"\p{{WB={name}}}" for name in names)
    return f"[{members}]{_MARKS}"


def _runs(part: str, *between: str) -> str:
    return f"(?:{part}(?:(?:{'|'.join(between)}){part})*+)"


_JOINER = _class("ExtendNumLet")
_LETTERS = _runs(
    _class("ALetter", "Hebrew_Letter"), f"(?:{_JOINER})*", _class("MidLetter", "MidNumLet", "Single_Quote")
)
_NUMBERS = _runs(_class("Numeric"), f"(?:{_JOINER})*", _class("MidNum", "MidNumLet", "Single_Quote"))
_KATAKANA = _runs(_class("Katakana"), f"(?:{_JOINER})*")
_PART = f"(?:{_KATAKANA}|(?:{_LETTERS}|{_NUMBERS})++)"
_ALONE = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{_MARKS}"  # each of these characters is a word
_DICTIONARY = r"\p{Line_Break=Complex_Context}++"  # Thai, Lao, Khmer, Burmese: Lucene does not divide these
_EMOJI = (
    rf"(?:\p{{WB=Regional_Indicator}}{{2}}|[0-9#*]\ufe0f?\u20e3"
    rf"|\p{{Extended_Pictographic}}{_MARKS}(?:(?<=\u200d)\p{{Extended_Pictographic}}{_MARKS})*+)"
)
_WORD = regex.compile(
    f"{_EMOJI}|{_DICTIONARY}|{_ALONE}|(?:{_JOINER})*{_PART}(?:(?:{_JOINER})+{_PART})*+(?:{_JOINER})*"
)
_POSSESSIVE = ("'s", "'S", "\u2019s", "\u2019S", "\uff07s", "\uff07S")


def words_of(text: str) -> list[str]:
    """Returns the stems of a text's words, in their order and without stop words."""
    stems = []
    for match in _WORD.finditer(text):
        word = match.group()
        pieces = (
            [word]
            if len(word) <= MAX_LENGTH
            else [word[at : at + MAX_LENGTH] for at in range(0, len(word), MAX_LENGTH)]
        )
        stems += [found for piece in pieces if (found := _stem(piece))]
    return stems


@functools.lru_cache(maxsize=_KEPT_STEMS)
def _stem(word: str) -> str:
    """Returns a word's stem; "" for a stop word."""
    if word.endswith(_POSSESSIVE):
        word = word[:-2]
    word = word.lower()
    return "" if word in STOP_WORDS else stem(word)

"""Porter's stemmer (Porter 1980), with the two changes in the author's own programs and in Lucene.

The ending bli (replaced by ble) takes the place of the paper's abli, and logi (replaced by log) is added.
Words of one or two letters are not changed. Snowball's stemmer "porter" has neither change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

# Endings and, after the colon, their replacements. The longest ending that fits decides, even if its
# condition is not met.
_SECOND = (
    "ational:ate tional:tion enci:ence anci:ance izer:ize bli:ble alli:al entli:ent eli:e ousli:ous"
    " ization:ize ation:ate ator:ate alism:al iveness:ive fulness:ful ousness:ous aliti:al iviti:ive"
    " biliti:ble logi:log"
)
_THIRD = "icate:ic ative: alize:al iciti:ic ical:ic ful: ness:"
_FOURTH = "al: ance: ence: er: ic: able: ible: ant: ement: ment: ent: ion: ou: ism: ate: iti: ous: ive: ize:"
_STEP_2, _STEP_3, _STEP_4 = (
    dict(pair.split(":") for pair in pairs.split()) for pairs in (_SECOND, _THIRD, _FOURTH)
)


def stem(word: str) -> str:
    """Returns the stem of a word in lower case."""
    if len(word) < 3:
        return word
    word = _without_past_and_ing(_without_plural(word))
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    word = _replaced(word, _STEP_2, lambda rest: _measure(rest) > 0)
    word = _replaced(word, _STEP_3, lambda rest: _measure(rest) > 0)
    word = _replaced(word, _STEP_4, lambda rest: _measure(rest) > 1, ion_after="st")
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


def _without_plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _without_past_and_ing(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    ending = next((e for e in ("ed", "ing") if word.endswith(e)), "")
    if not ending or not _has_vowel(rest := word[: -len(ending)]):
        return word
    if rest.endswith(("at", "bl", "iz")):
        return rest + "e"
    if _ends_double(rest):
        return rest if rest[-1] in "lsz" else rest[:-1]
    return rest + "e" if _measure(rest) == 1 and _ends_short(rest) else rest


def _replaced(
    word: str, endings: dict[str, str], condition: Callable[[str], bool], ion_after: str = ""
) -> str:
    """Replaces the longest ending that the word has, if the part before the ending meets the condition."""
    for length in range(min(7, len(word)), 1, -1):
        ending, rest = word[-length:], word[:-length]
        if ending in endings:
            if ending == "ion" and ion_after and not rest.endswith(tuple(ion_after)):
                continue
            return rest + endings[ending] if condition(rest) else word
    return word


def _consonants(word: str) -> list[bool]:
    found: list[bool] = []
    for letter in word:
        found.append(letter not in "aeiou" and (letter != "y" or not found or not found[-1]))
    return found


def _measure(word: str) -> int:
    """Returns m of the form [C](VC)^m[V]: how often a consonant follows a vowel."""
    found = _consonants(word)
    return sum(not a and b for a, b in itertools.pairwise(found))


def _has_vowel(word: str) -> bool:
    return not all(_consonants(word))


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _consonants(word)[-1]


def _ends_short(word: str) -> bool:
    """Returns whether a word ends with consonant, vowel, consonant, of which the last is not w, x or y."""
    return _consonants(word)[-3:] == [True, False, True] and word[-1] not in "wxy"

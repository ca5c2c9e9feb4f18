"""Marked words and snippets."""

import random

import pytest

from jaxir.serving.marks import SNIPPET, Marker


def words(question: str, text: str) -> list[str]:
    return [text[a:b] for a, b in Marker(question).matches(text)]


@pytest.mark.parametrize(
    ("question", "text", "expected"),
    [
        ("join arrays", "Joining an ARRAY; the joint", ["Joining", "ARRAY"]),
        ("the dog's bone", "Dogs of the bone-dry DOG’S", ["Dogs", "bone", "DOG’S"]),
        ("to be or not to be", "be that as it may", ["be"]),  # there is nothing but stop words
        ("what is this", "this is what", ["what"]),
        ("数据 tables", "大数据table tables", ["数", "据", "table", "tables"]),
        ("naïve 🙂", "🙂🙂 Naïve 𝒳 naive", ["Naïve"]),
        ("?!", "? a !", []),
        ("words", "", []),
        ("İstanbul", "in İstanbul", ["İstanbul"]),
    ],
)
def test_words_are_the_same_where_lucene_takes_them_for_the_same(question, text, expected):
    assert words(question, text) == expected


def test_the_snippet_is_where_most_of_the_question_is():
    text = "join " * 20 + "x " * 1000 + "they join two arrays here " + "y " * 1000
    shown = Marker("join two arrays").snippet(text)
    assert [shown.text[a:b] for a, b in shown.matches] == ["join", "two", "arrays"]
    assert shown.text.startswith("… ") and shown.text.endswith(" …")
    assert SNIPPET - 80 < len(shown.text) <= SNIPPET + 4


def test_a_snippet_without_matches_is_the_beginning():
    text = " ".join(f"w{i}" for i in range(500))
    shown = Marker("nothing").snippet(text)
    assert text.startswith(shown.text.removesuffix(" …")) and shown.matches == []


def test_marks_are_words_of_the_question_in_any_text():
    chooser = random.Random(0)
    alphabet = [
        "join",
        "joins",
        "arrays",
        "ab",
        " ",
        " ",
        "'",
        "’s",
        "数",
        "🙂",
        "\n",
        "\0",
        "_",
        "é",
        "-",
        "x" * 90,
    ]
    marked = 0
    for _ in range(500):
        text = "".join(chooser.choices(alphabet, k=chooser.randrange(300)))
        shown = Marker("join array 数").snippet(text)
        assert len(shown.text) <= SNIPPET + 4
        assert all(a < b for a, b in shown.matches)
        assert all(b <= c for (_, b), (c, _) in zip(shown.matches, shown.matches[1:], strict=False))
        found = {shown.text[a:b].lower() for a, b in shown.matches}
        assert found <= {w + s for w in ("join", "joins", "array", "arrays", "数") for s in ("", "'s", "’s")}
        marked += len(found)
    assert marked > 300

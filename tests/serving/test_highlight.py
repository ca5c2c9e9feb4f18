import random

import pytest

from jaxir.serving.highlight import SNIPPET, Highlighter


def words(question: str, text: str) -> list[str]:
    return [text[a:b] for a, b in Highlighter(question).matches(text)]


@pytest.mark.parametrize(
    ("question", "text", "expected"),
    [
        ("join arrays", "Joining an ARRAY; the joint", ["Joining", "ARRAY"]),
        ("the dog's bone", "Dogs of the bone-dry DOG’S", ["Dogs", "bone", "DOG’S"]),
        ("to be or not to be", "be that as it may", []),
        ("How do I join two arrays?", "How I do it: join the two of these arrays", ["join", "two", "arrays"]),
        ("What's a doe that doesn’t eat", "a doe does what it eats; don't say what's what", ["doe", "eats"]),
        ("数据 tables", "大数据table tables", ["数", "据", "table", "tables"]),
        ("naïve 🙂", "🙂🙂 Naïve 𝒳 naive", ["Naïve"]),
        ("?!", "? a !", []),
        ("words", "", []),
        ("İstanbul", "in İstanbul", ["İstanbul"]),
    ],
)
def test_words_match_as_in_lucene(question, text, expected):
    assert words(question, text) == expected


def test_snippet_has_most_words_of_the_question():
    text = "join " * 20 + "x " * 1000 + "they join two arrays here " + "y " * 1000
    shown = Highlighter("join two arrays").snippet(text)
    assert [shown.text[a:b] for a, b in shown.matches] == ["join", "two", "arrays"]
    assert shown.text.startswith("… ") and shown.text.endswith(" …")
    assert SNIPPET - 80 < len(shown.text) <= SNIPPET + 4


def test_stop_words_do_not_select_the_snippet():
    text = "what do you do when it is how it is " * 20 + "x " * 400 + "the capital of France " + "y " * 400
    shown = Highlighter("what is the capital of France").snippet(text)
    assert [shown.text[a:b] for a, b in shown.matches] == ["capital", "France"]


def test_heading_is_the_title_or_the_first_words():
    highlighter = Highlighter("join arrays")
    assert highlighter.heading("Joins", "text") == ("Joins", [(0, 5)])
    assert highlighter.heading(" ", "two\n arrays") == ("two arrays", [(4, 10)])
    shown = highlighter.heading("", "The arrays that you join " * 9)
    assert shown.text == "The arrays that you join " * 3 + "The …"
    assert [shown.text[a:b] for a, b in shown.matches] == ["arrays", "join"] * 3
    assert highlighter.heading("", "日" * 200).text == "日" * 80 + " …"
    assert highlighter.heading("", "") == ("", [])


def test_snippet_without_matches_is_the_beginning():
    text = " ".join(f"w{i}" for i in range(500))
    shown = Highlighter("nothing").snippet(text)
    assert text.startswith(shown.text.removesuffix(" …")) and shown.matches == []


def test_highlights_are_words_of_the_question_in_random_texts():
    chooser = random.Random(0)
    alphabet = [*("join", "joins", "arrays", "ab", "’s", "x" * 90), *"  '数🙂\n\0_é-"]
    count = 0
    for _ in range(500):
        text = "".join(chooser.choices(alphabet, k=chooser.randrange(300)))
        shown = Highlighter("join array 数").snippet(text)
        assert len(shown.text) <= SNIPPET + 4
        assert all(a < b for a, b in shown.matches)
        assert all(b <= c for (_, b), (c, _) in zip(shown.matches, shown.matches[1:], strict=False))
        found = {shown.text[a:b].lower() for a, b in shown.matches}
        assert found <= {w + s for w in ("join", "joins", "array", "arrays", "数") for s in ("", "'s", "’s")}
        count += len(found)
    assert count > 300

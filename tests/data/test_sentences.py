"""Texts cut into sentences, each with the next one."""

import json

import pytest

from jaxir.data.lines import OnBadInput
from jaxir.data.sentences import sentences_of
from jaxir.data.texts import Texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? 4 is it.", ["One.", "Two!", "Three?", "4 is it."]),
        ("That is so, e.g. this, i.e. that.", ["That is so, e.g. this, i.e. that."]),
        ('He said "Go." Then (so.) Bye', ['He said "Go."', "Then (so.)", "Bye"]),
        ("A heading\n\nA line. Another ", ["A heading", "A line.", "Another"]),
        ("v1.2 is 3.5 times as quick.", ["v1.2 is 3.5 times as quick."]),
        ("你好。再见！", ["你好。", "再见！"]),
        (" \n ", []),
    ],
)
def test_where_sentences_end(text, expected):
    assert sentences_of(text) == expected


def records(path, **settings):
    return list(Texts(path=str(path), **settings).records(OnBadInput()))


def test_a_sentence_knows_the_next_one_of_its_document(tmp_path):
    (tmp_path / "texts.txt").write_text("One. Two.\nThree.\n")
    expected = [
        {"text": ("1#0", "One."), "next_text": ("1#1", "Two.")},
        {"text": ("1#1", "Two."), "next_text": ("", "")},
        {"text": ("2#0", "Three."), "next_text": ("", "")},
    ]
    assert records(tmp_path / "texts.txt", sentences=True) == expected
    assert records(tmp_path / "texts.txt") == [{"text": ("1", "One. Two.")}, {"text": ("2", "Three.")}]
    lines = [{"_id": "a", "text": "One. Two."}, {"_id": "b", "text": "Three."}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for place in (tmp_path / "corpus.jsonl", tmp_path):  # a folder needs nothing else
        assert [r["text"][0] for r in records(place, sentences=True)] == ["a#0", "a#1", "b#0"]

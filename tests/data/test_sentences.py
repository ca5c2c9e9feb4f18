import functools
import json
import random
import shutil

import numpy as np
import pytest

from jaxir.core.features import TextFormat
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.sets.clozes import Clozes
from jaxir.data.sets.texts import Texts
from jaxir.data.text.sentences import sentences_of
from jaxir.objectives.ict import ICT
from jaxir.objectives.simcse import SimCSE


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
        ('He said "Go."\nThen (so.)\n\nBye', ['He said "Go."', "Then (so.)", "Bye"]),
        ("「你好。」\n再见！", ["「你好。」", "再见！"]),
    ],
)
def test_sentences_end_at_punctuation_and_blank_lines(text, expected):
    assert sentences_of(text) == expected


def test_no_character_is_lost_when_a_text_is_split():
    draw = random.Random(0)
    for _ in range(5000):
        text = "".join(draw.choices('aB1é_ \t\n.!?。"”’」)(“「', k=20))
        assert "".join("".join(sentences_of(text)).split()) == "".join(text.split())


def records(path, **settings):
    return list(Texts(path=str(path), **settings).records(OnBadInput()))


def test_a_sentence_knows_the_next_one_of_its_document(tmp_path):
    (tmp_path / "texts.txt").write_text("One. Two.\nThree.\n")
    one, two, three = ((text, text) for text in ("One.", "Two.", "Three."))
    nexts = ((one, two), (two, ("", "")), (three, ("", "")))
    expected = [{"text": text, "next_text": following} for text, following in nexts]
    assert records(tmp_path / "texts.txt", sentences=True) == expected
    assert [r["text"][1] for r in records(tmp_path / "texts.txt")] == ["One. Two.", "Three."]
    lines = [
        {"_id": i, "text": text} for i, text in zip("abc", ("One. Two.", "Three.", "\u200b"), strict=True)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    # Regression: this name was once read as plain lines.
    shutil.copy(tmp_path / "corpus.jsonl", tmp_path / "CORPUS.JSONL")
    for place in (tmp_path / "corpus.jsonl", tmp_path / "CORPUS.JSONL", tmp_path):
        assert records(place, sentences=True) == expected


@pytest.mark.parametrize("data", [Texts, functools.partial(Texts, sentences=True), Clozes])
def test_equal_texts_have_one_key(data, tmp_path, minilm):
    """Losses use the key to mask equal texts, which would otherwise be negatives of each other."""
    texts = ["Red apples. Green pears.", "Blue plums. Old trees.", "Red apples. Green pears."]
    lines = [json.dumps({"_id": f"{n}", "text": t}) for n, t in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    objective = ICT() if data is Clozes else SimCSE()
    features = objective.features(TextFormat(12, 24))
    dataset = data(path=str(tmp_path / "corpus.jsonl")).build(minilm, features)
    batch = dataset.once()
    (keys,) = (batch[key] for key in batch if key.endswith("_key"))
    (ids,) = (batch[x] for x in ("text_ids", "whole_ids") if x in batch)
    same_keys, same_texts = ((x[:, None] == x[None]).all(-1) for x in (keys, ids))
    np.testing.assert_array_equal(same_keys, same_texts)
    # Entries of the matrix: 3 + 2 for 3 texts with one equal pair, 6 + 4 for 6 sentences with two such pairs.
    assert same_texts.sum() == (10 if len(ids) == 6 else 5)

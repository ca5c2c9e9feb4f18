"""Hard negatives and a teacher's scores, given by ids whose texts come from a collection."""

import json

import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.sets.scored_ids import ScoredIds
from tests.data import hub_folders
from tests.data.hub_folders import write_table

TEXTS = {"7": "git revert", "8": "git stash", "9": "git log", "4": "git blame"}


@pytest.fixture
def folder(tmp_path):
    write_table(tmp_path / "set/corpus.jsonl", [{"_id": i, "text": text} for i, text in TEXTS.items()])
    write_table(tmp_path / "set/queries.jsonl", [{"_id": "1", "text": "undo"}, {"_id": "2", "text": "who"}])
    return tmp_path / "set"


def examples(path, folder, **how):
    return list(ScoredIds(path=str(path), collection=str(folder), **how).examples("stop"))


def negatives(*ids):
    return tuple((i, TEXTS[i]) for i in ids)


@pytest.mark.parametrize(
    ("row", "ids", "score", "scores"),
    [
        ({"qid": 1, "pos": [7], "neg": {"bm25": [8, 9], "dense": [9, 4]}}, "894", None, None),
        ({"qid": 1, "pos": {"7": 9.5}, "neg": {"8": 2.5, "9": -1.0}}, "89", 9.5, (2.5, -1.0)),
        ({"query_id": 1, "positive_id": 7, "negative_id": 8, "score": 6.5}, "8", 6.5, (0.0,)),
        ({"query_id": "1", "positive_id": "7", "negative_ids": ["8", "9"]}, "89", None, None),
        (
            {"query_id": 1, "positive_id": 7, "negative_ids": [8, 9], "scores": [9.5, 2.5, -1.0]},
            "89", 9.5, (2.5, -1.0),
        ),
        (
            {"query_id": 1, "positive_id": 7, "negative_id_1": 8, "negative_id_2": 9, "label": [3, 2, 1]},
            "89", 3.0, (2.0, 1.0),
        ),
        ({"query_id": 1, "document_ids": [8, 7, 9], "scores": [2.5, 9.5, -1.0]}, "89", 9.5, (2.5, -1.0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_every_form_of_rows_becomes_a_pair_with_texts(row, ids, score, scores, ending, folder, tmp_path):
    write_table(tmp_path / f"rows.{ending}", [row])
    (found,) = examples(tmp_path / f"rows.{ending}", folder)
    assert found[:4] == ("1", "undo", "7", "git revert")
    assert (found.negatives, found.passage_score, found.negative_scores) == (negatives(*ids), score, scores)


def test_each_positive_is_a_pair_and_max_negatives_keeps_the_first(folder, tmp_path):
    write_table(tmp_path / "rows.jsonl", [{"qid": 1, "pos": {"7": 3, "4": 2}, "neg": {"8": 1, "9": 0}}])
    found = examples(tmp_path / "rows.jsonl", folder, max_negatives=1)
    assert [(f.passage_id, f.passage_score, f.negatives) for f in found] == [
        ("7", 3.0, negatives("8")),
        ("4", 2.0, negatives("8")),
    ]


def test_the_texts_may_be_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = hub_folders.nanobeir(tmp_path / "set")
    write_table(tmp_path / "rows.jsonl", [{"query_id": "q1", "positive_id": "d1", "negative_id": "d2"}])
    (found,) = ScoredIds(path=str(tmp_path / "rows.jsonl"), collection=name).examples("stop")
    assert found[1::2] == ("who drinks milk?", "cats drink milk", None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"query": 1, "pos": 7},
            r"rows.jsonl:1: no column query_id or query-id or qid \(it has query, pos\)",
        ),
        ({"qid": 1, "neg": [8]}, "rows.jsonl:1: the row has no positive passage"),
        ({"qid": 1, "pos": [7], "neg": [8], "scores": [1]}, "expected 2 scores, the positive's first, but"),
        ({"qid": 1, "pos": [7], "neg": [8, 9], "score": 1}, "one score needs one positive and one negative"),
        ({"qid": 1, "doc_ids": [7, 8]}, "expected 2 scores, a list beside the ids, but found None"),
        ({"qid": 1, "pos": [7.5]}, "an id is neither a text nor a whole number: 7.5"),
        ({"qid": 1, "pos": {"7": "much"}}, "a score is not a number: 'much'"),
    ],
)
def test_malformed_rows_are_refused_or_skipped(row, message, folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + '{"qid": 2, "pos": 4, "neg": 8}\n')
    with pytest.raises(BadInputError, match=message):
        examples(path, folder)
    source = ScoredIds(path=str(path), collection=str(folder))
    assert [found.query for found in source.examples(OnBadInput("skip"))] == ["who"]


def test_ids_of_another_collection_are_refused(folder, tmp_path):
    for row, message in (
        ({"qid": 1, "pos": 7, "neg": 99}, "corpus.jsonl lacks '99', which .*rows.jsonl names"),
        ({"qid": 5, "pos": 7}, r"queries.jsonl lacks '5', which .*rows.jsonl names \(1 of 1 queries\)"),
    ):
        write_table(tmp_path / "rows.jsonl", [row])
        with pytest.raises(UserError, match=message):
            examples(tmp_path / "rows.jsonl", folder)

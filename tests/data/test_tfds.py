"""Data sets in TFDS's file format, written here with the features of TFDS's builders, without network."""

import json

import pytest

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import PairExample
from jaxir.data.sets import beir_sets
from jaxir.data.sets.multireqa import MultiReqaPairs, TfdsMultiReqaPairs
from jaxir.data.sets.natural_questions import NaturalQuestionsPairs, TfdsNaturalQuestionsPairs
from jaxir.data.sets.tfds_beir import TfdsBeir, TfdsBeirPairs
from tests.data import published

tfds = pytest.importorskip("tensorflow_datasets")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    judged = [
        published.beir_row("q1", "a – question", "d1", "first", 2.0, "Title"),
        published.beir_row("q1", "a – question", "d2", "second", 0.0, ""),
        published.beir_row("q2", "another", "d2", "second", 1.0, ""),
    ]
    passages = [
        published.beir_row(passage_id="d1", passage="first", title="Title"),
        published.beir_row(passage_id="d2", passage="second"),
    ]
    queries = [published.beir_row("q1", "a – question"), published.beir_row("q2", "another")]
    splits = {"train": judged, "test": judged[2:], "passage": passages, "query": queries}
    published.store_tfds(folder, "beir/scifact", splits)

    contexts = [json.loads(line) for line in published.mrqa_lines()[1:]]

    def spans(pairs):
        return [{"start": s, "end": e} for s, e in pairs]

    def answer(found):
        return {
            n: found[n] if n == "text" else spans(found[n]) for n in ("text", "char_spans", "token_spans")
        }

    rest = {"subset": "SQuAD", "context_tokens": [{"tokens": "x", "offsets": 0}], "question_tokens": []}
    questions = [
        {"context": context["context"], "qid": qa["qid"], "question": qa["question"].strip(), **rest}
        | {"detected_answers": list(map(answer, qa["detected_answers"])), "answers": qa["answers"]}
        for context in contexts
        for qa in context["qas"]
    ]
    published.store_tfds(folder, "mrqa/squad", {"train": questions, "validation": questions})

    def page(record):
        tokens = [{"token": t["token"], "is_html": t["html_token"]} for t in record["document_tokens"]]
        answers = [
            {k: a["long_answer"][k] for k in ("start_token", "end_token")} for a in record["annotations"]
        ]
        answers = [{"start_byte": 0, "end_byte": 0} | answer for answer in answers]
        rest = {"id": "1", "short_answers": [], "yes_no_answer": -1}
        return {
            "id": str(record["example_id"]),
            "document": {"title": "Kettle", "url": "u", "html": "<html>", "tokens": tokens},
            "question": {"text": record["question_text"], "tokens": record["question_tokens"]},
            "annotations": [{"long_answer": answer, **rest} for answer in answers],
        }

    pages = {"train": [page(r) for r in NQ], "validation": [page(NQ[0])]}
    published.store_tfds(folder, "natural_questions/default", pages)
    return str(folder)


NQ = [
    published.nq_dev_record(-5, "what does a kettle do", published.PARAGRAPH, (-1, -1)),
    published.nq_dev_record(6, "nothing", (-1, -1)),
    published.nq_dev_record(7, "since when", published.TABLE, published.PARAGRAPH),
]


def test_beir_from_tfds(data_dir):
    pairs = list(TfdsBeirPairs(name="beir/scifact", data_dir=data_dir).examples(OnBadInput()))
    assert pairs == [
        PairExample("q1", "a – question", "d1", "Title first"),
        PairExample("q2", "another", "d2", "second"),
    ]
    whole = TfdsBeir("beir/scifact", data_dir)
    assert [d.contents for d in whole.documents()] == ["Title first", "second"]
    assert [q.text for q in whole.queries()] == ["a – question", "another"]
    assert [tuple(q) for q in whole.qrels("train")] == [("q1", "d1", 2), ("q1", "d2", 0), ("q2", "d2", 1)]


def test_multireqa_from_tfds_is_multireqa_from_files(data_dir, tmp_path):
    mrqa, candidates = published.write_multireqa(tmp_path)
    files = MultiReqaPairs(mrqa=str(mrqa), candidates=str(candidates))
    given = {"name": "mrqa/squad", "split": "train", "candidates": str(candidates)}
    stored = TfdsMultiReqaPairs(**given, data_dir=data_dir)
    expected = list(files.examples(OnBadInput()))
    assert list(stored.examples(OnBadInput())) == expected != []


def test_natural_questions_from_tfds_are_those_from_files(data_dir, tmp_path):
    path = published.write_lines(tmp_path / "nq.jsonl", [json.dumps(record) for record in NQ])
    expected = list(NaturalQuestionsPairs(path=str(path)).examples(OnBadInput()))
    assert list(TfdsNaturalQuestionsPairs(data_dir=data_dir).examples(OnBadInput())) == expected
    assert len(expected) == 3


def test_beir_sets_are_those_of_tfds():
    assert len(beir_sets.BEIR_SETS) == 18
    public = {"msmarco": beir_sets.MSMARCO} | {k: v for k, v in beir_sets.BEIR_SETS.items() if v.public}
    assert len(public) == 15
    names = [f"{name}/{part}" for name, found in public.items() for part in found.parts]
    names += [name for name, found in public.items() if not found.parts]
    configs = tfds.builder_cls("beir").builder_configs
    assert {beir_sets.tfds_name(name) for name in names} == {f"beir/{config}" for config in configs}
    for name in names:
        splits = {beir_sets.tfds_split(split) for split in beir_sets.beir_set(name).splits}
        assert splits == set(configs[beir_sets.tfds_name(name).removeprefix("beir/")].qrel_splits), name


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("beir/fiqa", "train", r"beir/fiqa is not prepared in .*: run `tfds build beir/fiqa` first"),
        ("beri/fiqa", "train", "TFDS has no data set 'beri/fiqa'"),
        ("beir/scifac", "train", "^TFDS has no 'beir/scifac'; did you mean 'scifact'"),
        ("beir/scifact:9.9.9", "train", "cannot be loaded at version 9.9.9, only: 1.0.0"),
        ("beir/scifact", "validation", r"has no split 'validation' \(has: .*train"),
    ],
)
def test_missing_tfds_sets_versions_and_splits_are_refused(data_dir, name, split, message):
    with pytest.raises(UserError, match=message):
        TfdsBeirPairs(name=name, split=split, data_dir=data_dir).examples(OnBadInput())

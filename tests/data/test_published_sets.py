import gzip
import json
from pathlib import Path

import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats import json_arrays
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import PairExample, text_id
from jaxir.data.sets import dpr, msmarco, multireqa, natural_questions
from tests.data import published

LAKE, MILL, NOTE = published.LAKE, published.MILL, published.NOTE


def examples(source, policy="stop"):
    return list(source.examples(OnBadInput(policy)))


def test_msmarco_pairs_and_collection(tmp_path):
    folder = msmarco.MsMarcoFolder(published.write_msmarco(tmp_path))
    assert folder.splits == ["dev.small", "train"]
    passage = "Passage {} on rivers – and banks."
    assert examples(msmarco.MsMarcoPairs(directory=str(tmp_path))) == [
        PairExample("121352", "define river", "1", passage.format(1)),
        PairExample("634306", "what is a bank", "4", passage.format(4)),
        PairExample("634306", "what is a bank", "5", passage.format(5)),
    ]
    (dev,) = examples(msmarco.MsMarcoPairs(directory=str(tmp_path), split="dev.small"))
    assert (dev.query, dev.passage_id) == ("where do rivers end", "3")
    assert [d.contents for d in folder.documents()] == [passage.format(i) for i in range(6)]
    assert [q.id for q in folder.queries("train")] == ["121352", "634306", "7"]


def test_msmarco_triples_become_pairs_with_negatives(tmp_path):
    published.write_msmarco(tmp_path)
    pairs = examples(msmarco.MsMarcoTriples(directory=str(tmp_path), max_negatives=2))
    assert [(p.query_id, p.passage_id, [i for i, _ in p.negatives]) for p in pairs] == [
        ("121352", "1", ["2", "3"]),
        ("634306", "4", ["0"]),
        ("634306", "5", ["2"]),
    ]
    assert pairs[0].negatives[0][1] == "Passage 2 on rivers – and banks."
    with pytest.raises(UserError, match="max_negatives must be a whole number of at least 1, not 0"):
        examples(msmarco.MsMarcoTriples(directory=str(tmp_path), max_negatives=0))


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("collection.tsv", "no tab", "expected id<TAB>text but the line has no tab"),
        ("collection.tsv", "9\t\u200b", "no text after the tab"),
        ("collection.tsv", "3\tagain", "duplicate id '3'"),
        ("qrels.train.tsv", "7\t3\t1", "expected 4 tab-separated columns (query-id, 0, document-id, score)"),
        ("qrels.train.tsv", "7\t0\t99\t1", "judgement for an unknown document '99'"),
        ("qidpidtriples.tsv", "7\t3", "expected 3 tab-separated ids"),
        ("qidpidtriples.tsv", "8\t3\t4", "an unknown query '8'"),
    ],
)
def test_malformed_msmarco_lines_are_refused_with_their_place(tmp_path, name, line, reason):
    published.write_msmarco(tmp_path)
    triples = gzip.decompress((tmp_path / "qidpidtriples.train.full.2.tsv.gz").read_bytes())
    (tmp_path / "qidpidtriples.tsv").write_bytes(triples)
    with (tmp_path / name).open("a") as file:
        file.write(line + "\n")
    number = (tmp_path / name).read_text().count("\n")
    kind = msmarco.MsMarcoTriples if "triples" in name else msmarco.MsMarcoPairs
    extra = {"triples": "qidpidtriples.tsv"} if "triples" in name else {}
    with pytest.raises(BadInputError) as raised:
        list(kind(directory=str(tmp_path), **extra).examples(OnBadInput(strict=True)))
    assert str(raised.value).startswith(f"{tmp_path / name}:{number}: ") and reason in str(raised.value)
    assert len(examples(kind(directory=str(tmp_path), **extra), "skip")) == 3


@pytest.fixture
def multi(tmp_path):
    mrqa, candidates = published.write_multireqa(tmp_path)
    return {"mrqa": str(mrqa), "candidates": str(candidates)}


def test_multireqa_pairs_a_question_with_the_sentences_that_answer_it(multi, capsys):
    collector = OnBadInput()
    pairs = list(multireqa.MultiReqaPairs(**multi, with_context=False).examples(collector))
    first, third = "The lake is 24–30 m deep.", "Ferries cross it."
    second = "It froze in 1929 and again in 1963."
    lake = "SQuAD_a1/a2/a3/a4/_"
    assert [(p.query_id, p.query, p.passage_id, p.passage) for p in pairs] == [
        ("a1", "How deep is the lake?", f"{lake}0", first),
        ("a2", "When did it freeze?", f"{lake}1", second),
        ("a3", "What crosses it?", f"{lake}2", third),
        ("a4", "What is deep and froze?", f"{lake}0", first),  # an answer that spans two sentences
        ("a4", "What is deep and froze?", f"{lake}1", second),
        # Questions with equal texts count as one question.
        ("a2", "When did it freeze?", "SQuAD_b1/_1", "It froze in 1929."),
        # Equal contexts share their sentences.
        ("c1", "In which year did it freeze first?", f"{lake}1", second),
    ]
    whole = [pair.passage for pair in examples(multireqa.MultiReqaPairs(**multi))]
    assert [whole[0], whole[5]] == [f"{first} {LAKE}", f"It froze in 1929. {NOTE}"]
    collector.report()
    err = capsys.readouterr().err
    assert "skipped 2 records: question without an answer sentence (first: " in err and err.endswith(":5)\n")


def asked(**question):
    return {"context": "short", "qas": [question]}


def sentence(candidate_id, start=5, end=6):
    return {"candidate_id": candidate_id, "response_start": start, "response_end": end}


@pytest.mark.parametrize(
    ("which", "record", "reason"),
    [
        ("mrqa", {"qas": []}, "no field 'context'"),
        ("mrqa", {"context": "x", "qas": ["q"]}, "an item of 'qas' is not an object"),
        ("mrqa", asked(qid="z", question="q", detected_answers=[{"char_spans": [[1]]}]), "end]: [1]"),
        ("mrqa", asked(qid="a1", question="q"), f"last one is at character {len(LAKE)} of 5"),
        ("candidates", {"candidate_id": "z_1"}, "candidate_id is not NAME_QUESTION/.../_NUMBER: 'z_1'"),
        ("candidates", {"candidate_id": "S_z/_1"}, "field 'response_start' is not an integer: None"),
        ("candidates", sentence("S_z/_1", 5, 5), "a sentence has a wrong span: 5 to 5"),
        ("candidates", sentence("SQuAD_b1/_1"), "duplicate candidate_id: 'SQuAD_b1/_1'"),
        ("candidates", sentence("SQuAD_b1/z/_1"), "a question id has two contexts: 'b1'"),
    ],
)
def test_malformed_multireqa_lines_are_refused_with_their_place(multi, which, record, reason):
    path = Path(multi[which])
    lines = gzip.decompress(path.read_bytes()).decode() + json.dumps(record) + "\n"
    path.write_text(lines)  # gzip is recognised by its first bytes
    with pytest.raises(BadInputError) as raised:
        examples(multireqa.MultiReqaPairs(**multi))
    assert str(raised.value).startswith(f"{path}:{lines.count(chr(10))}: ") and reason in str(raised.value)


def test_a_question_id_with_two_questions_is_refused(multi):
    """This happens, for example, if files of several splits are joined."""
    path = Path(multi["mrqa"])
    record = {"context": published.LAKE, "qas": [{"qid": "a1", "question": "How old is it?"}]}
    lines = gzip.decompress(path.read_bytes()).decode() + json.dumps(record) + "\n"
    path.write_text(lines)
    with pytest.raises(BadInputError, match=r":6: a question id has two texts: 'a1'$"):
        examples(multireqa.MultiReqaPairs(**multi))
    assert len(examples(multireqa.MultiReqaPairs(**multi), "skip")) == 7


OUTSIDE = {"start_token": 3, "end_token": 900}
KETTLE, SINCE = "A kettle boils water .", "Made since 1900"


@pytest.mark.parametrize("record", [published.nq_record, published.nq_dev_record], ids=["train", "dev"])
def test_natural_questions_pairs_a_question_with_its_long_answers(tmp_path, capsys, record):
    paragraph, table, none = published.PARAGRAPH, published.TABLE, (-1, -1)
    lines = [
        record(-222, "what does a kettle do", paragraph, none, paragraph),
        record(333, "since when", table, paragraph),
        record(444, "unanswered", none),
    ]
    path = published.write_lines(tmp_path / "nq.jsonl.gz", [json.dumps(x) for x in lines])
    collector = OnBadInput()
    pairs = list(natural_questions.NaturalQuestionsPairs(path=str(path)).examples(collector))
    assert [(p.query_id, p.query, p.passage) for p in pairs] == [
        ("-222", "what does a kettle do", f"Kettle {KETTLE}"),
        ("333", "since when", f"Kettle {SINCE}"),
        ("333", "since when", f"Kettle {KETTLE}"),
    ]
    assert pairs[0].passage_id == pairs[2].passage_id == text_id(f"Kettle {KETTLE}")
    collector.report()
    assert capsys.readouterr().err == f"skipped 1 record: question without a long answer (first: {path}:3)\n"

    documents, queries, qrels = natural_questions.NaturalQuestionsPairs(path=str(path)).collection(collector)
    assert [(d.title, d.text) for d in documents] == [("Kettle", KETTLE), ("Kettle", SINCE)]
    assert [q.id for q in queries] == ["-222", "333"] and len(qrels) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"example_id": "1"}, "field 'example_id' is not an integer: '1'"),
        ({"annotations": [{"long_answer": 3}]}, "an item of 'annotations' is not an object: 3"),
        ({"annotations": [{"long_answer": {"start_token": 3}}]}, "has no start_token and end_token"),
        ({"annotations": [{"long_answer": OUTSIDE}]}, "a span of tokens lies outside the document: 3 to 900"),
    ],
)
def test_malformed_natural_questions_are_refused_with_their_place(tmp_path, change, reason):
    good = published.nq_record(1, "what", published.PARAGRAPH)
    path = published.write_lines(tmp_path / "nq.jsonl", [json.dumps(good), json.dumps(good | change)])
    source = natural_questions.NaturalQuestionsPairs(path=str(path))
    with pytest.raises(BadInputError) as raised:
        examples(source)
    assert str(raised.value).startswith(f"{path}:2: ") and reason in str(raised.value)
    assert len(examples(source, "skip")) == 1


def test_dpr_reads_a_json_array_object_by_object(tmp_path, monkeypatch):
    monkeypatch.setattr(json_arrays, "_LINES_AT_ONCE", 3)  # fewer lines than an object of the file has
    path = tmp_path / "biencoder-nq-train.json.gz"
    path.write_bytes(gzip.compress(json.dumps(published.dpr_records(), indent=4).encode()))
    pairs = examples(dpr.DprPairs(path=str(path)))
    kettle = 'Kettle A "kettle" boils\nwater [1].'
    assert [(p.query, p.passage, [text for _, text in p.negatives]) for p in pairs] == [
        ("what does a kettle do", kettle, ["Pot A pot cooks soup.", "Pan A pan fries."]),
        ("where is tea from", "Tea Tea came from Asia.", [kettle]),
        ("where is tea from", "Asia Tea grows there.", [kettle]),
    ]
    assert pairs[0].passage_id == pairs[1].negatives[0][0] == text_id(kettle)
    assert pairs[1].query_id == pairs[2].query_id


def test_a_positive_passage_of_dpr_is_no_hard_negative_of_its_question(tmp_path):
    a, b, c = ({"title": "T", "text": text} for text in "abc")
    record = {"question": "what", "positive_ctxs": [a, b], "hard_negative_ctxs": [b, c]}
    (tmp_path / "dpr.json").write_text(json.dumps([record]))
    pairs = examples(dpr.DprPairs(path=str(tmp_path / "dpr.json")))
    found = {p.passage: [text for _, text in p.negatives] for p in pairs}
    assert found == {"T a": ["T c"], "T b": ["T b", "T c"]}  # T b is its own negative, which batches mask


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("{}", ":1", "a JSON array of objects is needed"),
        ("[GOOD,\nGOOD", ":2", "a comma or the end of the JSON array is missing"),
        ("[GOOD,\n]", ":2", "not valid JSON (Expecting value)"),
        ('[GOOD,\n{"question', ":2", "not valid JSON ("),
        ("[GOOD]\n\nmore", ":3", "there is text after the end of the JSON array"),
        ("[]", "", "the file has no usable record"),
        ("[GOOD,\n3]", ":2", "an item of 'the array' is not an object: 3"),
        ('[GOOD,\n{"question": "x"}]', ":2", "'positive_ctxs' has no passage"),
    ],
)
def test_malformed_dpr_files_are_refused_with_their_place(tmp_path, monkeypatch, text, place, reason):
    monkeypatch.setattr(json_arrays, "_LINES_AT_ONCE", 1)
    good = json.dumps(published.dpr_records()[0])
    path = tmp_path / "dpr.json"
    path.write_bytes(text.replace("GOOD", good).encode("latin-1"))
    with pytest.raises(BadInputError) as raised:
        examples(dpr.DprPairs(path=str(path)))
    assert str(raised.value).startswith(f"{path}{place}: {reason}")
    path.write_text(json.dumps([*published.dpr_records(), {"question": "x"}]))
    assert len(examples(dpr.DprPairs(path=str(path)), "skip")) == 3

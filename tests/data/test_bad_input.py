import gzip
import json

import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats import qrels, sources
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.tables import Table
from jaxir.data.sets.pair_sources import JsonlPairs, TevatronPairs, TsvPairs


def line(**record) -> bytes:
    return json.dumps(record).encode() + b"\n"


def positives(*passages) -> bytes:
    return line(query_id="q2", query="x", positive_passages=passages)


DOC = line(_id="d1", title="A title", text="some text")
QUERY = line(_id="q1", text="a query")
PAIR = line(query="a query", passage="a passage", query_id="q1", passage_id="p1", negatives=["no"])
POSITIVE = {"docid": "p1", "title": "T", "text": "x"}
TEVATRON = line(query_id="q1", query="a query", positive_passages=[POSITIVE])
TWO_TEXTS = "passage id has two different texts: 'p1' (another text on line 1)"
QREL = b"query-id\tcorpus-id\tscore\nq1\td1\t1\n"


def pairs_of(kind):
    """Returns a reader of a file of pairs with the arguments of `read_corpus`."""
    return lambda path, on_bad_input="stop": kind(path=str(path)).examples(on_bad_input)


READERS = {
    "corpus": (sources.read_corpus, DOC),
    "queries": (sources.read_queries, QUERY),
    "qrels": (qrels.read_qrels, QREL),
    "jsonl": (pairs_of(JsonlPairs), PAIR),
    "tsv": (pairs_of(TsvPairs), b"a query\ta passage\tno\n"),
    "tevatron": (pairs_of(TevatronPairs), TEVATRON),
}
BAD = [
    ("corpus", b"{oops}\n", "not valid JSON"),
    ("corpus", b'["a", "list"]\n', "not a JSON object but a list: put one object on each line (`jq"),
    ("corpus", b"[" * 100_000 + b"\n", "not valid JSON"),
    ("corpus", line(_id="d2", body="x"), "no field 'text' (it has '_id', 'body')"),
    ("corpus", line(_id=7, text="x"), "field '_id' is not a string but a number"),
    ("corpus", line(_id="d1", text="again"), "duplicate id 'd1'"),
    ("corpus", line(_id="d\u30002", text="x"), "has U+3000 IDEOGRAPHIC SPACE"),
    ("queries", line(_id="q\t2", text="x"), "has U+0009 CONTROL CHARACTER"),
    ("corpus", line(_id="", text="x"), "empty id"),
    ("corpus", b'{"_id": "d2", "text": "caf\xe9"}\n', "not UTF-8 (byte 0xe9 at 27)"),
    ("corpus", b'{"_id": "d2", "text": "a\0b"}\n', "NUL byte"),
    ("corpus", b'{"_id": "d2", "text": "\\ud83d"}\n', "half of a surrogate pair"),
    ("queries", line(_id="q2", text=" "), "field 'text' is empty"),
    ("qrels", b"q1\td1\n", "expected 3 tab-separated columns (query-id, corpus-id, score) but found 2"),
    ("qrels", b"q1\td2\t0.5\n", "the score is not an integer: '0.5'"),
    ("qrels", b"q1\td1\t2\n", "contradicts an earlier judgement of 'd1' for 'q1'"),
    ("tsv", "x\t\u200b\n".encode(), "an empty column (number 2)"),
    ("jsonl", line(query="x"), "no field 'passage'"),
    ("jsonl", line(query="", passage="x"), "field 'query' is empty"),
    ("jsonl", line(query="x", passage="y", negatives="z"), "field 'negatives' is not a list but a string"),
    ("jsonl", line(query="x", passage="y", negatives=[1]), "an item of 'negatives' is not an object: 1"),
    ("jsonl", line(query="x", passage="other", passage_id="p1"), TWO_TEXTS),
    ("tsv", b"only one column\n", "expected query<TAB>passage[<TAB>negative...]"),
    ("tsv", b"a query\t\tno\n", "an empty column (number 2)"),
    ("tevatron", positives(), "'positive_passages' has no passage"),
    ("tevatron", positives("y"), "is not an object: 'y'"),
    ("tevatron", positives({"docid": "p2", "text": ""}), "'positive_passages' has neither title nor text"),
    ("tevatron", positives({"docid": "p1", "text": "other"}), TWO_TEXTS),
]


def read(kind, path, policy):
    reader, _ = READERS[kind]
    known = {"query_ids": {"q1"}, "document_ids": {"d1", "d2"}} if kind == "qrels" else {}
    return list(reader(path, policy, **known))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_refused_with_the_command_that_converts_it(tmp_path, encoding):
    path = tmp_path / "input"
    path.write_bytes(("\ufeff" + DOC.decode()).encode(encoding))
    with pytest.raises(BadInputError, match="input:1: not UTF-8 but UTF-16; iconv -f UTF-16 -t utf8"):
        list(sources.read_corpus(path))
    path = tmp_path / "input.csv"
    path.write_bytes("\ufeffquery,passage\na query,a passage\n".encode(encoding))
    with pytest.raises(BadInputError, match=r"input\.csv:1: not UTF-8 but UTF-16; iconv -f UTF-16 -t utf8"):
        Table(path)


@pytest.mark.parametrize(("kind", "bad", "reason"), BAD, ids=[f"{k}-{r[:40]}" for k, _, r in BAD])
def test_a_malformed_line_is_refused_with_its_place_or_skipped(tmp_path, capsys, kind, bad, reason):
    path = tmp_path / "input"
    good = READERS[kind][1]
    path.write_bytes(good + bad)
    with pytest.raises(BadInputError) as raised:
        read(kind, path, "stop")
    number = good.count(b"\n") + 1
    assert str(raised.value).startswith(f"{path}:{number}: ") and reason in str(raised.value)
    assert len(str(raised.value)) < 400 and raised.value.line == number

    assert len(read(kind, path, "skip")) == 1
    assert f"skipped 1 record: {raised.value.reason.split(' (')[0][:8]}" in capsys.readouterr().err


ODD = [
    ("corpus", DOC, "duplicate id 'd1'", "lines that repeat an earlier document or query, left out: 1", 1),
    ("queries", QUERY, "duplicate id 'q1'", "lines that repeat an earlier document or query, left out: 1", 1),
    ("qrels", b"q9\td1\t1\n", "judgement for an unknown query 'q9'", "which are scored 0: 1", 2),
    ("qrels", b"q1\td9\t1\n", "judgement for an unknown document 'd9'", "scored as not retrieved: 1", 2),
    ("qrels", b"q1\td2\t2.0\n", "the score is not an integer: '2.0'", "written as decimals, which are", 2),
]


@pytest.mark.parametrize(("kind", "odd", "reason", "note", "count"), ODD, ids=[r for _, _, r, _, _ in ODD])
def test_odd_lines_of_published_collections_are_counted_and_refused_if_strict(
    tmp_path, capsys, kind, odd, reason, note, count
):
    path, good = tmp_path / "input", READERS[kind][1]
    path.write_bytes(good + odd)
    number = good.count(b"\n") + 1
    for policy in ("stop", "skip"):
        assert len(read(kind, path, policy)) == count
        report = capsys.readouterr().err
        assert report.startswith("note: ") and report.endswith(f"(first: {path}:{number})\n")
        assert note in report
    with pytest.raises(BadInputError) as raised:
        read(kind, path, OnBadInput(strict=True))
    assert str(raised.value) == f"{path}:{number}: {reason}"


@pytest.mark.parametrize("kind", READERS)
def test_unusable_files_are_refused_even_when_skipping(tmp_path, kind):
    path = tmp_path / "input"
    path.write_bytes(b"")
    with pytest.raises(BadInputError, match="input: the file is empty"):
        read(kind, path, "skip")
    path.write_bytes(b"\xff\xff\n")
    with pytest.raises(BadInputError, match="the file has no usable record"):
        read(kind, path, OnBadInput("skip"))
    path.write_bytes(gzip.compress(READERS[kind][1] * 50)[:-9])
    with pytest.raises(BadInputError, match="damaged gzip"):
        read(kind, path, "skip")
    for unreadable in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=r"no such file|is a directory"):
            read(kind, unreadable, "skip")


@pytest.mark.parametrize("kind", READERS)
def test_gzip_byte_order_mark_windows_line_ends_and_blank_lines_are_read(tmp_path, kind):
    good = READERS[kind][1]
    plain, odd = tmp_path / "plain", tmp_path / "odd.gz"
    plain.write_bytes(good)
    odd.write_bytes(gzip.compress(b"\xef\xbb\xbf" + good.replace(b"\n", b"\r\n") + b"\n  \n"))
    assert read(kind, odd, "stop") == read(kind, plain, "stop") != []


def test_report_counts_by_kind_and_names_the_first_place(tmp_path, capsys):
    path = tmp_path / "corpus.jsonl"
    again = line(_id="d1", text="other")
    empty = [line(_id="d2", text=""), b"nope\n", line(_id="d3", title=" ", text=" ")]
    path.write_bytes(b"".join([b"nope\n", DOC, again, DOC, *empty]))
    collector = OnBadInput("skip")
    documents = list(sources.read_corpus(path, collector))
    # Empty documents are kept, because judgements may name them.
    assert [d.id for d in documents] == ["d1", "d2", "d3"]
    assert collector.skipped == {"not valid JSON": 2, "duplicate id": 1}
    collector.report()
    assert capsys.readouterr().err.splitlines() == [
        f"skipped 2 records: not valid JSON (first: {path}:1)",
        f"skipped 1 record: duplicate id (first: {path}:3)",
        f"kept 2 records: document with neither title nor text (first: {path}:5)",
        f"note: lines that repeat an earlier document or query, left out: 1 (first: {path}:4)",
    ]


@pytest.mark.parametrize("header", [b"Query\tpassage\tnegative\n", b"qid\tquestion\tanswer\n"])
def test_a_header_line_is_not_read_as_a_pair(tmp_path, capsys, header):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(header + READERS["tsv"][1] + b"query\tpassage\n")
    with pytest.raises(BadInputError, match=r"tsv:1: column names instead of the first pair"):
        read("tsv", path, "stop")
    assert [pair.query for pair in read("tsv", path, "skip")] == ["a query", "query"]
    assert "skipped 1 record: column names instead" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["faq.csv", "faq.TSV.gz"])
def test_a_table_instead_of_documents_is_refused_with_the_command_that_converts_it(tmp_path, name):
    (tmp_path / name).write_text("question,answer\na,b\n")
    for reader, what in ((sources.read_corpus, "documents"), (sources.read_queries, "queries")):
        with pytest.raises(UserError, match=f"{what} are read from .* --dataset=pairs:.*{name} --output=DIR"):
            list(reader(tmp_path / name))


@pytest.fixture
def beir(tmp_path, write_jsonl):
    write_jsonl("c/corpus.jsonl", [{"_id": f"d{i}", "title": f"t{i}", "text": f"x{i}"} for i in range(4)])
    write_jsonl("c/queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in range(3)])
    (tmp_path / "c/qrels").mkdir()
    judged = "query-id\tcorpus-id\tscore\nq0\td1\t2\nq0\td2\t0\nq1\td3\t1\n"
    (tmp_path / "c/qrels/train.tsv").write_text(judged)
    return tmp_path / "c"


def test_lines_of_unicode_white_space_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\u3000\n\xa0 \n\u200b\u200b\n\x0c\n two \n", encoding="utf-8")
    assert list(sources.read_lines(tmp_path / "a.txt")) == [("1", "one"), ("6", " two ")]


@pytest.mark.parametrize("judgement", ["q7\td1\t1", "q1\td7\t2.0"])
def test_judgements_of_missing_texts_are_left_out(beir, capsys, judgement):
    whole = list(BeirFolder(beir).pairs("train"))
    with (beir / "qrels/train.tsv").open("a") as file:
        file.write(judgement + "\n")
    assert list(BeirFolder(beir).pairs("train")) == whole
    note = "note: judgements of queries or documents that the collection lacks, left out: 1"
    assert capsys.readouterr().err == f"{note} (first: {beir}/qrels/train.tsv:5)\n"
    with pytest.raises(BadInputError, match=r"train.tsv:5: judgement for an unknown"):
        list(BeirFolder(beir, OnBadInput(strict=True)).pairs("train"))


def test_a_relevant_document_without_text_is_malformed(beir):
    with (beir / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "empty", "text": "\\u200b"}\n')  # no tokenizer has a token for it
    with (beir / "qrels/train.tsv").open("a") as file:
        file.write("q1\tempty\t1\n")
    reason = r"train\.tsv:5: the relevant document has neither title nor text: 'empty'"
    with pytest.raises(BadInputError, match=reason):
        list(BeirFolder(beir).pairs("train"))
    collector = OnBadInput("skip")
    assert len(list(BeirFolder(beir, collector).pairs("train"))) == 2
    assert collector.skipped.total() == 1

import json
from pathlib import Path

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.evaluate import evaluate
from jaxir.evaluation.collection import read_collection
from jaxir.evaluation.judgements import read_judgements
from jaxir.evaluation.question_sets import read_cqadupstack, read_eproduct, read_quora
from jaxir.evaluation.retrieval_metrics import parse_metrics
from jaxir.evaluation.senteval_files import TASKS, read_senteval
from jaxir.evaluation.sts_files import read_sts
from tests.beir_folder import write_jsonl
from tests.evaluation.published_files import (
    BEIR,
    CORPUS,
    IR,
    QUERIES,
    RELEASE,
    RUN,
    STS_HEADER,
    TREC,
    YEAR,
    posts,
    senteval_files,
    write,
)

QIDS = "qid\tquestion\tduplicate_qids\n"
QRELS = "query-id\tcorpus-id\tscore\n"
FOLDER = {"corpus.jsonl": CORPUS, "queries.jsonl": QUERIES, "qrels/test.tsv": f"{QRELS}1\t1\t1\nb\t1\t1\n"}


def quora(folder: Path) -> None:
    read_quora(folder, strict=True)


def forums(folder: Path) -> None:
    read_cqadupstack(folder, strict=True)


def qrels(folder: Path) -> None:
    read_judgements(folder / "qrels")


@pytest.mark.parametrize(
    ("read", "files", "sentence"),
    [
        (read_collection, FOLDER | {"qrels/test.tsv": "b\t9\t1\n"}, r"test\.tsv: .* none of the documents f"),
        (read_collection, FOLDER | {"qrels/test.tsv": "zz\t1\t1\n"}, r"test\.tsv: .* none of the queries fo"),
        (read_collection, FOLDER | {"qrels/test.tsv": ""}, r"test\.tsv: the file is empty"),
        (read_collection, FOLDER | {"corpus.jsonl": CORPUS + '{"_id": "1", "text": "x"}'}, r"jsonl:5: dup"),
        (quora, IR | {"corpus.tsv": "qid\tquestion\n1\ta\tb\n"}, "corpus.tsv:2: expected 2 columns .* found"),
        (quora, IR | {"corpus.tsv": "qid\tquestion\n1\ta\n1\tb\n"}, "corpus.tsv:3: duplicate id '1'"),
        (quora, IR | {"corpus.tsv": "1\ta\n2\tb\n"}, "corpus.tsv:1: a header is missing: .* question, '1'"),
        (quora, IR | {"test-queries.tsv": f"{QIDS}4\ta\t1,99\n"}, "queries.tsv:2: '99' is neither in corpus"),
        (quora, IR | {"test-queries.tsv": f"{QIDS}4\ta\t\n"}, "queries.tsv: no question in it has a duplica"),
        (quora, {"quora_duplicate_questions.tsv": RELEASE.replace("\t1\n", "\t0\n")}, "tsv: no question in"),
        (quora, {"quora_duplicate_questions.tsv": RELEASE + "4\t1\t2\ta\tb\tyes\n"}, ":7: expected"),
        (quora, {"quora_duplicate_questions.tsv": RELEASE.partition("\n")[2]}, ":1: expected the"),
        (quora, {"quora_duplicate_questions.tsv": RELEASE + '4\t1\t2\ta\t"b\n'}, ":7: unexpected end of dat"),
        (quora, {}, r"no questions of Quora: .*quora_duplicate_questions\.tsv \(Quora's own"),
        (read_eproduct, {}, r"has no eProduct: expected a BEIR folder: corpus\.jsonl with the"),
        (forums, {"gis/gis_questions.json": "{"}, "gis_questions.json: not valid JSON"),
        (forums, {"gis/gis_questions.json": '{"1": {"title": "a"}}'}, "post '1' needs the texts title, body"),
        (forums, {"gis/gis_questions.json": json.dumps(posts({3: ["99"]}, 3))}, "lists the duplicate '99',"),
        (forums, {"gis/gis_questions.json": json.dumps(posts({}, 3))}, "questions.json: no question in it h"),
        (forums, {}, r"none of the forums android, .*: .*nlp\.cis\.unimelb\.edu\.au"),
        (read_sts, YEAR | {"STS.input.forums.txt": "0\t1\n\n0 2\n0\t3\n\n"}, "forums.txt:3: expected 2 colu"),
        (read_sts, YEAR | {"STS.gs.forums.txt": "5\n\n3\nfour\n"}, "forums.txt:4: the score is not a number"),
        (read_sts, YEAR | {"STS.gs.forums.txt": "5\n\n3\n4\n\n1\n"}, "gs.forums.txt: it has 6 lines, but ST"),
        (read_sts, YEAR | {"STS.gs.forums.txt": "5\n\n3\n"}, "3 lines, but STS.input.forums.txt has 5"),
        (read_sts, YEAR | {"STS.input.new.txt": "a\tb\n"}, "STS.gs.new.txt is missing"),
        (read_sts, YEAR | {"forums.tsv": STS_HEADER}, "of STS.input.forums.txt and forums.tsv are both call"),
        (read_sts, YEAR | {"STS.input.all.txt": "a\tb\n"}, "'all' is the name of a summary"),
        (read_sts, {"sts-test.csv": "main\tfile\t2012\t1\ta\tb\n"}, "sts-test.csv:1: expected 7 columns or"),
        (read_sts, {"SICK_train.txt": "1\ta\tb\t4.5\n"}, "SICK_train.txt:1: the header must begin with pair"),
        (read_sts, {"x.tsv": "5\ta\tb\n"}, "x.tsv:1: the header must be"),
        (read_sts, {"x.tsv": STS_HEADER + "5\ta\n"}, "x.tsv:2: expected 3 columns"),
        (read_sts, {"x.tsv": STS_HEADER + "4\ta\tb\nnan\ta\tb\n"}, "x.tsv:3: the score is not a number"),
        (read_sts, {"x.tsv": STS_HEADER + "4\t\tb\n"}, "x.tsv:2: a sentence is empty"),
        (read_sts, {"x.tsv": STS_HEADER.encode() + b"4\t\xff\tb\n"}, "x.tsv:2: not UTF-8"),
        (read_sts, {"x.tsv": STS_HEADER + "4\ta\tb\n"}, "x.tsv: all pairs have the same score"),
        (read_sts, {"x.tsv": STS_HEADER}, "x.tsv: the file has no usable record"),
        (read_sts, {}, r"no rated pairs: expected NAME\.tsv .*ixa2\.si\.ehu\.eus.*SICK_test_annotated"),
        (lambda folder: read_sts(folder / "absent"), {}, "absent is neither a folder nor a file of rated pa"),
        (read_senteval, {}, r"none of .* \(MR/rt-polarity.pos, .*MRPC/.*test.txt\): the script data/downst"),
        (qrels, {"qrels": "\n \n"}, "qrels: the file has no usable record"),
    ],
)  # fmt: skip
def test_bad_collections_cost_one_sentence(tmp_path, read, files, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        read(write(tmp_path, files))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("SST/binary/sentiment-dev", "fine\t1\nno label\n", "sentiment-dev:2: expected 2 columns .* found 1"),
        ("SST/binary/sentiment-dev", "fine\t1\nbad\t2\n", "dev:2: the label must be 0 or 1, not '2'"),
        ("SST/binary/sentiment-test", "fine\t1\n", "part 'test' of SST2 only has one label"),
        ("MPQA/mpqa.pos", b"a\nb\0\n", "mpqa.pos:2: the file contains a NUL byte"),
        ("TREC/TREC_10.label", "NUM:a how far ?\nNUMB:b why ?\n", "TREC_10.label:2: unknown label 'NUMB'"),
        ("TREC/TREC_10.label", "NUM how\n", "TREC_10.label:1: expected COARSE_LABEL:FINE_LABEL, a space"),
        ("MRPC/msr_paraphrase_test.txt", "Quality\n1\t2\t3\ta\n", "test.txt:2: expected 5 columns .* found"),
        ("MPQA/mpqa.neg", None, "MPQA needs MPQA/mpqa.pos and MPQA/mpqa.neg in .*, which lacks MPQA/mpqa.ne"),
    ],
)  # fmt: skip
def test_damaged_transfer_tasks_say_where_and_why(tmp_path, file, content, sentence):
    whole = senteval_files()
    name = next(name for name, layout in TASKS.items() if file in layout.files)
    write(tmp_path, {other: whole[other] for other in TASKS[name].files} | {file: content})
    with pytest.raises(UserError, match=sentence):
        read_senteval(tmp_path)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ("nDGC@10", "did you mean 'nDCG'"),
        ("", "no metric given"),
        ("RR@0", "cannot be computed"),
        ("CappedR@0", "there is no metric 'CappedR@0'"),
        ("Accuracy@5", "cannot be computed"),
        ("nDCG(foo=1)@10", "cannot be computed"),
        ("nDCG(dcg='exp-log2')@10", "cannot be computed"),
    ],
)
def test_unknown_metrics_are_refused(metrics, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        parse_metrics(metrics)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "content", "sentence"),
    [
        ("test.tsv", QRELS, "no usable record"),
        ("test.tsv", BEIR + "q1\td7\n", "test.tsv:6:"),
        ("test.tsv", BEIR + "q1\td7\t1_0\n", "test.tsv:6: the score is not an integer: '1_0'"),
        ("test.tsv", BEIR + "q1\td1\t1\n", "test.tsv:6: contradicts"),
        ("test.tsv", TREC + "q1 0 d7\n", "test.tsv:5: expected 4 columns"),
        ("test.tsv", TREC + "q1 0 d7 x\n", "test.tsv:5: the score is not an integer"),
        ("test.tsv", TREC + "q1 0 d1 1\n", "test.tsv:5: contradicts"),
        ("test.tsv", "other\td1\t1\n", "no results for any judged query"),
        ("run.trec", "", "run.trec: the file is empty"),
        ("run.trec", RUN[:-3], "run.trec:6: a run line has 6 columns"),
        ("run.trec", RUN + "q1 Q0 d2 9 0.1 a\n", "run.trec:7:"),
    ],
)
def test_bad_runs_and_judgements_cost_one_sentence(tmp_path, capsys, changed, content, sentence):
    write(tmp_path, {"run.trec": RUN, "test.tsv": BEIR} | {changed: content})
    flags = [f"--run={tmp_path}/run.trec", f"--qrels={tmp_path}/test.tsv", f"--output={tmp_path}/out.json"]
    assert cli.main("jaxir.evaluate:evaluate", flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.trec", "test.tsv"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "got neither"),
        ({"run": "r"}, "give --run and --qrels"),
        ({"run": "r", "answers": "a"}, "got --run and --answers"),
        ({"predictions": "p"}, "got --predictions"),
        ({"run": ["a.trec", "b/a.trec"], "qrels": "q"}, "two systems are called 'a'"),
        ({"run": "r", "qrels": "q", "model": "m"}, "give --run and --qrels"),
        ({"run": "r", "qrels": "q", "answers_in": "document"}, "only applies to --run with --answers"),
        ({"predictions": "p", "answers": "a", "metrics": "P@1"}, "--metrics only applies to retrieval"),
        ({"predictions": "p", "answers": "a", "depth": 3}, "--depth only applies to a --dataset: leave"),
        ({"model": "m", "dataset": "DIR"}, "beir:DIR or sts:DIR"),
        ({"model": "m", "dataset": "bier:DIR"}, "did you mean 'beir'"),
        ({"model": "m", "dataset": "sts:DIR", "baseline": "r"}, "--baseline only applies to one collection"),
        ({"model": "m", "dataset": "cqadupstack:DIR", "baseline": "r"}, "one collection, not to cqadupstack"),
        ({"model": "m", "dataset": "senteval:DIR", "per_query": True}, "applies to retrieval from one c"),
        ({"run": "no.trec", "qrels": "no.tsv"}, r"no\.tsv"),
        ({"model": "m", "dataset": "beir:no/such"}, "no/such"),
        ({"model": "m", "dataset": "beir:no/such", "metrics": "nope"}, "no metric 'nope'"),
        ({"model": "m", "dataset": "beir:no/such", "depth": 99}, "needs 100 results per query, but d"),
        ({"model": "m", "dataset": "cqadupstack:no/such", "depth": 99}, "^R@100 needs 100 results"),
    ],
)  # fmt: skip
def test_flags_that_do_not_go_together(given, sentence):
    with pytest.raises(UserError, match=sentence):
        evaluate(**given)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"_id": "q0", "outputs": "x"}', "b.jsonl:1: 'outputs' is not a list of texts"),
        ('{"_id": "q0", "outputs": []}\n{"_id": "q0", "outputs": []}', "b.jsonl:2: a query occurs twice"),
        ('{"_id": "other", "outputs": ["x"]}', "check that --predictions and --answers"),
    ],
)
def test_bad_files_of_written_answers_cost_a_sentence(tmp_path, line, sentence):
    (tmp_path / "b.jsonl").write_text(line)
    write_jsonl(tmp_path / "answers.jsonl", [{"_id": "q0", "answers": ["x"]}])
    with pytest.raises(UserError, match=sentence):
        evaluate(predictions=f"{tmp_path}/b.jsonl", answers=f"{tmp_path}/answers.jsonl")


@pytest.mark.parametrize(
    ("run", "judged", "sentence"),
    [
        ("x1 Q0 d1 1 2.0 a\n", "q1\td1\t1\nq2\td1\t1\n", "the run has no results for any judged query"),
        ("q1 Q0 d1 1 2.0 a\n", "q1\td1\t1\n", "a paired test needs at least two queries"),
    ],
)
def test_a_baseline_that_cannot_be_compared_with_costs_no_encoding(tmp_path, run, judged, sentence):
    write(tmp_path, {"qrels/test.tsv": QRELS + judged, "base.trec": run})
    write_jsonl(tmp_path / "corpus.jsonl", [{"_id": "d1", "text": "a"}])
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q1", "text": "a"}, {"_id": "q2", "text": "b"}])
    given = {"model": str(tmp_path / "no model"), "dataset": f"beir:{tmp_path}"}
    with pytest.raises(UserError, match=sentence):
        evaluate(**given, baseline=str(tmp_path / "base.trec"))
    with pytest.raises(UserError, match="no model"):
        evaluate(**given)


@pytest.mark.parametrize(
    "again", ["twice={0}/./run.trec", "twice={0}/link.trec", "twice={0}/c.trec+{0}/c.trec"]
)
def test_no_file_is_counted_twice(tmp_path, again):
    write(tmp_path, {"run.trec": RUN, "c.trec": RUN, "test.tsv": BEIR})
    (tmp_path / "link.trec").symlink_to("run.trec")
    runs = [str(tmp_path / "run.trec"), again.format(tmp_path)]
    with pytest.raises(UserError, match=r"(run|c).trec is given twice"):
        evaluate(run=runs, qrels=str(tmp_path / "test.tsv"))


def test_a_baseline_alone_and_an_output_that_is_read_are_refused(tmp_path, capsys):
    write(tmp_path, {"run.trec": RUN, "test.tsv": BEIR})
    flags = [f"--run={tmp_path}/run.trec", f"--qrels={tmp_path}/test.tsv"]
    for more, sentence in (
        (f"--baseline={tmp_path}/run.trec", "run is the only system"),
        (f"--output={tmp_path}/run.trec", "is also the input of --run"),
    ):
        assert cli.main("jaxir.evaluate:evaluate", [*flags, more]) == 1
        assert sentence in capsys.readouterr().err

import csv
import gzip
import json
import random
import re
import sys

import pyarrow
import pytest
from pyarrow import parquet

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.pair_table import PairColumns, PairTable
from jaxir.data.sets.own_pairs import Pairs
from jaxir.data.sets.pair_sources import BeirPairs, TevatronPairs
from tests.beir_folder import write_jsonl

SPLITS = ("train", "dev", "test")
ROWS = [
    (f"how do I {verb} a {thing}?", f'To {verb} it, take the "{thing}", then\n{verb} on.')
    for verb in ("boil", "mend", "sell", "paint", "draw", "fold", "wash", "lend")
    for thing in ("kettle", "boat", "tree")
]


def prepare(*flags):
    return cli.main("jaxir.prepare:prepare", flags)


@pytest.fixture
def made(tmp_path):
    def run(path, *flags, name="out"):
        assert prepare(f"--dataset=pairs:{path}", f"--output={tmp_path / name}", *flags) == 0
        return tmp_path / name

    return run


def mined_of(folder):
    return list(TevatronPairs(path=str(folder / "negatives.jsonl")).examples(OnBadInput()))


def texts_of(negatives):
    return [text for _, text in negatives]


def pairs_of(folder, split):
    return list(BeirPairs(directory=str(folder), split=split).examples(OnBadInput()))


def write(path, names, rows):
    kind = path.name.split(".")[1]
    if kind == "parquet":
        parquet.write_table(pyarrow.table(dict(zip(names, zip(*rows, strict=True), strict=True))), path)
    else:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "wt", newline="", encoding="utf-8") as file:
            if kind == "json":
                json.dump([dict(zip(names, row, strict=True)) for row in rows], file, indent=2)
            elif kind == "jsonl":
                file.writelines(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
            elif kind == "csv":
                csv.writer(file).writerows([names, *rows])
            else:
                file.writelines("\t".join(row) + "\n" for row in [names, *rows])
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.tsv", "a.csv.gz", "a.parquet"])
def test_every_format_gives_the_same_folder(made, tmp_path, capsys, name):
    rows = [(q, p.replace("\n", " ")) for q, p in ROWS] if ".tsv" in name else ROWS
    out = made(write(tmp_path / name, ["question", "answer"], rows))
    splits = {split: pairs_of(out, split) for split in SPLITS}
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 20, "dev": 2, "test": 2}
    assert sorted((p.query, p.passage) for pairs in splits.values() for p in pairs) == sorted(rows)
    with (out / "corpus.jsonl").open() as corpus:
        assert list(json.loads(next(corpus))) == ["_id", "title", "text"]
    # Which queries are held out depends only on the texts, and stays the same between versions.
    assert {p.query for p in splits["test"]} == {"how do I fold a boat?", "how do I wash a tree?"}
    said = capsys.readouterr().out
    assert "query = question, passage = answer\n" in said
    assert "  train        20 pairs of        20 queries" in said
    assert f"--gin_file=gin/pairs.gin --data={out}" in said


def test_no_text_is_in_two_splits(made, tmp_path):
    rng = random.Random(0)
    records = [(f"Query {rng.randrange(300)}", f"passage {rng.randrange(300)}") for _ in range(250)]
    # Case and white space are ignored, so these are the same queries again.
    records += [(q.upper() + " ", p) for q, p in records[:50]]
    seen = {}
    for order, (name, seed) in enumerate([("a.tsv", 0), ("b.tsv", 0), ("c.tsv", 1)]):
        random.Random(order).shuffle(records)
        path = write(tmp_path / name, ["query", "passage"], records)
        out = made(path, "--dev=0.1", "--test=30", f"--seed={seed}", name=name[0])
        seen[name[0]] = {s: sorted((p.query, p.passage) for p in pairs_of(out, s)) for s in SPLITS}
    assert seen["a"] == seen["b"] != seen["c"]
    for splits in seen.values():
        for place, normal in ((0, str.casefold), (1, str)):
            sides = [{normal(pair[place]) for pair in splits[s]} for s in SPLITS]
            assert not sides[0] & sides[1] and not sides[0] & sides[2] and not sides[1] & sides[2]
        queries = {s: len({pair[0] for pair in splits[s]}) for s in SPLITS}
        assert queries["test"] == 30 and 19 <= queries["dev"] <= 21


def test_groups_that_are_too_large_stay_in_training(made, tmp_path, capsys):
    faq = [(f"question {i}", "the one answer" if i < 40 else f"answer {i}") for i in range(50)]
    path = write(tmp_path / "faq.csv", ["question", "answer"], faq)
    out = made(path, "--test=20", "--dev=0")
    assert BeirFolder(out).splits == ["test", "train"]
    assert len(pairs_of(out, "test")) == 10
    assert {p.passage for p in pairs_of(out, "train")} == {"the one answer"}
    assert capsys.readouterr().err == ""
    made(path, "--test=30", "--dev=0", name="b")
    assert capsys.readouterr().err == (
        "warning: test should have 30 queries, but fewer can be held out, because 40 queries share passages"
        " with each other and stay in one split\n"
    )
    # --test and --dev are numbers of queries from 1 on; below 1 they are shares, rounded up.
    out = made(path, "--test=1", "--dev=0.05", name="d")
    assert [len(pairs_of(out, split)) for split in ("test", "dev")] == [1, 3]
    path = write(tmp_path / "one.csv", ["question", "answer"], faq[:40])
    for flags, message in (
        ([], "no test queries can be held out"),
        (["--test=40"], "40 for test and 4 for dev would be held out of 40"),
        (["--test=1.5"], "--test must be a number of queries, or a share"),
    ):
        assert prepare(f"--dataset=pairs:{path}", f"--output={tmp_path / 'c'}", *flags) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_useless_rows_are_left_out_and_counted(made, tmp_path, capsys):
    odd = [("\u200b", "p"), ("q", "\ufeff "), (" same ", "same"), ROWS[0], (ROWS[1][0], None)]
    path = write(tmp_path / "a.jsonl", ["query", "positive"], [*ROWS, *odd])
    with path.open("a") as file:
        file.write('{"query": "no passage at all"}\n')
    out = made(path)
    assert capsys.readouterr().err.splitlines() == [
        f"skipped 3 records: without a passage (first: {path}:26)",
        f"skipped 1 record: without a query (first: {path}:25)",
        f"skipped 1 record: the passage is the query (first: {path}:27)",
        f"skipped 1 record: a pair seen before (first: {path}:28)",
    ]
    assert sum(len(pairs_of(out, split)) for split in SPLITS) == len(ROWS)
    with pytest.raises(UserError, match="pair 0: the passage must be a text"):
        Pairs(["a question"], ["\u200b"])


def test_ids_titles_and_negatives(made, tmp_path, capsys):
    records = [
        {"qid": n, "Question": q, "title": f"T{n % 8}", "context": f"context {n % 8}", "docid": f"d{n % 8}",
         "negatives": [f"context {n % 8}", f"wrong {n % 8}"] if n % 2 else [], "label": 1}
        for n, (q, _) in enumerate(ROWS)
    ]  # fmt: skip
    records.append(records[3] | {"docid": "another id of d3"[:7]})  # the same pair under another id
    out = made(write_jsonl(tmp_path / "a.jsonl", records), "--test=3", "--dev=3")
    said = capsys.readouterr().out
    assert "query = Question, passage = context, negatives = negatives, title = title, query_id = qid" in said
    assert "\n  not used: label\n" in said
    documents = {d.id: (d.title, d.text) for d in BeirFolder(out).corpus()}
    assert documents["d5"] == ("T5", "context 5")
    expected = [*(f"context {n}" for n in range(8)), *(f"wrong {n}" for n in (1, 3, 5, 7))]
    assert sorted(text for _, text in documents.values()) == expected
    assert {q.id for q in BeirFolder(out).queries()} == {str(n) for n in range(len(ROWS))}
    mined = mined_of(out)
    trained = {p.query_id: p for p in pairs_of(out, "train")}
    assert {p.query_id for p in mined} == {q for q in trained if int(q) % 2}
    for pair in mined:
        assert pair[:4] == trained[pair.query_id][:4]
        assert pair.passage == f"T{int(pair.query_id) % 8} {documents[pair.passage_id][1]}"
        assert texts_of(pair.negatives) == [f"wrong {int(pair.query_id) % 8}"]


def test_lists_of_passages_and_tevatrons_objects(tmp_path):
    records = [{"query": q, "pos": [p, f"also {p}"], "neg": [f"not {p}"]} for q, p in ROWS]
    table = PairTable(write_jsonl(tmp_path / "bge.jsonl", records), PairColumns())
    pairs = [p.example for p in table.pairs(OnBadInput())]
    assert [(p.query, p.passage) for p in pairs[:2]] == [ROWS[0], (ROWS[0][0], f"also {ROWS[0][1]}")]
    assert len(pairs) == 2 * len(ROWS) and pairs[1].negatives[0][1] == f"not {ROWS[0][1]}"
    record = {"query_id": "q1", "query": "a query", "negative_passages": [{"docid": "n", "text": "no"}],
              "positive_passages": [{"docid": "p", "title": "T", "text": "x"}]}  # fmt: skip
    path = write_jsonl(tmp_path / "tevatron.jsonl", [record])
    theirs = list(TevatronPairs(path=str(path)).examples(OnBadInput()))
    assert [p.example for p in PairTable(path, PairColumns()).pairs(OnBadInput())] == theirs


def test_a_field_that_only_late_lines_have_is_found(made, tmp_path, capsys):
    """Regression: only the first thousand lines were searched for fields."""
    records = [{"query": f"q{n}", "passage": f"p{n}"} for n in range(1500)]
    late = [{"query": q, "passage": p, "neg": [f"not {p}"], "qid": n} for n, (q, p) in enumerate(ROWS)]
    out = made(write_jsonl(tmp_path / "a.jsonl", [*records, *late]), "--dev=0", "--test=0")
    assert "query = query, passage = passage, negatives = neg, query_id = qid" in capsys.readouterr().out
    found = [(m.query_id, m.passage, texts_of(m.negatives)) for m in mined_of(out)]
    assert found == [(str(n), p, [f"not {p}"]) for n, (_, p) in enumerate(ROWS)]


def test_a_repeated_pair_keeps_all_its_negatives(made, tmp_path, capsys):
    """Regression: triplets have a line for each negative; all but the first were left out as repeated."""
    rows = [(q, p, f"{number} {p}") for number in (1, 2, 3) for q, p in ROWS]
    records = [dict(zip(("anchor", "positive", "negative"), row, strict=True)) for row in rows]
    path = write_jsonl(tmp_path / "a.jsonl", [*records, records[0], {**records[0], "negative": None}])
    out = made(path, "--test=4", "--dev=4")
    said, err = capsys.readouterr()
    assert err == f"skipped 2 records: a pair seen before (first: {path}:{len(records) + 1})\n"
    assert f"negatives.jsonl: {len(ROWS) - 8} of the pairs to train on, with their negatives" in said
    trained = [(p.query, p.passage) for p in pairs_of(out, "train")]
    assert len(set(trained)) == len(trained) == len(ROWS) - 8
    found = [(m.query, m.passage, texts_of(m.negatives)) for m in mined_of(out)]
    assert found == [(q, p, [f"{n} {p}"]) for n in (1, 2, 3) for q, p in trained]
    assert {d.text for d in BeirFolder(out).corpus()} >= {f"3 {p}" for _, p in ROWS}
    read = Pairs.read(path)
    assert list(zip(read.queries, read.passages, strict=True)) == ROWS
    assert read.negatives == [[f"{n} {p}" for n in (1, 2, 3)] for _, p in ROWS]


def test_a_relevant_passage_is_no_negative_of_its_query(made, tmp_path, capsys):
    """If a query has two answers, BM25 may find each as a negative for the other's pair."""
    answers = [(q, p, [f"also {p}", f"not {p}"]) for q, p in ROWS]
    answers += [(q, f"also {p}", [p, f"not {p}"]) for q, p in ROWS]
    path = write_jsonl(tmp_path / "a.jsonl", [{"query": q, "pos": p, "neg": n} for q, p, n in answers])
    mined = mined_of(made(path, "--test=4", "--dev=4"))
    note = f"{path}: {2 * len(ROWS)} negatives left out, because another record has them as relevant passages"
    assert capsys.readouterr().err.startswith(note)
    assert len(mined) == 2 * (len(ROWS) - 8)
    read = Pairs.read(path)
    assert capsys.readouterr().err.startswith(note)
    for negatives in [*(texts_of(m.negatives) for m in mined), *read.negatives]:
        assert len(negatives) == 1 and negatives[0].startswith("not ")


def test_a_positive_passage_is_no_negative_in_its_tevatron_line(tmp_path):
    passages = {name: {"docid": name, "text": f"text {name}"} for name in "abc"}
    scored = [{**passages[name], "score": float(n)} for n, name in enumerate("abc")]
    record = {"query_id": "q", "query": "a query"}
    record |= {"positive_passages": scored[:2], "negative_passages": scored}
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    pairs = list(TevatronPairs(path=str(path)).examples(OnBadInput()))
    # A pair's own passage stays among its negatives; batches mask it.
    assert [(p.passage_id, [i for i, _ in p.negatives], p.negative_scores) for p in pairs] == [
        ("a", ["a", "c"], (0.0, 2.0)),
        ("b", ["b", "c"], (1.0, 2.0)),
    ]


def test_a_file_without_a_header_is_read_by_number(made, tmp_path, capsys):
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{n}\t{q}\t{p!r}\n" for n, (q, p) in enumerate(ROWS)))
    assert prepare(f"--dataset=pairs:{path}", f"--output={tmp_path / 'out'}") == 1
    assert '(for a file without a header line: --query="1" --passage="2")\n' in capsys.readouterr().err
    out = made(path, "--query=2", "--passage=3", "--query_id=1")
    expected = {str(n): q for n, (q, _) in enumerate(ROWS)}
    assert {q.id: q.text for q in BeirFolder(out).queries()} == expected


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("a.txt", "x", (), "the name must end in one of .jsonl"),
        ("a.jsonl", '["a"]\n', (), "a.jsonl:1: an item of the array is not an"),
        ("a.jsonl", '{"a": "1", "b": "2"}\n', (), "no column has a usual name for the query.*has: a, b$"),
        ("a.csv", "question,answer,context\n", (), "several columns could be the passage: answer, context"),
        ("a.tsv", "Question\tAnswer\na\tb\n", ("--query=1", "--passage=2"), "a.tsv:1: column names instead"),
        ("a.csv", "query,answer\n", ("--passage=anwser",), "no column 'anwser', .* did you mean 'answer'"),
        ("a.csv", "query,query\n", (), "a.csv:1: two columns are called 'query'"),
        ("a.csv", "query,answer\na,b\n", ("--splits=test",), "--splits only applies to published data"),
        ("a.jsonl", '{"query": "a", "answer": 3}\n', (), "a.jsonl:1: field 'answer' is not a string but"),
        ("a.csv", 'query,answer\na,b\n"c\nd",e,f\n', (), r"a.csv:3: expected 2 columns .query.* found 3"),
        ("a.csv", 'query,answer\na,"b\nc\n', (), "a.csv:2: not valid CSV .unexpected end of data"),
        ("a.csv", b"query,answer\na,caf\xe9\n", (), "a.csv:2: not UTF-8"),
        ("a.tsv", "query\tanswer\n \tb\n", (), "a.tsv: the file has no usable record"),
        ("a.parquet", "PAR1 no more", (), "a.parquet: not a Parquet file"),
        ("a.csv", "query,answer\na,b\n", (), "would be held out of 1 distinct queries, so none would remain"),
    ],
)  # fmt: skip
def test_unusable_files_are_refused_and_nothing_is_written(tmp_path, capsys, name, content, flags, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert prepare(f"--dataset=pairs:{tmp_path / name}", f"--output={tmp_path / 'out'}", *flags) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: ") and re.search(message, err.splitlines()[-1])
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_malformed_records_are_skipped_and_counted_once(made, tmp_path, capsys):
    path = write(tmp_path / "a.csv", ["query", "answer"], ROWS)
    lines = path.read_bytes()
    path.write_bytes(lines + b'only one column\n"oops"x,b\nlast,caf\xe9\nthe end,is here\n')
    out = made(path, "--on_bad_input=skip")
    first = lines.count(b"\n") + 1
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"skipped 1 record: expected 2 columns (query, answer) (first: {path}:{first})",
        f"skipped 1 record: not UTF-8 (first: {path}:{first + 2})",
        f"skipped 1 record: not valid CSV (first: {path}:{first + 1})",
    ]
    assert sum(len(pairs_of(out, split)) for split in SPLITS) == len(ROWS) + 1


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    write(tmp_path / "a.parquet", ["query", "answer"], ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert prepare(f"--dataset=pairs:{tmp_path / 'a.parquet'}", f"--output={tmp_path / 'out'}") == 1
    assert re.search(r"pyarrow is needed to read Parquet: .*install.*\[parquet\]", capsys.readouterr().err)

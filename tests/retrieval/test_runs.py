"""TREC run files."""

import gzip

import numpy as np
import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.sources import read_corpus
from jaxir.retrieval.ranking.runs import read_run, read_run_by_query, write_run


def test_round_trip_keeps_scores_and_order(tmp_path):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=1000).astype(np.float32)
    run = {f"q{q}": [(f"d{i}", s) for i, s in enumerate(scores[q::4])] for q in range(4)}
    write_run(tmp_path / "a" / "run.trec", run, tag="mine")
    assert read_run(tmp_path / "a" / "run.trec").keys() == run.keys()
    for query_id, answers in read_run(tmp_path / "a" / "run.trec").items():
        assert {d: np.float32(s) for d, s in answers.items()} == dict(run[query_id])
        assert list(answers.values()) == sorted(answers.values(), reverse=True)
    query_id, q0, _, rank, _, tag = (tmp_path / "a" / "run.trec").read_text().splitlines()[0].split()
    assert (query_id, q0, rank, tag) == ("q0", "Q0", "1", "mine")


def test_scores_that_differ_stay_different(tmp_path):
    near = np.float32(0.7)
    scores = [near]
    for _ in range(50):
        scores.append(np.nextafter(scores[-1], np.float32(1)))
    doubles = [0.1, np.nextafter(0.1, 1)]
    run = {"q": [(f"d{i}", s) for i, s in enumerate(scores)], "p": {"a": doubles[0], "b": doubles[1]}}
    write_run(tmp_path / "run", run)
    run = read_run(tmp_path / "run")
    assert len(set(run["q"].values())) == 51
    assert list(run["q"]) == [f"d{i}" for i in range(50, -1, -1)]
    assert list(run["p"]) == ["b", "a"]


def test_ties_are_written_as_trec_eval_ranks_them(tmp_path):
    write_run(tmp_path / "run", {"q": [("a", 1.0), ("c", 1.0), ("b", 2.0), ("d", 1.0)]})
    assert list(read_run(tmp_path / "run")["q"]) == ["b", "d", "c", "a"]
    write_run(tmp_path / "run", {"q": [], "p": [("a", 1.0)]})
    assert read_run(tmp_path / "run") == {"p": {"a": 1.0}}, "a query without answers is not in the file"


def test_ids_with_format_characters_come_back_as_they_were(tmp_path):
    """Zero-width joiners occur in Persian and Hindi words, and in emoji."""
    ids = ["می\u200cخواهم", "क्\u200dष", "\u200eab\u00adc", "\U0001f469\u200d\U0001f4bb", "\ue000"]
    run = {query_id: {i: float(n) for n, i in enumerate(ids)} for query_id in ids}
    write_run(tmp_path / "run", run)
    assert read_run(tmp_path / "run") == run
    lines = "".join(f'{{"_id": "{i}", "text": "x"}}\n' for i in ids)
    (tmp_path / "corpus.jsonl").write_text(lines, encoding="utf-8")
    assert [d.id for d in read_corpus(tmp_path / "corpus.jsonl")] == ids


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"q": [("a b", 1.0)]}, "'a b' cannot be written to a run file"),
        ({"q 1": [("a", 1.0)]}, "query id 'q 1'"),
        ({"": [("a", 1.0)]}, "query id ''"),
        ({"q": [("a\u2003b", 1.0)]}, r"it has U\+2003 EM SPACE"),
        ({"q": [("a\x7f", 1.0)]}, r"it has U\+007F"),
        ({"q": [("a", float("nan"))]}, "is nan"),
        ({"q": [("a", float("inf"))]}, "is inf"),
        ({"q": [("a", -1e39)]}, "the score -1e[+]39 of document 'a' for query 'q' is too large"),
        ({"q": [("a", 1.0), ("a", 2.0)]}, "same document twice"),
    ],
)
def test_write_run_refuses_malformed_ids_scores_and_duplicates(tmp_path, run, message):
    with pytest.raises(UserError, match=message):
        write_run(tmp_path / "run", {"fine": [("a", 1.0)], **run})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"q Q0 a 1 0.5 t\nq Q0 b 2 0.4\n", r"run:2: a run line has 6 columns .* this line has 5"),
        (b"q Q0 a 1 0.5 t\nq Q0 b 2", r"run:2: .* this line has 4: the file ends in the middle of this line"),
        (b"q Q0 a 1 high t\n", r"run:1: the score 'high' must be a finite number"),
        (b"q Q0 a 1 nan t\n", r"run:1: the score 'nan'"),
        (b"q Q0 a 1 1e999 t\n", r"run:1: the score '1e999'"),
        (b"q Q0 a 1 9e38 t\nq Q0 b 2 8e38 t\n", r"run:1: the score '9e38' is too large: .* in float32"),
        (b"q Q0 a 1 1_0 t\n", r"run:1: the score '1_0'"),
        ("q Q0 a 1 ١٢ t\n".encode(), r"run:1: the score '١٢'"),
        (b"\n \n", r"run: the file is empty"),
        (b"q Q0 a 1 0.5 t\nq Q0 a 2 0.4 t\n", r"run:2: document 'a' occurs twice"),
        (b"q Q0 \xff 1 0.5 t\n", r"run:1: not UTF-8"),
    ],
)
def test_read_run_refuses_malformed_lines(tmp_path, content, message):
    (tmp_path / "run").write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("text", ["1", "-1.5", "+2.", ".5", "1e-7", "-1.5E+3", "0"])
def test_read_run_takes_scores_in_any_notation(tmp_path, text):
    (tmp_path / "run").write_text(f"q Q0 a 1 {text} t\n")
    assert read_run(tmp_path / "run") == {"q": {"a": float(text)}}


def by_query(path):
    return dict(read_run_by_query(path))


def test_scattered_lines_a_missing_file_and_a_directory_are_refused(tmp_path):
    (tmp_path / "run").write_text("p Q0 a 1 2 t\nq Q0 b 1 1 t\np Q0 c 2 1 t\n")
    with pytest.raises(BadInputError, match="run:3: the lines of query 'p' are not consecutive: sort"):
        by_query(tmp_path / "run")
    for place, message in ((tmp_path / "absent", "no such run file"), (tmp_path, "is a directory")):
        with pytest.raises(UserError, match=message):
            read_run(place)


@pytest.mark.parametrize("read", [read_run, by_query])
def test_compressed_run_and_byte_order_mark_are_read(tmp_path, read):
    whole = gzip.compress(b"q Q0 a 1 0.5 t\nq Q0 b 2 0.25 t\n")
    (tmp_path / "run.gz").write_bytes(whole)
    assert read(tmp_path / "run.gz") == {"q": {"a": 0.5, "b": 0.25}}
    (tmp_path / "run").write_bytes(b"\xef\xbb\xbfq Q0 a 1 0.5 t\n")  # a run file with a byte order mark
    assert read(tmp_path / "run") == {"q": {"a": 0.5}}
    (tmp_path / "run.gz").write_bytes(whole[:-9])
    with pytest.raises(BadInputError, match="damaged gzip"):
        read(tmp_path / "run.gz")

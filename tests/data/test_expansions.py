"""Files of generated texts: every format, and malformed ones."""

import gzip
import json

import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.expansions import read_expansions
from jaxir.data.formats.lines import OnBadInput

IDS = ["d1", "d2", "d3"]


def lines(*texts: str) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


def record(**fields) -> str:
    return json.dumps(fields)


def read(path, ids=IDS, **how):
    return list(read_expansions(path, ids, **how))


@pytest.mark.parametrize(
    ("name", "pack", "id_field", "field"),
    [
        ("a.jsonl", bytes, "_id", "outputs"),
        ("a.jsonl.gz", gzip.compress, "id", "predicted_queries"),
    ],
)
def test_records_are_read_in_their_order(tmp_path, name, pack, id_field, field):
    found = [("d2", ["b", "b", "a b"]), ("d1", []), ("d3", ["ü"])]
    content = lines(*(record(**{id_field: i, field: outputs}) for i, outputs in found))
    (tmp_path / name).write_bytes(pack(content))
    assert read(tmp_path / name) == found


def test_records_in_several_files_are_one(tmp_path):
    for piece, i in enumerate(IDS):
        (tmp_path / f"d2q.jsonl{piece:03}.gz").write_bytes(
            gzip.compress(lines(record(id=i, predicted_queries=[f"q {i}"])))
        )
    (tmp_path / "README.txt").write_text("not read\n")
    assert read(tmp_path) == [(i, [f"q {i}"]) for i in IDS]


def test_pieces_of_doc2query_samples_are_joined(tmp_path):
    """Each sample has several files; other files are ignored."""
    for sample in range(12):
        name = f"predicted_queries_topk_sample{sample:03}.txt"
        (tmp_path / f"{name}000-1004000").write_bytes(lines(f"{sample} of d1", f"{sample} of d2"))
        (tmp_path / f"{name}001-1004000").write_bytes(lines(f"{sample} of d3"))
    (tmp_path / "SHA256SUMS").write_text("x\n")
    assert read(tmp_path) == [(i, [f"{sample} of {i}" for sample in range(12)]) for i in IDS]


def test_tabs_separate_outputs_of_a_line(tmp_path):
    path = tmp_path / "gen-test.txt"
    path.write_bytes(lines("one", " two\tthree ", "four\r"))
    assert read(path) == [("d1", ["one"]), ("d2", ["two", "three"]), ("d3", ["four"])]


def test_a_text_can_have_several_consecutive_lines(tmp_path):
    path = tmp_path / "gar-answer-nq-test.txt"
    path.write_bytes(lines(*(f"{i} {n}" for i in IDS for n in range(4))))
    assert read(path, lines_each=4) == [(i, [f"{i} {n}" for n in range(4)]) for i in IDS]


OK = [record(_id=i, outputs=["x"]) for i in IDS]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", lines("a", "b"), "a.txt: the file has 2 lines, but 3 texts with a line each have 3"),
        ("a.txt", lines(*"abcde"), "a.txt: the file has 5 lines, but 3 texts with a line each have 3"),
        ("a.txt", lines("a", "", "c"), "a.txt:2: an empty line"),
        ("a.json", lines('{"_id": "a"}', "b", "c"), "a.json:1: a JSON object: rename the file"),
        ("a.jsonl", lines('{"_id": "d1", "outputs": ["\\ud800 x"]}'), "holds half of a surrogate pair"),
        ("a.txt", lines("a", "b\t", "c"), "a.txt:2: an empty column"),
        ("a.jsonl", lines(*OK[:2]), "a.jsonl: no outputs for 1 of 3 texts (the first: 'd3')"),
        ("a.jsonl", lines(*OK, OK[1]), "a.jsonl:4: duplicate id 'd2'"),
        ("a.jsonl", lines(*OK, record(_id="d4", outputs=[])), "4: no text has the id 'd4'"),
        ("a.jsonl", lines(record(_id="d1", text="x")), "no field 'outputs' or 'predicted_queries'"),
        ("a.jsonl", lines(record(_id="d1", outputs="x")), "field 'outputs' is not a list"),
        ("a.jsonl", lines(record(_id="d1", outputs=["x", " "])), "an item of 'outputs' is empty"),
    ],
)  # fmt: skip
def test_malformed_expansions_are_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError) as error:
        read(tmp_path / name)
    assert sentence in str(error.value)


def test_pieces_are_in_the_order_of_their_numbers(tmp_path):
    for number, text in ((0, "a"), (500_000, "b"), (1_000_000, "c")):
        (tmp_path / f"s.txt{number}-{number + 500_000}").write_bytes(lines(text))
    assert [outputs for _, outputs in read_expansions(tmp_path, ["x", "y", "z"])] == [["a"], ["b"], ["c"]]


def test_a_file_with_too_few_lines_is_named(tmp_path):
    (tmp_path / "s0.txt").write_bytes(lines(*"abc"))
    (tmp_path / "s1.txt0").write_bytes(lines("a"))
    (tmp_path / "s1.txt1").write_bytes(lines("b"))
    with pytest.raises(BadInputError, match=r"s1\.txt1: the file has 2 lines, but 3 texts"):
        read(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"no file of generated texts: expected \.jsonl or \.txt"):
        read(empty)


def test_malformed_lines_are_skipped_with_their_text(tmp_path):
    (tmp_path / "s0.txt").write_bytes(lines("a", "", "c"))
    (tmp_path / "s1.txt").write_bytes(lines("d", "e", "f"))
    bad = OnBadInput("skip")
    assert read(tmp_path, on_bad_input=bad) == [("d1", ["a", "d"]), ("d3", ["c", "f"])]
    assert dict(bad.skipped) == {"an empty line": 1}
    (tmp_path / "a.jsonl").write_bytes(lines(OK[0], "{", OK[2]))
    bad = OnBadInput("skip")
    assert [i for i, _ in read(tmp_path / "a.jsonl", on_bad_input=bad)] == ["d1", "d3"]
    assert dict(bad.skipped) == {"not valid JSON": 1}

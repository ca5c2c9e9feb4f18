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


def made(identifier: str, field: str, outputs: dict[str, list[str]]) -> bytes:
    return lines(*(record(**{identifier: i, field: some}) for i, some in outputs.items()))


ANY_ORDER = {"d2": ["b", "b", "a b"], "d1": [], "d3": ["ü"]}
QUERIES = {i: [f"q {i}"] for i in IDS}
SAMPLES = {i: [f"{sample} of {i}" for sample in range(12)] for i in IDS}
# Each sample has several files; other files are ignored.
DOC2QUERY = {
    f"predicted_queries_topk_sample{sample:03}.txt{piece:03}-1004000": lines(
        *(f"{sample} of {i}" for i in ids)
    )
    for sample in range(12)
    for piece, ids in enumerate((IDS[:2], IDS[2:]))
}
PIECES = {f"s.txt{n}-{n + 500_000}": lines(text) for n, text in ((0, "a"), (500_000, "b"), (1_000_000, "c"))}
SEVERAL = {
    f"d2q.jsonl{n:03}.gz": gzip.compress(made("id", "predicted_queries", {i: QUERIES[i]}))
    for n, i in enumerate(IDS)
}


@pytest.mark.parametrize(
    ("files", "how", "expected"),
    [
        ({"a.jsonl": made("_id", "outputs", ANY_ORDER)}, {}, ANY_ORDER),
        ({"a.jsonl": gzip.compress(made("id", "predicted_queries", ANY_ORDER))}, {}, ANY_ORDER),
        (SEVERAL | {"README.txt": b"not read\n"}, {}, QUERIES),
        (DOC2QUERY | {"SHA256SUMS": b"x\n"}, {}, SAMPLES),
        (
            {"a.txt": lines("one", " two\tthree ", "four\r")},
            {},
            {"d1": ["one"], "d2": ["two", "three"], "d3": ["four"]},
        ),
        (
            {"a.txt": lines(*"abcdef")},
            {"lines_each": 2},
            {"d1": ["a", "b"], "d2": ["c", "d"], "d3": ["e", "f"]},
        ),
        (PIECES, {}, {"d1": ["a"], "d2": ["b"], "d3": ["c"]}),  # files are read in the order of their numbers
    ],
    ids=["records", "gzip", "files of records", "samples", "tabs", "several lines", "pieces"],
)
def test_every_layout_is_read(tmp_path, files, how, expected):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    place = tmp_path if len(files) > 1 else tmp_path / next(iter(files))
    assert read(place, **how) == list(expected.items())


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

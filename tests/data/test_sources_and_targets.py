import gzip

import pytest

from jaxir.core.errors import BadInputError
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.sets.texts import SourcesAndTargets, dev_targets

EXPECTED = [("who wrote it", "Ada"), ("what is it", "a program")]


def read(path, policy="stop"):
    on_bad_input = OnBadInput(policy)
    records = list(SourcesAndTargets(path=str(path)).records(on_bad_input))
    return [(record["source"][1], record["target"][1]) for record in records], on_bad_input


@pytest.mark.parametrize(("end", "pack"), [("", bytes), (".gz", gzip.compress)])
def test_two_files_of_lines_equal_one_of_records(end, pack, tmp_path):
    (tmp_path / f"train.source{end}").write_bytes(pack(b"who wrote it\n what is it \n"))
    (tmp_path / f"train.target{end}").write_bytes(pack(b"Ada\na program\n"))
    assert read(tmp_path / f"train.source{end}")[0] == EXPECTED
    lines = [f'{{"source": "{source}", "target": "{target}"}}\n' for source, target in EXPECTED]
    (tmp_path / f"both.jsonl{end}").write_bytes(pack("".join(lines).encode()))
    assert read(tmp_path / f"both.jsonl{end}")[0] == EXPECTED
    assert dev_targets(None) is None


@pytest.mark.parametrize(
    ("sources", "targets", "sentence"),
    [
        (b"a\nb\n", b"c\n", r"val\.target: the file has 1 lines, but val\.source has more"),
        (b"a\n", b"c\nd\ne\n", r"val\.source: the file has 1 lines, but val\.target has more"),
        (b"a\nb\n", b"c\n \n", r"val\.target:2: field 'target' is empty"),
    ],
)
def test_malformed_or_uneven_sources_and_targets_are_refused(sources, targets, sentence, tmp_path):
    (tmp_path / "val.source").write_bytes(sources)
    (tmp_path / "val.target").write_bytes(targets)
    with pytest.raises(BadInputError, match=sentence):
        read(tmp_path / "val.source")


def test_malformed_lines_are_skipped_in_both(tmp_path):
    (tmp_path / "val.source").write_bytes(b"a\n\nc\n")
    (tmp_path / "val.target").write_bytes(b"d\ne\nf\n")
    found, on_bad_input = read(tmp_path / "val.source", "skip")
    assert found == [("a", "d"), ("c", "f")] and on_bad_input.skipped.total() == 1

"""Every command checks its outputs before it works."""

import inspect
import typing

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.storage.outputs import BEGUN, FILES, Kind, check_output
from jaxir.storage.temporary_outputs import temporary_output
from tests.command_outputs import COMMAND_NAMES, OF_EXPAND, OUTPUTS, function_of

# Commands without an output flag; serve opens its access log before it reads anything.
WRITE_NOTHING = {"plan", "serve", "sidecar"}


@pytest.mark.parametrize("command", [*COMMAND_NAMES, *OF_EXPAND])
def test_every_output_flag_has_a_kind(command):
    _, function = function_of(command)
    named = {name for name in inspect.signature(function).parameters if name.startswith("output")}
    named |= {"update"} & set(inspect.signature(function).parameters)
    assert set(getattr(function, "outputs", {})) == named - {"optimizer_state"}
    assert set(getattr(function, "outputs", {}).values()) <= {*typing.get_args(Kind)}
    assert bool(named) != (command in WRITE_NOTHING)


def bad_places(folder, kind):
    """Yields places where no output of a kind can be written, and the reason."""
    (folder / "file").write_text("mine")
    (folder / "full" / "of").mkdir(parents=True)
    (folder / "loop").symlink_to(folder / "loop")
    yield folder / "file" / "below", "not a directory"
    yield folder / "loop" / "below", "too many levels of symbolic links"
    yield folder / ("n" * 300), "file name too long"
    yield "/proc/nothing/below", "cannot be written"
    yield "s3://bucket/place", "only local paths" if kind in (*FILES, "model", "run") else "local paths only"
    yield "", "is empty"
    yield "~/here", "shells do not expand ~"
    if kind == "changed directory":
        return
    if kind in FILES:
        yield folder / "full", "is a directory"
        yield "/dev/null", "is not a regular file"
        yield folder / "new.gz", "leave out .gz"
    else:
        yield folder / "file", "already exists|is not a directory"
        yield "/proc", "mounted|already exists|cannot be written"
    if kind in ("directory", "model"):
        yield folder / "full", "already exists"
    if kind not in (*FILES, "model", "run"):
        yield "gs://bucket/place", "local paths only"


@pytest.mark.parametrize("kind", typing.get_args(Kind))
def test_output_that_cannot_be_written_is_refused(kind, tmp_path):
    places = list(bad_places(tmp_path, kind))
    before = sorted(tmp_path.rglob("*"))
    for place, reason in places:
        with pytest.raises(UserError, match=reason) as refused:
            check_output("--output", place, kind)
        assert str(refused.value).startswith(str(place or "--output"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("command", "name", "kind"), OUTPUTS)
def test_command_checks_its_output_before_it_reads(command, name, kind, tmp_path, capsys):
    module, function = function_of(command)
    (tmp_path / "file").touch()
    # No input exists, so the first error shows what was checked first.
    needed = {
        n: "3" if n in ("steps", "train", "batch_size") else "absent"
        for n, p in inspect.signature(function).parameters.items()
        if p.default is p.empty and n not in function.outputs
    }
    needed |= {"method": "rrf"} if command == "fuse" else {}
    needed |= {"kind": "answer"} if command == "expand targets" else {}
    needed |= {"format": "st"} if command == "export" else {}
    flags = [f"--{n}={value}" for n, value in needed.items()]
    if command == "train":
        flags = ["--gin_file=gin/quickstart.gin", "--gin.DATA=absent"]
    assert cli.main(module, [*flags, f"--{name}={tmp_path}/file/below"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/file/below") and "not a directory" in said


def test_output_that_gin_names_is_checked_too(tmp_path, capsys):
    (tmp_path / "recipe.gin").write_text(f"search.output = '{tmp_path}'\nsearch.index = 'absent'\n")
    assert cli.main("jaxir.search:search", [f"--gin_file={tmp_path}/recipe.gin"]) == 1
    assert "is a directory; give a file to write" in capsys.readouterr().err


def test_dry_run_does_not_check_the_output_directory(capsys, tmp_path):
    (tmp_path / "file").touch()
    flags = ["--gin_file=gin/experiments/table1.gin", "--datasets=a=absent", "--dry_run"]
    assert cli.main("jaxir.grid:grid", [*flags, f"--output_dir={tmp_path}/file"]) == 1
    assert "absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("fuse", ["--runs=a.trec,b.trec", "--method=rrf"]),
        ("evaluate", ["--run=other=a.trec", "--qrels=b.trec"]),
        ("search", ["--index=index", "--queries=a.trec", "--k=3"]),
    ],
)
def test_command_does_not_replace_its_input(command, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.trec", "b.trec"):
        (tmp_path / name).write_text("q0 Q0 d0 1 0.5 t\n")
    for output in ("./a.trec", str(tmp_path / "a.trec")):
        assert cli.main(f"jaxir.{command}:{command}", [*flags, f"--output={output}"]) == 1
        assert f"error: {output} is also the input of --" in capsys.readouterr().err
    assert (tmp_path / "a.trec").read_text() == "q0 Q0 d0 1 0.5 t\n"


@pytest.mark.parametrize(
    ("command", "flags", "kind"),
    [
        ("fuse", ["--runs=a.trec,b.trec", "--method=rrf"], "run file"),
        ("search", ["--index=absent", "--queries=absent"], "run file"),
        ("evaluate", ["--run=a.trec", "--qrels=qrels.tsv"], "report"),
        ("expand choose", ["--candidates=candidates.jsonl"], "file of outputs"),
    ],
)
def test_command_replaces_only_files_of_its_own_kind(command, flags, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.trec", "b.trec"):
        (tmp_path / name).write_text("q0 Q0 d0 1 0.5 t\n")
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")
    (tmp_path / "candidates.jsonl").write_text('{"_id": "q0", "question": "why", "outputs": ["so"]}\n')
    mine = {
        "thesis.txt": b"six words are in this line\n",
        "corpus.jsonl": b'{"_id": "d0", "text": "a text"}\n',
        "config.json": b'{"hidden_size": 4}',
        "judged.tsv": b"query-id\tcorpus-id\tscore\nq0\td0\t1\n",
        "archive": b"\x1f\x8b\x00\xff" * 9000,
    }
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
        assert cli.main(function_of(command)[0], [*flags, f"--output={name}"]) == 1
        assert capsys.readouterr().err.startswith(f"error: {name} already exists and is not a {kind}: ")
        assert (tmp_path / name).read_bytes() == content
    if command == "search":
        return
    (tmp_path / "empty").touch()
    for name in ("empty", "empty"):  # The second time it replaces its own output.
        assert cli.main(function_of(command)[0], [*flags, f"--output={name}"]) == 0
        assert (tmp_path / name).stat().st_size


@pytest.mark.parametrize("kind", BEGUN)
def test_work_directory_must_not_hold_files_of_others(kind, tmp_path):
    (tmp_path / ".profile").write_text("mine")
    with pytest.raises(UserError, match=rf"^{tmp_path} already exists and is not what .* \({kind}\); give"):
        check_output("--output", tmp_path, kind)
    for begun in BEGUN[kind]:
        (tmp_path / begun).mkdir()
        check_output("--output", tmp_path, kind)
        (tmp_path / begun).rmdir()
    (tmp_path / ".profile").unlink()
    with temporary_output(tmp_path / "pydocs", directory=True):  # leaves what a killed process leaves
        check_output("--output", tmp_path, kind)

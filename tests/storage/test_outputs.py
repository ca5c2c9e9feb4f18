"""Every command looks at all that it is to write before it works."""

import inspect
import os
import typing

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.storage.outputs import BEGUN, FILES, Kind, check_output
from jaxir.storage.temporary_outputs import temporary_output
from tests.command_outputs import COMMAND_NAMES, OF_EXPAND, OUTPUTS, function_of

# They write nothing that a user names, but for serve's access log, which is opened before anything is read.
WRITE_NOTHING = {"plan", "serve", "sidecar"}


@pytest.mark.parametrize("command", [*COMMAND_NAMES, *OF_EXPAND])
def test_no_command_forgets_an_output(command):
    _, function = function_of(command)
    named = {name for name in inspect.signature(function).parameters if name.startswith("output")}
    named |= {"update"} & set(inspect.signature(function).parameters)
    assert set(getattr(function, "outputs", {})) == named - {"optimizer_state"}
    assert set(getattr(function, "outputs", {}).values()) <= {*typing.get_args(Kind)}
    assert bool(named) != (command in WRITE_NOTHING)


def bad_places(folder, kind):
    """Yields places where nothing of a kind can be written, and what is said of them."""
    (folder / "file").write_text("mine")
    (folder / "full" / "of").mkdir(parents=True)
    (folder / "loop").symlink_to(folder / "loop")
    yield folder / "file" / "below", "not a directory"
    yield folder / "loop" / "below", "too many levels of symbolic links"
    yield folder / ("n" * 300), "file name too long"
    yield folder / "new" / ("n" * 300) / "below", "file name too long"
    yield "/proc/nothing/below", "cannot be written"
    yield "s3://bucket/place", "only local paths" if kind in (*FILES, "model") else "local paths"
    yield "", "is empty"
    if kind in ("model", "run"):
        yield folder / os.fsdecode(b"caf\xe9"), "no UTF-8"
    if kind == "changed directory":
        return
    yield folder / "loop", "too many levels of symbolic links"
    if kind in FILES:
        yield folder / "full", "is a directory"
        yield "/dev/null", "is no file"
        yield folder / "new.gz", "leave out .gz"
    else:
        yield folder / "file", "already exists|is no directory"
        yield "/proc", "mounted|already exists|cannot be written"
    if kind in ("directory", "model"):
        yield folder / "full", "already exists"
    if kind not in (*FILES, "model", "run"):
        yield "gs://bucket/place", "local paths only"


@pytest.mark.parametrize(("command", "name", "kind"), OUTPUTS)
def test_a_bad_output_is_told_before_anything_is_read(command, name, kind, tmp_path, capsys):
    module, function = function_of(command)
    places = list(bad_places(tmp_path, kind))
    before = sorted(tmp_path.rglob("*"))
    # Nothing that they read is there: what is said first, is said of the output.
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
    for place, said in places:
        status = cli.main(module, [*flags, f"--{name}={place}"])
        told = capsys.readouterr().err
        assert status == 1 and told.count("\n") == 1, (place, told)
        named = str(place or "--" + name).encode(errors="backslashreplace").decode()
        assert told.startswith(f"error: {named}"), (place, told)
        assert any(words in told for words in said.split("|")), (place, told)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_gin_names_is_looked_at_too(tmp_path, capsys):
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
        ("search", ["--index=gs://b/x", "--query=why"]),
        ("serve", ["--index=gs://b/x", "--port=0"]),
        ("serve", ["--index=name=gs://b/x", "--port=0"]),
        ("index", ["--embeddings=gs://b/x", "--output={new}"]),
        ("index", ["--backend=lucene", "--corpus=gs://b/x", "--output={new}"]),
        ("index", ["--update=gs://b/x", "--delete=ids"]),
        ("evaluate", ["--run=gs://b/x", "--qrels=gs://b/x"]),
        ("evaluate", ["--model=absent", "--dataset=beir:gs://b/x"]),
        ("fuse", ["--runs=gs://b/x", "--method=rrf", "--output={new}"]),
        ("mine", ["--run=absent", "--dataset=gs://b/x", "--output={new}"]),
        ("sample", ["--dataset=beir:gs://b/x", "--train=3", "--output={new}"]),
        ("prepare", ["--dataset=pairs:gs://b/x", "--output={new}"]),
        ("convert", ["--source=hf:gs://b/x", "--output={new}"]),
    ],
)
def test_bucket_inputs_are_refused_where_only_local_ones_work(command, flags, tmp_path, capsys):
    flags = [flag.format(new=tmp_path / "new") for flag in flags]
    assert cli.main(function_of(command)[0], flags) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: gs://b/x: this is "), told
    assert "local paths only" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("fuse", ["--runs=a.trec,b.trec", "--method=rrf"]),
        ("evaluate", ["--run=other=a.trec", "--qrels=b.trec"]),
        ("search", ["--index=index", "--queries=a.trec", "--k=3"]),
    ],
)
def test_inputs_are_never_replaced(command, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.trec", "b.trec"):
        (tmp_path / name).write_text("q0 Q0 d0 1 0.5 t\n")
    for output in ("a.trec", "./a.trec", str(tmp_path / "a.trec")):
        assert cli.main(f"jaxir.{command}:{command}", [*flags, f"--output={output}"]) == 1
        assert f"error: {output} is what --" in capsys.readouterr().err
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
def test_foreign_files_are_never_replaced(command, flags, kind, tmp_path, monkeypatch, capsys):
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
        said = f"error: {name} is there already and is no {kind}: give another output, or remove it first\n"
        assert capsys.readouterr().err == said
        assert (tmp_path / name).read_bytes() == content
    if command == "search":
        return
    (tmp_path / "empty").touch()
    for _ in range(2):  # the second time its own output is there
        for name in ("new", "empty"):
            assert cli.main(function_of(command)[0], [*flags, f"--output={name}"]) == 0
            assert (tmp_path / name).stat().st_size


WORKED_IN = [(command, name, kind) for command, name, kind in OUTPUTS if kind in BEGUN]


@pytest.mark.parametrize(("command", "name", "kind"), WORKED_IN)
def test_no_command_works_among_the_files_of_another(command, name, kind, tmp_path, capsys):
    """A home directory, say, or the output of another command; what was killed in it is no matter."""
    (tmp_path / ".profile").write_text("dear to someone")
    with pytest.raises(
        UserError, match=rf"^{tmp_path} already exists and is no {kind}; give another output$"
    ):
        check_output(f"--{name}", tmp_path, kind)
    required = {"grid": ["--gin_file=gin/experiments/table1.gin", "--datasets=a=absent"]}
    required["rounds"] = ["--recipe=gin/pairs.gin", "--dataset=absent", "--steps=3"]
    required["encode"] = ["--model=absent", "--input=absent"]
    assert cli.main(function_of(command)[0], [*required.get(command, []), f"--{name}={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} already exists and is no {kind}")
    assert [path.name for path in tmp_path.iterdir()] == [".profile"]
    for begun in BEGUN[kind]:
        (tmp_path / begun).mkdir()
        check_output(f"--{name}", tmp_path, kind)
        (tmp_path / begun).rmdir()
    (tmp_path / ".profile").unlink()
    with temporary_output(tmp_path / "pydocs", directory=True):  # as a killed process leaves it
        check_output(f"--{name}", tmp_path, kind)

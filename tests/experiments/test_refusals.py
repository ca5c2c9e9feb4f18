import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.sample import sample
from jaxir.storage.locks import locked
from tests.experiments.test_grid_cells import planned, variant


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objectives": ["samtonne"]}, r"unknown objective 'samtonne'.* did you mean 'samtone'"),
        ({"sharing": ["spl"]}, "unknown sharing 'spl'"),
        ({"models": ["t5"]}, "gin file gin/models/t5.gin does not exist"),
        ({"objectives": ["mine=none.gin"]}, "gin file none.gin does not exist"),
        ({"recipe": ["my_recipe.py"]}, "experiments need gin files.* jaxir.train --recipe=my_recipe"),
        ({"split": "few"}, r"few.tsv: 1 queries have judgements, .* need at least two"),
        ({"objectives": ["pair"], "steps": 1}, "steps is 1"),
        ({"seeds": []}, "seeds must have at least one value"),
        ({"seeds": [1, 1]}, "seeds has '1' twice"),
        ({"datasets": ["no/such"]}, "no/such is not a directory"),
        ({"judges": ["rated=sts:no/such.tsv"]}, "no/such.tsv: no such file or folder of rated pairs"),
        ({"judges": ["sts:pairs.tsv"]}, "a judge must be NAME=sts:PATH or .*, not 'sts:pairs.tsv'"),
        ({"runs": ["bm25.trec"]}, "runs must be NAME=FILE, not 'bm25.trec'"),
        ({"runs": ["BM25=no/such.trec"]}, "no/such.trec: no such run file"),
        ({"runs": ["BM25=x"], "untrained": ["BM25=x"]}, "untrained and runs has 'BM25' twice"),
        ({"untrained": ["w2v:vectors"]}, "untrained must be NAME=MODEL, not 'w2v:vectors'"),
        ({"objectives": ["samtone", "SamToNe=gin/objectives/pair.gin"]}, "two objectives have the title"),
        ({"variants": [variant("a", title="x"), variant("b", title="x")]}, "two variants have the title 'x'"),
        ({"variants": [variant("a", "STEPS=3")]}, "bindings cannot set STEPS: give --steps instead"),
        (
            {"variants": [variant("a", "SAME_TOWER=query")], "objectives": ["samtone", "samtone_both"]},
            "cannot set SAME_TOWER: the objective samtone_both sets SAME_TOWER=both",
        ),
    ],
)
def test_invalid_grid_is_refused(folder, changes, message):
    lines = (folder / "qrels" / "test.tsv").read_text().splitlines()
    (folder / "qrels" / "few.tsv").write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(UserError, match=message):
        planned(folder, **changes)


@pytest.mark.parametrize(
    ("command", "flag", "sentence"),
    [
        ("grid", "--seeds=one", "seeds must be whole numbers, not 'one'"),
        ("grid", "--split=tset", "has no split 'tset' (has: dev, test, train); did you mean 'test'?"),
        ("grid", "--metrics=nDGC@10", "there is no metric 'nDGC@10'"),
        ("grid", "--bindings=MODEL=absent", "refused: absent: no such model directory"),
        ("grid", "--bindings=DATA=beir", "bindings cannot set DATA: give --datasets instead"),
        ("rounds", "--steps=0", "--steps must be a whole number of at least 1, not 0"),
        ("rounds", "--split=tset", "did you mean 'test'"),
        ("rounds", "--recipe=gin/nothing.gin", "gin file gin/nothing.gin does not exist"),
        ("rounds", "--metrics=nope", "there is no metric 'nope'"),
        ("rounds", "--negatives=0", "--negatives must be a whole number of at least 1, not 0"),
        ("rounds", "--mine=margin=-1", "--mine: margin must be a number of at least 0, not -1"),
        ("rounds", "--mine=max_relevance=0.1", "only apply with --cross_encoder"),
        ("rounds", "--mine=cross_encoder=hf:reader", "needs --max_relevance, --relevance_margin or both"),
        ("rounds", "--mine=first=3,last=2", "--first=3 must be at most --last=2"),
        ("rounds", "--mine=negatives=3", "--mine cannot set negatives: --negatives sets it"),
        ("rounds", "--mine=margins=3", "NAME=VALUE, a flag of jaxir.mine; did you mean 'margin'?"),
        ("rounds", "--bindings=MINED=x", "bindings cannot set MINED: give --first_run instead"),
        ("rounds", "--bindings=MODEL=absent", "refused: absent: no such model directory"),
        ("rounds", "--first_run=absent", "absent: no such run file"),
        ("rounds", "--mine=cross_encoder=absent,max_relevance=0.1", "absent: no such model directory"),
    ],
)
def test_command_refuses_with_one_sentence_and_writes_nothing(
    tmp_path, grid_flags, rounds_flags, capsys, command, flag, sentence
):
    flags = grid_flags if command == "grid" else rounds_flags
    kept = [f for f in flags if f.split("=")[0] != flag.split("=")[0]]
    status = cli.main(f"jaxir.{command}:{command}", [*kept, flag])
    assert status == (2 if flag in ("--steps=0", "--negatives=0") else 1)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["grid", "rounds"])
def test_second_process_in_a_directory_is_refused(
    tmp_path, grid_flags, rounds_flags, no_rehearsal, capsys, command
):
    with locked(tmp_path / "out", "held by this test"):
        flags = grid_flags if command == "grid" else rounds_flags
        assert cli.main(f"jaxir.{command}:{command}", flags) == 1
    assert capsys.readouterr().err == f"error: another process works in {tmp_path}/out\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 41}, "from 1 to 40"),
        ({"train": 0}, "from 1 to 40"),
        ({"split": "trian"}, "did you mean 'train'"),
        ({"dataset": "pairs"}, "--dataset must be beir:DIR"),
    ],
)
def test_sample_refuses_and_writes_nothing(folder, tmp_path, changes, message):
    flags = {"dataset": f"beir:{folder}", "output": str(tmp_path / "small"), "train": 10} | changes
    with pytest.raises(UserError, match=message):
        sample(**flags)
    assert not (tmp_path / "small").exists()

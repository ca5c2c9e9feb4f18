"""The command layer, run as real processes on a command made here."""

import dataclasses
import errno
import inspect
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import gin
import jax
import numpy as np
import pytest

from jaxir import cli
from jaxir.core import error_report
from jaxir.core.errors import UsageError, UserError, suggest
from jaxir.core.installation import missing_recipe
from jaxir.core.values import Count
from jaxir.plan import plan
from jaxir.train import train
from jaxir.training.run.recipe import Recipe

COMMAND = '''
from typing import Literal
import dataclasses
import signal
from jaxir.core.errors import BadInputError
from jaxir.core.values import Count

@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    temperature: float = 0.01

def cook(*, model: str, steps: Count = 3, tower: Literal["query", "passage"] = "query", names: list[str] = (),
         fast: bool = False, objective: Objective | None = None) -> None:
    """Cooks a model.

    Args:
      model: the model's directory.
      steps: number of steps, 100% real.
      tower: which tower.
      names: some names.
      fast: hurry.
    """
    if model == "bad":
        raise BadInputError("corpus.jsonl", 7, "no field 'text'")
    if model == "full":
        with open("/dev/full", "w") as f:
            f.write("x")
    if model.startswith("SIG"):
        signal.raise_signal(signal.Signals[model])
    if model == "bug":
        raise RuntimeError("a bug")
    print(model, steps, tower, list(names), fast, objective)
'''
EXAMPLE = "python -m kitchen --model=m"
MAIN = f"import sys; from jaxir import cli; sys.exit(cli.main('kitchen:cook', example='{EXAMPLE}'))"


@pytest.fixture
def cook(tmp_path):
    (tmp_path / "kitchen.py").write_text(COMMAND)
    (tmp_path / "recipe.gin").write_text(
        textwrap.dedent("""
        from __gin__ import dynamic_registration
        import kitchen
        STEPS = 5
        MODEL = %gin.REQUIRED
        kitchen.cook.model = %MODEL
        kitchen.cook.steps = %STEPS
        kitchen.cook.objective = @kitchen.Objective()
        kitchen.Objective.temperature = 0.05
        """)
    )

    def run(*args):
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *args], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    return run


def test_flags_become_arguments(cook):
    assert cook("--model=m") == (0, "m 3 query [] False None", "")
    code, out, _ = cook("--model=m", "--steps=9", "--tower=passage", "--names=a,b", "--fast")
    assert (code, out) == (0, "m 9 passage ['a', 'b'] True None")


def test_help_names_flags_defaults_and_an_example(cook):
    code, out, _ = cook("--help")
    assert code == 0
    for text in (
        "Cooks a model.",
        "--steps",
        "100% real",
        "(default: 3)",
        "python -m kitchen --model=m",
        "--gin_file",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 1, "error: --model must be given"),
        (("--model=bad",), 1, "error: corpus.jsonl:7: no field 'text'"),
        (("--model=full",), 1, "no space left on device"),
        (("--model=m", "--tower=left"), 2, "error: --tower must be 'query' or 'passage', not 'left'"),
        (("--model=m", "--stepz=3"), 2, "error: there is no flag --stepz; did you mean '--steps'?"),
        (("--model=m", "-s", "3"), 2, "error: there is no flag -s (see python -m kitchen --help)"),
        (
            ("--model=m", "corpus.jsonl"),
            2,
            "'corpus.jsonl' belongs to no flag; flags are written --NAME=VALUE",
        ),
        (("--model=m", "--steps=many"), 2, "error: --steps must be a whole number of at least 1, not 'many'"),
        (("--model=m", "--steps=0"), 2, "error: --steps must be a whole number of at least 1, not 0"),
        (("--steps=3", "--model"), 2, "error: --model has no value; write --model=..."),
        (("--model=m", "--fast=maybe"), 2, "error: --fast must be True or False, not 'maybe'"),
        (("--model=m", "--Num-Steps=3"), 2, "there is no flag --Num-Steps; did you mean '--steps'?"),
        (("--model=m", "--lr=3"), 2, "there is no flag --lr (see"),
        (("--gin_file=none.gin",), 1, "error: gin file none.gin does not exist"),
        (("--gin_file=recip.gin",), 1, "recip.gin does not exist; did you mean 'recipe.gin'?"),
        (("--gin_file=recipe.gin",), 1, "error: MODEL must be set: --model=..."),
        (("--gin_file=recipe.gin", "--gin.MODEL=m", "--steps=4", "--gin.STEPS=4"), 1, "steps is given twice"),
        (("--gin_file=recipe.gin", "--model=m", "--gin.STEPS=four"), 1, "STEPS must be a whole number"),
        (
            ("--gin_file=recipe.gin", "--gin.MODLE=m"),
            1,
            "MODLE is set but nothing uses it; did you mean 'MODEL'?",
        ),
        (("--gin.cook.stepz=4", "--model=m"), 1, "cook has no parameter 'stepz'; did you mean 'steps'?"),
        (("--gin.coook.steps=4", "--model=m"), 1, "nothing is called 'coook'; did you mean 'cook'?"),
        (("--gin.cook.steps=%STEP", "--model=m"), 1, "macro STEP is used but never set"),
        (("--gin.cook.steps", "--model=m"), 1, "--gin.cook.steps has no value"),
        (
            ("--gin.cook.steps=[1,", "--model=m"),
            1,
            "--gin.cook.steps: a bracket or a text is opened and never closed",
        ),
        (("--gin.cook.steps=4",), 1, "error: --model must be given"),
    ],
)
def test_a_mistake_costs_one_sentence(cook, args, code, message):
    got, out, err = cook(*args)
    assert (got, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kitchen.cock.steps = 3", "bad.gin:4: kitchen has no 'cock'; did you mean 'cook'?"),
        ("import kitchn", "bad.gin:4: no module named 'kitchn'"),
        (
            "from jaxir.core import erors",
            "bad.gin:4: no module named 'jaxir.core.erors'; did you mean 'errors'?",
        ),
        (
            "kitchen.Objective.temprature = 3",
            "Objective has no parameter 'temprature'; did you mean 'temperature'?",
        ),
        ("kitchen.cook.model = minilm", "bad.gin:4: minilm is no value: text wants quotes, a macro %"),
        ("kitchen.cook.steps =", "bad.gin:4: "),
        ("from jaxir.core import errors, features", "bad.gin:4: gin imports one name on a line"),
        (
            "kitchen.cook.model = [1,\n  2",
            "bad.gin: a bracket or a text is opened after line 2 and never closed",
        ),
        ('kitchen.cook.model = """m', "bad.gin: a bracket or a text is opened after line 2 and never closed"),
    ],
)
def test_a_misspelt_name_in_a_file_is_located_and_mended(cook, tmp_path, line, message):
    (tmp_path / "bad.gin").write_text(f"from __gin__ import dynamic_registration\nimport kitchen\n\n{line}\n")
    code, _, err = cook("--gin_file=bad.gin", "--model=m")
    assert code == 1
    assert message in err and len(err.splitlines()) == 1


def test_a_module_of_ones_own_that_wants_one_that_is_missing(cook, tmp_path):
    (tmp_path / "bad.gin").write_text("from __gin__ import dynamic_registration\nimport wanting\n")
    (tmp_path / "wanting.py").write_text("import json\nimport absent_package\n")
    code, _, err = cook("--gin_file=bad.gin", "--model=m")
    assert code == 1
    assert (
        "bad.gin:2: no module named 'absent_package', which wanting imports" in err
        and len(err.splitlines()) == 1
    )


def test_an_object_of_ones_own_is_bound_where_its_module_is_imported(cook):
    code, _, err = cook("--gin_file=recipe.gin", "--gin.MODEL=@utensils.Spoon()")
    assert code == 1
    assert "nothing is called 'utensils.Spoon'; import its module in the gin file that binds it" in err


def test_gin_binds_objects_and_bare_words(cook):
    code, out, _ = cook(
        "--gin_file=recipe.gin", "--gin.MODEL=st:all-MiniLM-L6-v2", "--gin.Objective.temperature=0.1"
    )
    assert (code, out) == (0, "st:all-MiniLM-L6-v2 5 query [] False Objective(temperature=0.1)")


def test_a_flag_overrides_a_gin_file(cook):
    code, out, err = cook("--gin_file=recipe.gin", "--model=m", "--steps=4")
    assert (code, out, err) == (0, "m 4 query [] False Objective(temperature=0.05)", "")


def test_bad_input_is_one_sentence_under_gin_too(cook):
    code, _, err = cook("--gin_file=recipe.gin", "--gin.MODEL=bad")
    assert (code, err) == (1, "error: corpus.jsonl:7: no field 'text'")


def test_missing_parameters_that_only_gin_sets_are_named(tmp_path):
    command = [sys.executable, "-m", "jaxir.train", "--output_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        "--batch_size, --steps or --epochs must be given; model, objective, data must be bound by a gin file"
        in done.stderr
    )


def test_a_bug_costs_a_sentence_that_says_where_the_traceback_is(cook, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = cook("--model=bug")
    line = COMMAND.splitlines().index('        raise RuntimeError("a bug")') + 1
    told = rf"error: \S+/kitchen\.py:{line}, in cook: RuntimeError: a bug; the traceback is in (\S+)"
    sentence = re.fullmatch(told, err)
    assert code == 1 and sentence, err
    assert Path(sentence[1]).parent == tmp_path / "cache/jaxir/tracebacks"
    lines = Path(sentence[1]).read_text().splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "RuntimeError: a bug"


def test_a_fault_is_blamed_on_the_innermost_line_of_the_users():
    def raised(filename, call=None):
        scope = {"call": call}
        exec(compile("def f():\n    if call: call()\n    raise KeyError('x')", filename, "exec"), scope)
        return scope["f"]

    def blame(function):
        with pytest.raises(KeyError) as caught:
            function()
        return error_report.blame(
            caught.value.with_traceback(caught.value.__traceback__.tb_next)
        )  # without us

    ours = raised(error_report.__file__)
    assert blame(ours) == ("internal", 70)
    assert blame(raised("<string>")) == ("internal", 70)
    assert blame(raised(np.__file__)) == ("internal", 70)
    assert blame(raised("/home/me/objective.py")) == ("/home/me/objective.py:3, in f", 1)
    assert blame(raised("/home/me/objective.py", ours)) == ("/home/me/objective.py:2, in f", 1)


def test_a_fault_that_was_told_on_is_blamed_on_where_it_was_raised():
    scope = {}
    exec(compile("def f():\n    raise KeyError('x')", "/home/me/evaluator.py", "exec"), scope)
    with pytest.raises(RuntimeError) as caught:
        try:
            scope["f"]()
        except KeyError as error:
            raise RuntimeError("evaluator f") from error
    assert error_report.blame(caught.value) == ("/home/me/evaluator.py:2, in f", 1)


@pytest.mark.parametrize(
    ("number", "status", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "stopped by SIGTERM")]
)
def test_a_command_that_is_stopped_ends_as_shells_tell_it(cook, number, status, said):
    assert cook(f"--model={number}") == (status, "", said)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        *[("--lr", "--learning_rate"), ("--learning_rates", "--learning_rate")],
        *[("--bs", "--batch_size"), ("--num_train_epochs", "--epochs"), ("--temp", "--temperature")],
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_flags_of_other_tools_get_our_flag_suggested(command, flag, meant, capsys):
    assert cli.main(f"jaxir.{command}:{command}", [f"{flag}=3"]) == 2
    assert capsys.readouterr().err == f"error: there is no flag {flag}; did you mean '{meant}'?\n"


def test_short_names_set_parameters_and_macros_of_recipes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text(
        'include "gin/pairs.gin"\nMINE = 7\ntrain.train.keep_last = %MINE\nMODEL = "absent"\nDATA = "data"\n'
    )
    for flags in (
        ["--learning_rate=1e-4", "--mine=3", "--model=st:x"],
        ["--learning-rate", "1e-4", "--mine", "3", "--model", "st:x"],
    ):
        assert cli.main("jaxir.train:train", ["--gin_file=mine.gin", "--output_dir=run", *flags]) == 1
        bound = gin.get_bindings("jaxir.train.train")
        found = (bound["optimizer"].learning_rate, bound["keep_last"], bound["model"].source)
        assert found == (1e-4, 3, "st:x")
    capsys.readouterr()
    for flags, sentence in (
        (["--mine"], "--mine has no value; write --mine=..."),
        (["--mine=3", "--mine=4"], "--mine is given twice; keep one of them"),
        (["--mine=3", "--gin.MINE=4"], "MINE is given twice, by --gin.MINE and by --mine; keep one of them"),
        (
            ["--model=x", "--gin.Pretrained.source=y"],
            "Pretrained.source is given twice, by --gin.Pretrained.source and by --model; keep one of them",
        ),
        (["--MINE=3"], "there is no flag --MINE"),
        (["--modle=3"], "there is no flag --modle; did you mean '--model'?"),
    ):
        assert cli.main("jaxir.train:train", ["--gin_file=mine.gin", "--output_dir=run", *flags]) in (1, 2)
        assert sentence in capsys.readouterr().err


def test_ambiguous_short_name_is_refused_with_the_full_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from jaxir import train\n"
        "from jaxir.data.batches import mixture\n"
        "from jaxir.data.sets import pair_sources\n"
        'include "gin/pairs.gin"\n'
        "train.train.data = @mixture.Mixture()\n"
        "mixture.Mixture.sources = [@a/pair_sources.JsonlPairs(), @b/pair_sources.JsonlPairs()]\n"
    )
    flags = ["--gin_file=two.gin", "--output_dir=run", "--data=d", "--path=x"]
    assert cli.main("jaxir.train:train", flags) == 1
    names = "a/JsonlPairs.path, b/JsonlPairs.path"
    sentence = f"error: --path may be any of {names}: write --gin.a/JsonlPairs.path=...\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize(
    ("file", "meant"),
    [
        *[
            ("gin/pair.gin", "gin/pairs.gin"),
            ("pairs", "gin/pairs.gin"),
            ("gin/runs/pairs.gin", "gin/pairs.gin"),
        ],
        *[("samtone_bse.gin", "gin/samtone_base.gin"), ("objectives/seed.gin", "gin/objectives/seed.gin")],
    ],
)
def test_a_recipe_that_is_meant_is_named(file, meant):
    assert missing_recipe(file) == f"gin file {file} does not exist; did you mean {meant!r}?"


def test_a_name_in_another_case_is_suggested():
    assert suggest("BERTCONFIG", ["T5Config", "BertConfig"]) == "; did you mean 'BertConfig'?"
    assert suggest("step", ["STEP", "Steps"]) == "; did you mean 'STEP'?"
    assert suggest("stepS", ["STEPS", "Steps"]) == "; did you mean 'Steps'?"
    assert suggest("length", ["STEPS"]) == ""


def test_traceback_is_printed_if_no_file_can_be_written(cook, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    memory = jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 128000000000 bytes.")
    sentence, status = error_report.explain(memory)
    assert (
        sentence.startswith("there is not enough memory (INTERNAL: Out of memory allocating") and status == 1
    )
    sentence, status = error_report.explain(RuntimeError("a bug"))
    assert status == 70 and "could not be written" in sentence
    assert sentence.endswith("RuntimeError: a bug\n")


def test_only_the_newest_tracebacks_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = [error_report.explain(ZeroDivisionError()).sentence for _ in range(error_report.KEPT + 5)]
    assert len(list((tmp_path / "jaxir/tracebacks").iterdir())) == error_report.KEPT
    assert len(set(said)) == len(said)


def touch(*, what: str, path: str) -> None:
    """Asks something of the system.

    Args:
      what: what.
      path: of what.
    """
    ask = {
        "read": lambda: Path(path).read_text(),
        "write": lambda: Path(path).write_text(""),
        "list": lambda: list(Path(path).iterdir()),
        "make": lambda: Path(path).mkdir(),
        "remove": lambda: Path(path).unlink(),
        "move": lambda: Path(path).rename(f"{path}/in/itself"),
        "resolve": lambda: Path(path).resolve(strict=True),
        "connect": lambda: socket.create_connection(("127.0.0.1", 1), 1),
    }
    try:
        ask[what]()
    except PermissionError as error:  # what lies between sees it as it is
        assert error.errno == errno.EPERM
        raise


@pytest.mark.parametrize("with_gin", [False, True])
@pytest.mark.parametrize(
    ("what", "path", "reason"),
    [
        ("read", "folder", "is a directory"),
        ("read", "none", "no such file or directory"),
        ("read", "loop", "too many levels of symbolic links"),
        ("resolve", "loop", "too many levels of symbolic links"),
        ("write", "file/x", "not a directory"),
        ("write", "n" * 300, "file name too long"),
        ("list", "file", "not a directory"),
        ("make", "folder", "file exists"),
        ("remove", "/proc/self/maps", "operation not permitted"),
        ("move", "folder", "folder -> folder/in/itself: no such file or directory"),
        ("connect", "x", "connection refused (ConnectionRefusedError; the traceback is in "),
    ],
)
def test_every_error_of_the_system_costs_a_sentence_with_its_path(
    what, path, reason, with_gin, tmp_path, monkeypatch, capsys
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    flags = [f"--path={path}", f"--gin.touch.what={what}" if with_gin else f"--what={what}"]
    assert cli.main(f"{__name__}:touch", flags) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "In call to configurable" not in said
    where = f"error: {path}" if len(path) <= 200 else f"error: '{path[:200]}'"
    assert reason in said and said.startswith(where if what != "connect" else "error: ")


def test_no_name_has_a_zero_byte_and_no_count_more_than_64_bits(capsys):
    assert cli.main(f"{__name__}:touch", ["--path=a\0b", "--what=read"]) == 1
    assert capsys.readouterr().err == "error: a path has a zero byte in it, which no file's name can have\n"

    def command(count: Count = 1) -> int:
        """Does it."""
        return 0

    assert cli.run(command, [f"--count={2**63 - 1}"], prog="p", example="") == 0
    for given in ([f"--count={2**63}"], [f"--count={'9' * 400}"], [f"--count=-{'9' * 30}"]):
        with pytest.raises(UsageError, match=r"^--count must be a whole number of at least 1, not -?9"):
            cli.run(command, given, prog="p", example="")


def test_a_number_is_whole_or_not_and_a_flag_may_have_two_spellings():
    @cli.also_called(place="where")
    def command(every: int | float = 1, place: str = "") -> int:
        """Does it."""
        found.append((every, place))
        return 0

    found: list[tuple[float, str]] = []
    for given in (["--every=3", "--where=a"], ["--every=0.5", "--place=b"]):
        assert cli.run(command, given, prog="p", example="") == 0
    assert found == [(3, "a"), (0.5, "b")] and type(found[0][0]) is int
    with pytest.raises(UsageError, match=r"^--every must be a number, not 'often'$"):
        cli.run(command, ["--every=often"], prog="p", example="")


@pytest.mark.parametrize("text", ["1_0", "\u0661\u0662", " 3", "3 ", "", "\u00bd", "--"])
def test_a_number_has_digits_alone(text):
    def command(count: int = 1, share: float = 1.0, either: int | float = 1) -> int:
        """Does it."""
        raise AssertionError

    for name in ("count", "share", "either"):
        with pytest.raises(UsageError, match=rf"^--{name} (must be a (whole )?number, not|cannot be '--')"):
            cli.run(command, [f"--{name}={text}"], prog="p", example="")


@pytest.mark.parametrize("text", ["", ",", ",,", "--"])
def test_a_list_of_nothing_is_refused(text):
    def command(names: list[str] | None = None, place: str = "") -> int:
        """Does it."""
        raise AssertionError

    said = r"^--names (is empty|cannot be '--')"
    with pytest.raises(UserError, match=said):
        cli.run(command, [f"--names={text}"], prog="p", example="")
    if text == "--":
        with pytest.raises(UsageError, match=r"^--place cannot be '--'$"):
            cli.run(command, [f"--place={text}"], prog="p", example="")


def test_a_list_may_be_repeated_and_listed():
    def command(names: list[str] | None = None) -> int:
        """Does it."""
        found.append(names)
        return 0

    found: list[list[str] | None] = []
    for given in (["--names", "a", "--names=b,c"], ["--names=a"], ["--names=b"], []):
        assert cli.run(command, given, prog="p", example="") == 0
    assert found == [["a", "b", "c"], ["a"], ["b"], None]


@pytest.mark.parametrize(
    ("streams", "status", "told"),
    [
        (">/dev/full", 1, "error: output: no space left on device\n"),
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("| head -c 0", 141, ""),
    ],
)
def test_standard_streams_that_take_nothing(cook, tmp_path, streams, status, told):
    command = ["bash", "-c", f'set -o pipefail; "$@" {streams}', "bash", sys.executable, "-c", MAIN]
    done = subprocess.run([*command, "--model=m"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, capsys):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody
    assert cli.main("jaxir.fuse:fuse", ["--help"]) == 1
    told = f"error: user {2**31 - 7} has no home directory here; set HOME or XDG_CACHE_HOME to a directory\n"
    assert capsys.readouterr().err == told


def test_no_file_gets_the_number_of_a_closed_stream(cook, tmp_path):
    """What a library writes to the second descriptor would come into an output."""
    (tmp_path / "kitchen.py").write_text(
        "import os\n\ndef cook() -> None:\n    with open('out', 'w') as file:\n"
        "        os.write(2, b'a remark of a library')\n        file.write('result')\n"
    )
    subprocess.run(["bash", "-c", '"$@" 2>&-', "bash", sys.executable, "-c", MAIN], cwd=tmp_path, timeout=100)
    assert (tmp_path / "out").read_text() == "result"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a job.

    Attributes:
      made: what only gin gives.
      steps: how many, on
        two lines.
      rate: how fast.
    """

    made: object
    steps: int
    rate: float = 0.5


@cli.takes(Settings)
def whole(settings: Settings, *, output: str) -> int:
    """Does it.

    Args:
      output: where.
    """
    print(settings, output)


@cli.takes(Settings, only=("steps",), made=None)
def part(settings: Settings, *, place: str) -> int:
    """Does some.

    Args:
      place: where to.
    """


def test_a_command_takes_the_fields_of_settings(capsys):
    whole(output="here", steps=3, made=7)
    assert capsys.readouterr().out == "Settings(made=7, steps=3, rate=0.5) here\n"
    assert list(inspect.signature(whole).parameters) == ["output", "made", "steps", "rate"]
    text = cli.build_parser(whole, prog="x", example="").format_help()
    assert re.search(
        r"--output STR +where\..*--steps INT +how many, on two lines\..*--rate FLOAT", text, re.S
    )
    assert "--made" not in text
    text = cli.build_parser(part, prog="x", example="").format_help()
    assert re.search(r"--place STR +where to\..*--steps INT +how many, on two lines\.", text, re.S)
    assert "rate" not in text and "what only gin gives" not in part.__doc__
    with pytest.raises(TypeError, match="speed"):
        whole(output="here", steps=3, made=7, speed=1)


def test_training_has_the_settings_of_a_recipe_and_no_others():
    named = {f.name for f in dataclasses.fields(Recipe)}
    assert set(inspect.signature(train).parameters) == named | {"output_dir"}
    assert set(inspect.signature(plan).parameters) < named | {"topology", "search", "prices", "hours"}

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import gin
import pytest

from jaxir import cli
from jaxir.core.choices import Rules
from jaxir.core.errors import UsageError, suggest
from jaxir.core.installation import missing_recipe
from jaxir.plan import plan
from jaxir.train import train
from jaxir.training.run.recipe import Recipe

COMMAND = '''
from typing import Literal
import dataclasses
import os
import signal
from pathlib import Path
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
    if model.startswith("read "):
        Path(model[5:]).read_text()
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


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A folder with the module `kitchen` and a gin file that sets it."""
    folder = tmp_path_factory.mktemp("kitchen")
    (folder / "kitchen.py").write_text(COMMAND)
    (folder / "recipe.gin").write_text(
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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def cook(kitchen, monkeypatch, capsys):
    """Runs the command; returns its status, standard output and standard error."""
    monkeypatch.chdir(kitchen)

    def run(*args):
        try:
            status = cli.main("kitchen:cook", args, example=EXAMPLE)
        except SystemExit as end:  # argparse exits after --help
            status = end.code
        said = capsys.readouterr()
        return status, said.out.strip(), said.err.strip()

    yield run
    gin.clear_config()


def test_flags_become_arguments(cook):
    assert cook("--model=m") == (0, "m 3 query [] False None", "")
    code, out, _ = cook("--model=m", "--steps=9", "--tower=passage", "--names=a,b", "--names", "c", "--fast")
    assert (code, out) == (0, "m 9 passage ['a', 'b', 'c'] True None")


def test_help_names_flags_defaults_and_an_example(cook):
    code, out, _ = cook("--help")
    assert code == 0
    for text in ("Cooks a model.", "--steps", "100% real", "(default: 3)", EXAMPLE, "--gin_file"):
        assert text in out


RECIPE = "--gin_file=recipe.gin"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 1, "error: --model must be given"),
        (("--model=bad",), 1, "error: corpus.jsonl:7: no field 'text'"),
        (("--model=m", "--tower=left"), 2, "error: --tower must be 'query' or 'passage', not 'left'"),
        (("--model=m", "--stepz=3"), 2, "error: there is no flag --stepz; did you mean '--steps'?"),
        (("--model=m", "-s", "3"), 2, "error: there is no flag -s (see python -m kitchen --help)"),
        (("--model=m", "corpus.jsonl"), 2, "'corpus.jsonl' follows no flag"),
        (("--model=m", "--steps=many"), 2, "error: --steps must be a whole number of at least 1, not 'many'"),
        (("--model=m", "--steps=0"), 2, "error: --steps must be a whole number of at least 1, not 0"),
        (("--model=m", f"--steps={2**63}"), 2, "--steps must be a whole number of at least 1, not 9"),
        (("--model=m", "--steps=1_0"), 2, "--steps must be a whole number"),
        (("--model=m", "--steps=\u0661"), 2, "--steps must be a whole number"),
        (("--model=m", "--names=,"), 1, "--names is empty"),
        (("--steps=3", "--model"), 2, "error: --model has no value; write --model=..."),
        (("--model=m", "--fast=maybe"), 2, "error: --fast must be True or False, not 'maybe'"),
        (("--model=m", "--Num-Steps=3"), 2, "there is no flag --Num-Steps; did you mean '--steps'?"),
        (("--gin_file=none.gin",), 1, "error: gin file none.gin does not exist"),
        (("--gin_file=recip.gin",), 1, "recip.gin does not exist; did you mean 'recipe.gin'?"),
        ((RECIPE,), 1, "error: MODEL must be set: --model=..."),
        ((RECIPE, "--model=m", "--gin.STEPS=four"), 1, "STEPS must be a whole number"),
        ((RECIPE, "--gin.MODEL=bad"), 1, "error: corpus.jsonl:7: no field 'text'"),
        ((RECIPE, "--gin.MODEL=@utensils.Spoon()"), 1, "import its module in the gin file that binds it"),
        (("--gin.cook.stepz=4", "--model=m"), 1, "cook has no parameter 'stepz'; did you mean 'steps'?"),
        (("--gin.coook.steps=4", "--model=m"), 1, "class is called 'coook'; did you mean 'cook'?"),
        (("--gin.cook.steps=%STEP", "--model=m"), 1, "macro STEP is used but never set"),
        (("--gin.cook.steps", "--model=m"), 1, "--gin.cook.steps has no value"),
        (("--gin.cook.steps=[1,", "--model=m"), 1, "--gin.cook.steps: a bracket or a quote is opened"),
        (("--gin.cook.steps=4",), 1, "error: --model must be given"),
    ],
)
def test_mistake_is_reported_in_one_line(cook, args, code, message):
    got, out, err = cook(*args)
    assert (got, out) == (code, "")
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kitchen.cock.steps = 3", "bad.gin:4: kitchen has no 'cock'; did you mean 'cook'?"),
        ("import kitchn", "bad.gin:4: no module named 'kitchn'"),
        ("from jaxir.core import erors", "no module named 'jaxir.core.erors'; did you mean 'errors'?"),
        ("import wanting", "bad.gin:4: no module named 'absent_package', which wanting imports"),
        ("kitchen.Objective.temprature = 3", "parameter 'temprature'; did you mean 'temperature'?"),
        ("kitchen.cook.model = minilm", "bad.gin:4: minilm is not a value: write text in quotes, %MACRO"),
        ("kitchen.cook.steps =", "bad.gin:4: "),
        ("from jaxir.core import errors, features", "bad.gin:4: gin allows one name in an import line"),
        ("kitchen.cook.model = [1,\n  2", "bad.gin: a bracket or a quote is opened after line 2 and never"),
    ],
)
def test_mistake_in_a_gin_file_is_located(cook, kitchen, line, message):
    (kitchen / "wanting.py").write_text("import absent_package\n")
    (kitchen / "bad.gin").write_text(f"from __gin__ import dynamic_registration\nimport kitchen\n\n{line}\n")
    code, _, err = cook("--gin_file=bad.gin", "--model=m")
    assert code == 1
    assert message in err and len(err.splitlines()) == 1


def test_flag_overrides_a_gin_file_which_binds_objects_and_bare_words(cook):
    for flags, expected in (
        (
            ["--gin.MODEL=st:all-MiniLM-L6-v2"],
            "st:all-MiniLM-L6-v2 5 query [] False Objective(temperature=0.05)",
        ),
        (
            ["--model=m", "--steps=4", "--gin.Objective.temperature=0.1"],
            "m 4 query [] False Objective(temperature=0.1)",
        ),
    ):
        assert cook(RECIPE, *flags) == (0, expected, "")


def test_missing_parameters_of_gin_files_are_named(capsys):
    assert cli.main("jaxir.train:train", ["--output_dir=run"]) == 1
    said = capsys.readouterr().err
    assert "--batch_size, --steps or --epochs must be given; model, objective, data must be bound" in said


def test_bug_is_reported_with_its_line_and_the_file_of_its_traceback(cook, kitchen, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = cook("--model=bug")
    line = COMMAND.splitlines().index('        raise RuntimeError("a bug")') + 1
    expected = (
        rf"error: {kitchen}/kitchen\.py:{line}, in cook: RuntimeError: a bug; the traceback is in (\S+)"
    )
    sentence = re.fullmatch(expected, err)
    assert code == 1 and sentence, err
    assert Path(sentence[1]).parent == tmp_path / "cache/jaxir/tracebacks"
    lines = Path(sentence[1]).read_text().splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "RuntimeError: a bug"


def test_system_error_in_a_bound_function_is_reported_with_its_path(cook):
    assert cook(RECIPE, "--gin.MODEL='read none'") == (1, "", "error: none: no such file or directory")


@pytest.mark.parametrize(
    ("streams", "model", "status", "said"),
    [
        ("", "SIGINT", 130, "interrupted\n"),
        ("", "SIGTERM", 143, "stopped by SIGTERM\n"),
        ("", "full", 1, "error: the output could not be written: no space left on device\n"),
        (">/dev/full", "m", 1, "error: the output could not be written: no space left on device\n"),
        ("| head -c 0", "m", 141, ""),
    ],
)
def test_signals_and_failed_standard_output_end_with_their_status(kitchen, streams, model, status, said):
    shell = ["bash", "-c", f'set -o pipefail; "$@" {streams}', "bash", sys.executable, "-c", MAIN]
    done = subprocess.run(
        [*shell, f"--model={model}"], cwd=kitchen, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_flags_of_other_tools_are_answered_with_ours(command, capsys):
    for flag, meant in (
        ("lr", "learning_rate"),
        ("learning_rates", "learning_rate"),
        ("num_train_epochs", "epochs"),
    ):
        assert cli.main(f"jaxir.{command}:{command}", [f"--{flag}=3"]) == 2
        assert capsys.readouterr().err == f"error: there is no flag --{flag}; did you mean '--{meant}'?\n"


def test_name_of_a_parameter_is_answered_with_its_flag(capsys):
    given = ["--gin_file=gin/pairs.gin", "--scan_layers=True", "--output_dir=run"]
    assert cli.main("jaxir.train:train", given) == 2
    assert capsys.readouterr().err.endswith("there is no flag --scan_layers; did you mean '--scan'?\n")


def test_short_names_set_parameters_and_macros_of_recipes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.gin").write_text(
        'include "gin/pairs.gin"\nMINE = 7\ntrain.train.keep_last = %MINE\nMODEL = "absent"\nDATA = "data"\n'
    )
    recipe = ["--gin_file=mine.gin", "--output_dir=run"]
    for flags in (
        ["--learning_rate=1e-4", "--mine=3", "--model=st:x"],
        ["--learning-rate", "1e-4", "--mine", "3", "--model", "st:x"],
    ):
        assert cli.main("jaxir.train:train", [*recipe, *flags]) == 1
        bound = gin.get_bindings("jaxir.train.train")
        found = (bound["optimizer"].learning_rate, bound["keep_last"], bound["model"].source)
        assert found == (1e-4, 3, "st:x")
    capsys.readouterr()
    twice = "is given twice, by --gin.{} and by {}; keep one of them"
    for flags, sentence in (
        (["--mine"], "--mine has no value; write --mine=..."),
        (["--mine=3", "--mine=4"], "--mine is given twice; keep one of them"),
        (["--mine=3", "--gin.MINE=4"], f"MINE {twice.format('MINE', '--mine')}"),
        (["--model=x", "--gin.Pretrained.source=y"], twice.format("Pretrained.source", "--model")),
        (["--MINE=3"], "there is no flag --MINE"),
        (["--modle=3"], "there is no flag --modle; did you mean '--model'?"),
    ):
        assert cli.main("jaxir.train:train", [*recipe, *flags]) in (1, 2)
        assert sentence in capsys.readouterr().err


def test_ambiguous_short_name_is_refused_with_the_full_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("two.gin").write_text(
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
    said = f"error: --path may mean any of {names}: write --gin.a/JsonlPairs.path=...\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("file", ["gin/pair.gin", "pairs", "gin/runs/pairs.gin"])
def test_missing_recipe_is_answered_with_the_one_that_is_meant(file):
    assert missing_recipe(file) == f"gin file {file} does not exist; did you mean 'gin/pairs.gin'?"


def test_suggestion_among_names_that_differ_in_case_is_the_most_similar():
    assert suggest("step", ["STEP", "Steps"]) == "; did you mean 'STEP'?"
    assert suggest("stepS", ["STEPS", "Steps"]) == "; did you mean 'Steps'?"


def test_number_may_be_whole_or_not_and_a_flag_may_have_two_spellings():
    @Rules(also_called={"place": "where"})
    def command(every: int | float = 1, place: str = "") -> int:
        """A command with two flags."""
        found.append((every, place))
        return 0

    found: list[tuple[float, str]] = []
    for given in (["--every=3", "--where=a"], ["--every=0.5", "--place=b"]):
        assert cli.run(command, given, prog="p", example="") == 0
    assert found == [(3, "a"), (0.5, "b")] and type(found[0][0]) is int
    with pytest.raises(UsageError, match=r"^--every must be a number, not 'often'$"):
        cli.run(command, ["--every=often"], prog="p", example="")


def test_user_without_a_home_is_asked_to_set_one(monkeypatch, capsys):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # no user has this id
    assert cli.main("jaxir.fuse:fuse", ["--help"]) == 1
    assert "has no home directory here; set HOME or XDG_CACHE_HOME" in capsys.readouterr().err


def test_training_has_the_settings_of_a_recipe_and_no_others():
    named = {f.name for f in dataclasses.fields(Recipe)}
    assert set(inspect.signature(train).parameters) == named | {"output_dir", "recipe"}
    own = {"topology", "recipe", "search", "prices", "hours"}
    assert set(inspect.signature(plan).parameters) < named | own

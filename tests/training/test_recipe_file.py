"""`--recipe=FILE.py`: a recipe as a Python file."""

import dataclasses
import json

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.training.run.recipe import Recipe
from jaxir.training.run.recipe_file import read_recipe, with_typed, write_recipe

MADE = """
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.interop.build import Pretrained
from jaxir.objectives.simcse import SimCSE
from jaxir.training.run.recipe import Recipe


def recipe():
    model, data = Pretrained(source="m"), BeirPairs(directory="d")
    return Recipe(model=model, objective=SimCSE(), data=data, epochs=2, min_steps=5, batch_size=BATCH)
"""


def test_typed_flags_replace_fields_and_are_kept_with_the_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MADE.replace("BATCH", "8"))
    made = read_recipe(file)
    assert isinstance(made, Recipe) and (made.epochs, made.batch_size) == (2, 8)
    typed = {"steps": 30, "seed": 4, "frozen": ["encoder.*"]}
    now = with_typed(made, typed)
    assert now == dataclasses.replace(made, epochs=None, min_steps=1, **typed)
    run, again = tmp_path / "run", tmp_path / "again"
    for directory in (run, again):
        directory.mkdir()
    write_recipe(file, typed, run)
    assert read_recipe(run / "recipe.py") == now
    write_recipe(run / "recipe.py", {"epochs": 1}, again)  # repeats the run with other flags
    assert read_recipe(again / "recipe.py") == dataclasses.replace(now, steps=None, epochs=1)


def test_a_recipe_file_imports_modules_beside_it(tmp_path):
    (tmp_path / "beside_the_recipe.py").write_text("SIZE = 16\n")
    (tmp_path / "mine.py").write_text("from beside_the_recipe import SIZE\n" + MADE.replace("BATCH", "SIZE"))
    assert read_recipe(tmp_path / "mine.py").batch_size == 16


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("recipes = 1\n", "has no function recipe; did you mean 'recipes'?"),
        ("def recipe():\n    return {}\n", r"recipe\(\) must return a Recipe, not \{\}"),
        ("x = 1\ndef recipe(:\n", "mine.py:2: invalid syntax"),
        (None, "--recipe must be an existing Python file, such as my_recipe.py"),
    ],
)
def test_files_without_a_recipe_are_refused(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_recipe(tmp_path / "mine.py")


def test_gin_beside_a_recipe_file_is_refused(tmp_path, capsys):
    flags = [f"--recipe={tmp_path}/mine.py", f"--output_dir={tmp_path}/run", "--gin_file=gin/pairs.gin"]
    assert cli.main("jaxir.train:train", flags) == 2
    assert "--recipe is a complete recipe in Python" in capsys.readouterr().err
    assert cli.main("jaxir.train:train", [*flags[:2], "--learning_rate=1e-4"]) == 2
    assert "--learning_rate only applies to gin files" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_train_runs_resumes_and_repeats_a_recipe_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from tests.training.tiny_run import Bag, LENGTH, ToOne, pairs\n"
        "from jaxir.interop.model.encoder_settings import EncoderSettings\n"
        "from jaxir.interop.model.stored import LoadedModel\n"
        "from jaxir.training.run.recipe import Recipe\n"
        "def recipe():\n"
        "    lengths = EncoderSettings(query_max_length=LENGTH, passage_max_length=LENGTH)\n"
        "    data, model = pairs(64), LoadedModel(Bag(), None, lengths, '')\n"
        "    return Recipe(model=model, objective=ToOne(), data=data, steps=9, batch_size=8, log_every=1)\n"
    )
    train = "jaxir.train:train"
    assert cli.main(train, ["--recipe=mine.py", "--output_dir=run", "--steps=3"]) == 0
    assert cli.main(train, ["--recipe=run/recipe.py", "--output_dir=again"]) == 0
    logs = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("run", "again")]
    losses = [[line["loss"] for line in map(json.loads, log) if "loss" in line] for log in logs]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert cli.main(train, ["--recipe=mine.py", "--output_dir=run", "--steps=3"]) == 0
    assert "run was already complete: 3 steps" in capfd.readouterr().out
    assert cli.main(train, ["--recipe=mine.py", "--output_dir=run"]) == 1
    assert "run was trained with steps=3, not 9" in capfd.readouterr().err

"""Every shipped recipe resolves to the objects it promises; the paper's carry the paper's numbers."""

import subprocess
import sys
from pathlib import Path

import gin
import pytest

from jaxir import gin_config
from jaxir.interop.build import Pretrained
from jaxir.train import train
from jaxir.training.optimizers import Adafactor, AdamW

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "gin").glob("*.gin"))
PAPER = [r for r in RECIPES if "samtone" in r]


@pytest.fixture(autouse=True)
def forget_gin():
    yield
    gin.clear_config()


def resolve(recipe: str, *bindings: str) -> dict:
    needed = ["DATA=somewhere"] if recipe in PAPER else []
    gin_config.bind(train, [recipe], [*needed, *bindings], {"output_dir": "run"})
    return gin.get_bindings(train)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resolves(recipe):
    bound = resolve(recipe)
    assert isinstance(bound["model"], Pretrained)
    assert callable(bound["objective"])
    assert callable(bound["data"].build)
    assert bound["steps"] > 0
    assert bound["batch_size"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_head_says_how_to_run_it(recipe):
    head = (ROOT / recipe).read_text().split("\n\n")[0]
    assert f"--gin_file={recipe}" in head
    assert "Commonly overridden:" in head
    assert ("Must be set: DATA" in head) == (recipe in PAPER)


def test_the_papers_recipes_have_the_papers_numbers():
    assert {Path(r).stem for r in PAPER} == {"samtone_base", "samtone_large", "samtone_xxl"}
    for recipe in PAPER:
        bound = resolve(recipe)
        assert (bound["steps"], bound["batch_size"]) == (20_000, 512)
        assert isinstance(bound["optimizer"], Adafactor)
        assert (bound["optimizer"].learning_rate, bound["optimizer"].warmup_steps) == (1e-3, 0)
        assert bound["model"].source == f"hf:google/t5-v1_1-{Path(recipe).stem.removeprefix('samtone_')}"
        assert (bound["model"].sharing, bound["model"].projection) == ("sde", 768)
        assert gin.query_parameter("samtone.temperature").scoped_selector == "TEMPERATURE/gin.macro"
        assert gin.query_parameter("TEMPERATURE/gin.macro.value") == 0.01
        assert gin.query_parameter("SAME_TOWER/gin.macro.value") == "query"


def test_macros_reach_the_objects():
    bound = resolve(
        "gin/samtone_large.gin", "SHARING=ade_spl", "LEARNING_RATE=5e-4", "FSDP=2", "MODEL=hf:mine"
    )
    assert bound["model"].sharing == "ade_spl"
    assert bound["model"].source == "hf:mine"
    assert bound["model"].scan_layers
    assert bound["model"].remat
    assert bound["optimizer"].learning_rate == 5e-4
    assert bound["mesh"].fsdp == 2


def test_the_quickstart_trains_only_on_training_packages():
    bound = resolve("gin/quickstart.gin")
    assert bound["data"].split == "train"
    assert isinstance(bound["optimizer"], AdamW)


@pytest.mark.parametrize("objective", ["in_batch_softmax", "pair", "samtone"])
def test_objectives_are_interchangeable_pieces(objective, tmp_path):
    recipe = tmp_path / "mine.gin"
    recipe.write_text(
        'include "gin/models/minilm.gin"\n'
        f'include "gin/objectives/{objective}.gin"\n'
        'include "gin/runs/samtone_paper.gin"\n'
    )
    gin_config.bind(train, [str(recipe)], ["DATA=somewhere", "TEMPERATURE=0.07"], {})
    loss = gin.get_bindings(train)["objective"].loss
    assert loss.__name__ == objective


def test_the_command_finds_recipes_from_any_directory_and_names_a_misspelling(tmp_path):
    command = [sys.executable, "-m", "jaxir.train", "--gin_file=gin/samtone_base.gin", "--output_dir=run"]
    done = subprocess.run(
        [*command, "--gin.DATAA=x"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "error: macro DATAA is set but nothing uses it; did you mean 'DATA'?"
    assert not list(tmp_path.iterdir())

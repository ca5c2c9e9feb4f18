"""The gin recipes in docs/datasets.md can be bound."""

import re
from pathlib import Path

import gin
import pytest

from jaxir.cli import gin_config
from jaxir.data.batches.mixture import Mixture
from jaxir.data.sets.msmarco import MsMarcoPairs
from jaxir.data.sets.multireqa import MultiReqaPairs
from jaxir.train import train

PAGE = (Path(__file__).parents[2] / "docs/datasets.md").read_text()
SQUAD = MultiReqaPairs(
    mrqa="mrqa/train/SQuAD.jsonl.gz", candidates="MultiReQA/data/train/SQuAD/candidates.json.gz"
)


def block(containing: str) -> str:
    blocks = re.findall(r"^```gin\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [b for b in blocks if containing in b]
    return found


@pytest.fixture
def bound(tmp_path):
    def bind(text: str):
        (tmp_path / "recipe.gin").write_text(text)
        gin_config.bind(train, [str(tmp_path / "recipe.gin")], [], {})
        return gin.get_bindings(train)

    yield bind
    gin.clear_config()


def test_the_recipe_of_multireqa(bound):
    recipe = bound(block('include "gin/samtone_base.gin"'))
    assert recipe["data"] == SQUAD
    assert (recipe["dev"].directory, recipe["dev"].split) == ("squad-dev", "dev")
    model = recipe["model"]
    assert (model.query_max_length, model.passage_max_length) == (64, 256)


def test_the_recipe_of_a_mixture(bound):
    imports = ["from __gin__ import dynamic_registration", "from jaxir import train"]
    imports += ["from jaxir.data.sets import msmarco", "from jaxir.data.sets import multireqa"]
    text = block("mixture.Mixture.rates")
    recipe = bound("\n".join([*imports, text]))
    assert recipe["data"] == Mixture(sources=[SQUAD, MsMarcoPairs(directory="msmarco")], rates=[1, 3])

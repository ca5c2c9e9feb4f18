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
    imports = ["__gin__ import dynamic_registration", "jaxir import train"]
    imports += [f"jaxir.data.sets import {name}" for name in ("msmarco", "multireqa")]
    recipe = bound("\n".join([*(f"from {line}" for line in imports), block("mixture.Mixture.rates")]))
    assert recipe["data"] == Mixture(sources=[SQUAD, MsMarcoPairs(directory="msmarco")], rates=[1, 3])


def test_the_recipe_of_prompts_and_a_temperature(bound):
    recipe = bound(block("mixture.Mixture.temperature"))
    mixture, dev = recipe["data"], recipe["dev"]
    assert (mixture.temperature, mixture.rates, len(mixture.sources)) == (2.0, None, 2)
    assert [source.data.path for source in mixture.sources] == ["questions.jsonl", "claims.jsonl"]
    prompts = [source.query_prompt for source in (*mixture.sources, dev)]
    assert prompts[2] == prompts[0] != prompts[1] and prompts[1].endswith("retrieve evidence\nQuery: ")

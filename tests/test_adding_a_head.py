"""The page's head in a user's file: trained, resumed, with adapters, and loaded in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.beir_folder import write_folder

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "adding_a_head.md").read_text()
LOAD = """
import sys

import jax.numpy as jnp
if sys.argv[2:]:
    import facets
from jaxir.interop import model_dir

loaded = model_dir.load(sys.argv[1], kind="facets")
print(loaded.step, loaded.model.facets([(jnp.ones([2, 8], jnp.int32), "query", None)])[0].shape)
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def place(tmp_path):
    head, recipe = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "facets.py").write_text(head)
    small = {"st:all-MiniLM-L6-v2": f"st:{ROOT}/tests/golden/bert", "DIR": "data", "steps=100": "steps=4"}
    for old, new in {
        **small,
        "batch_size=32": "batch_size=8, checkpoint_every=2, eval_every=2, dev=DEV, dev_metric='loss'",
    }.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    recipe = recipe.replace("dev=DEV", 'dev=BeirPairs(directory="data", split="dev")')
    (tmp_path / "my_recipe.py").write_text(recipe)
    (tmp_path / "load.py").write_text(LOAD)
    write_folder(tmp_path / "data", train=16)
    return tmp_path


@pytest.mark.slow
def test_pages_head_trains_resumes_and_loads(place):
    done = run(place, "-m", "jaxir.train", "--recipe=my_recipe.py", "--output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "step 4/4  dev  loss" in done.stdout + done.stderr
    done = run(place, "load.py", "run", "import")
    assert done.stdout == "4 (2, 128)\n", done.stderr

    done = run(place, "load.py", "run")  # without importing the head's module
    assert done.returncode == 1
    assert re.search("unknown kind of model 'facets'; .*: import facets first", done.stderr), done.stderr

    recipe = (place / "my_recipe.py").read_text()
    (place / "again.py").write_text(
        recipe.replace("head=facets.with_facets", "head=facets.with_facets, lora_rank=2").replace(
            "FacetContrastive()", "FacetContrastive(chunks=2)"
        )
    )
    done = run(place, "-m", "jaxir.train", "--recipe=again.py", "--output_dir=adapted")
    assert done.returncode == 0, done.stderr
    assert run(place, "load.py", "adapted", "import").stdout == "4 (2, 128)\n"
    again = (place / "again.py").read_text().replace(f"st:{ROOT}/tests/golden/bert", "run")
    (place / "more.py").write_text(again)
    done = run(place, "-m", "jaxir.train", "--recipe=more.py", "--output_dir=more")
    assert done.returncode == 0, done.stderr


def test_an_unregistered_configuration_is_named(place):
    code = "import facets\nfrom jaxir.interop.model import kinds\ndel kinds.KINDS['facets']\n"
    code += "kinds.name_of(facets.FacetsConfig(backbone=None))"
    done = run(place, "-c", code)
    assert "FacetsConfig describes no kind of model that is known: register it with" in done.stderr

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import jaxir as here

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "golden" / "bert"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
THINGS = [f"{a} {b}" for a in ("red", "old", "big") for b in ("sea", "hat", "sun", "elk")]
PAIRS = [(f"what is {thing}?", f"{thing} is a thing") for thing in THINGS]
# The model and the loss are pieces of the wheel; the run is a file of the working directory with the name of
# one of its pieces.
RECIPE = """
include "gin/models/minilm.gin"
include "gin/objectives/in_batch_softmax.gin"
include "gin/runs/few_steps.gin"
"""
RUN = """
from __gin__ import dynamic_registration
from jaxir import train
from jaxir.data.sets import pair_sources
from jaxir.objectives import contrastive
import my_loss

TEMPERATURE = 0.05
train.train.steps = 3
train.train.batch_size = 4
train.train.data = @pair_sources.JsonlPairs()
pair_sources.JsonlPairs.path = "pairs.jsonl"
contrastive.Contrastive.loss = @my_loss.louder
"""
LOSS = """
from jaxir import in_batch_softmax

def louder(*arrays, **settings):
    print("a loss of the working directory")
    return in_batch_softmax(*arrays, **settings)
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command without this clone and without this environment's variables for Python."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA_"))}
    env |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of all files that git tracks or would track, because building leaves files behind."""
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    copy = tmp_path_factory.mktemp("source")
    for name in filter(lambda name: (ROOT / name).exists(), listed.split("\0")[:-1]):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return copy


def build(what: Path, output: Path) -> Path:
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", f"--wheel-dir={output}", what)
    (wheel,) = output.iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def jaxir(wheel, tmp_path_factory) -> Path:
    """The command of an environment with the wheel and the dependencies of this environment."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True, with_pip=False)
    run(*PIP, "--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    (packages,) = home.glob("lib/python*/site-packages")
    # Python ignores .pth files, such as an editable installation's, in folders that another .pth file names.
    needed = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "needed.pth").write_text("\n".join(needed) + "\n")
    return home / "bin" / "jaxir"


def test_wheel_holds_code_recipes_and_tasks(source, wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    notes = f"jaxir-{here.__version__}.dist-info/"
    assert {name.split("/")[0] + "/" for name in names} == {"jaxir/", notes}
    for folder, kinds in (("jaxir", "py html txt typed"), ("gin", "gin"), ("tasks", "py")):
        inside = "jaxir" if folder == "jaxir" else f"jaxir/{folder}"
        files = [p for kind in kinds.split() for p in (source / folder).rglob(f"*.{kind}")]
        files += [source / folder / "py.typed"] if folder == "jaxir" else []
        expected = {f"{inside}/{p.relative_to(source / folder).as_posix()}" for p in files}
        assert expected and not expected - names
    assert not [name for name in names if re.search(r"test|benchmark|__pycache__", name)]
    assert f"{notes}licenses/LICENSE" in names


@pytest.mark.slow
def test_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path / 'sdist')!r})"
    run(sys.executable, "-W", "ignore", "-c", code, cwd=source)
    (archive,) = (tmp_path / "sdist").iterdir()
    again = build(archive, tmp_path / "wheel")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


def train(jaxir: Path, folder: Path) -> None:
    (folder / "gin" / "runs").mkdir(parents=True)
    (folder / "gin" / "mine.gin").write_text(RECIPE)
    (folder / "gin" / "runs" / "few_steps.gin").write_text(RUN)
    (folder / "my_loss.py").write_text(LOSS)
    rows = [json.dumps({"query": query, "passage": passage}) for query, passage in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    flags = [f"--gin.MODEL=hf:{MODEL}", "--gin.QUERY_LENGTH=8", "--gin.PASSAGE_LENGTH=8", "--output_dir=run"]
    trained = run(jaxir, "train", "--gin_file=gin/mine.gin", *flags, cwd=folder)
    assert "a loss of the working directory" in trained and "run is complete: 3 steps" in trained


def test_wheel_command_reports_version_and_commands(jaxir, wheel, tmp_path):
    code = "import jaxir.core.installation as i; print(i.__file__, i.how_to_install('serve'), i.clone())"
    told = run(jaxir.with_name("python"), "-c", code, cwd=tmp_path)
    assert told.startswith(str(jaxir.parents[1])) and f"{wheel}[serve]" in told and told.endswith(" None\n")
    assert run(jaxir, "--version", cwd=tmp_path) == f"jaxir {here.__version__}\n"
    assert "  train       Trains" in run(jaxir, cwd=tmp_path)


@pytest.mark.slow
def test_wheel_plans_trains_encodes_indexes_and_searches(jaxir, tmp_path):
    plan = ["--gin_file=gin/quickstart.gin", f"--gin.MODEL=hf:{MODEL}", "--topology=gpu:1xh100"]
    assert "fits: " in run(jaxir, "plan", *plan, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    train(jaxir, tmp_path)

    rows = [json.dumps({"_id": f"d{i}", "text": passage}) for i, (_, passage) in enumerate(PAIRS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    flags = {
        "encode": ["--model=run", "--input=corpus.jsonl", "--tower=passage", "--output=vectors"],
        "index": ["--embeddings=vectors", "--corpus=corpus.jsonl", "--backend=exact", "--output=index"],
        "search": ["--index=index", f"--query={PAIRS[0][1]}", "--k=3"],
    }
    answers = [run(jaxir, command, *given, cwd=tmp_path) for command, given in flags.items()][-1]
    assert PAIRS[0][1] in answers

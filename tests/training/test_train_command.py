"""`python -m jaxir.train`, with gin files and real model and data files."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import cli
from jaxir.interop import model_dir
from tests.training.saved_run import log

pytestmark = pytest.mark.long

MODEL = Path(__file__).parent.parent / "golden" / "bert"
RECIPE = """
from __gin__ import dynamic_registration
from jaxir import train
from jaxir.data.sets import pair_sources
from jaxir.interop import build
from jaxir.losses import samtone
from jaxir.objectives import contrastive
from jaxir.training.step import optimizers

TEMPERATURE = 0.05
train.train.model = @build.Pretrained()
build.Pretrained.source = "hf:{model}"
build.Pretrained.query_max_length = 8
build.Pretrained.passage_max_length = 12
train.train.objective = @contrastive.Contrastive()
contrastive.Contrastive.loss = @samtone.samtone
samtone.samtone.temperature = %TEMPERATURE
train.train.data = @train/pair_sources.JsonlPairs()
train/pair_sources.JsonlPairs.path = "{data}/train.jsonl"
train.train.dev = @dev/pair_sources.JsonlPairs()
dev/pair_sources.JsonlPairs.path = "{data}/dev.jsonl"
train.train.optimizer = @optimizers.AdamW()
optimizers.AdamW.learning_rate = 1e-3
train.train.steps = 6
train.train.batch_size = 8
train.train.eval_every = 3
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A recipe with 24 training and 6 dev pairs."""
    words = ["apple", "banana", "cherry", "dune", "ember", "fjord", "grove", "harbour", "iris", "jade"]
    rng = np.random.default_rng(0)
    for name, count in (("train", 24), ("dev", 6)):
        rows = [rng.choice(words, 4) for _ in range(count)]
        numbers = [" ".join("abcdefghij"[int(d)] for d in str(i)) for i in range(count)]  # of known letters
        lines = [
            {"query": " ".join([n, *r[:2]]), "passage": " ".join([n, *r])}
            for n, r in zip(numbers, rows, strict=True)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "recipe.gin"
    path.write_text(RECIPE.format(model=MODEL, data=tmp_path))
    return path


def losses(run_dir) -> list[tuple[float | None, float | None]]:
    lines = log(run_dir)
    return [(x.get("loss"), x.get("dev/loss")) for x in lines if "checkpoint" not in x]


def in_process(*flags) -> int:
    return cli.main("jaxir.train:train", list(flags))


@pytest.mark.slow
def test_a_run_is_a_model_and_can_be_repeated_from_its_own_config(tmp_path, recipe, capfd):
    assert in_process(f"--gin_file={recipe}", f"--output_dir={tmp_path}/run") == 0
    captured = capfd.readouterr()
    assert f"{tmp_path}/run is complete: 6 steps; best nDCG@10" in captured.out
    told = re.compile(
        r"step \d+/6  .*|compiling the (step|evaluation)( \.\.\.|: \d+\w*)|.* s a step: about .*"
        r"|cut: 19 of 24 queries .*"
    )
    assert [line for line in captured.err.splitlines() if not told.fullmatch(line)] == []
    loaded, start = model_dir.load(str(tmp_path / "run")), model_dir.load(f"hf:{MODEL}")
    assert (loaded.settings.query_max_length, loaded.settings.passage_max_length) == (8, 12)
    ids = np.array([[2, 7, 9, 3]], np.int32)
    ours, before = (np.asarray(m.model.encode(jnp.asarray(ids), tower="query")) for m in (loaded, start))
    assert np.abs(ours - before).max() > 1e-3

    config = tmp_path / "run" / "config.gin"
    assert in_process(f"--gin_file={config}", f"--output_dir={tmp_path}/again") == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 3  # one logged step, two evaluations

    # It is not resumed with another binding of its loss.
    flags = [f"--gin_file={recipe}", f"--output_dir={tmp_path}/run"]
    capfd.readouterr()
    assert in_process(*flags, "--gin.TEMPERATURE=0.5") == 1
    assert "was trained with objective.loss.temperature=0.05, not 0.5; give" in capfd.readouterr().err
    assert in_process(*flags) == 0
    assert "was already complete: 6 steps" in capfd.readouterr().out

    # What says that it is a model is written anew.
    (tmp_path / "run/jaxir.json").write_text("{")
    (tmp_path / "run/tokenizer/tokenizer.json").unlink()
    assert in_process(*flags) == 0
    assert model_dir.load(str(tmp_path / "run")).fingerprint == loaded.fingerprint


def test_mistakes_cost_one_sentence_and_write_nothing(tmp_path, recipe, capsys):
    output = tmp_path / "run"
    flags = [f"--gin_file={recipe}", f"--output_dir={output}"]
    for extra, sentence in (
        (
            ["--gin.Contrastive.chunks=3"],
            "2 examples on each of the 4 devices that share it cannot be embedded in 3 ",
        ),
        (
            ["--gin.train.batch_size=many"],
            "batch_size must be a whole number from 1 to 16777216, not 'many'",
        ),
        (["--gin.AdamW.learning_rate=1e999"], "AdamW.learning_rate must be a number of at least 0, not inf"),
        (["--gin.TEMPERATURE=0"], "TEMPERATURE must be a number above 0, not 0"),
        (["--num_negatives=1"], "a batch reads 1 negatives of each example, but 24 of 24 have none"),
    ):
        assert in_process(*flags, *extra) == 1
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and sentence in errors[0]
        assert not output.exists()


def small(folder: Path) -> list[str]:
    """Flags with which a shipped recipe trains a small model on `folder`."""
    sizes = ["--batch_size=8", "--gin.QUERY_LENGTH=8", "--gin.PASSAGE_LENGTH=12"]
    return [*sizes, f"--gin.MODEL=hf:{MODEL}", f"--gin.DATA={folder}"]


def test_flags_override_a_recipe_and_its_record_repeats_the_run(tmp_path, folder, one_layer, capfd):
    run, model = tmp_path / "run", f"hf:{one_layer}"
    sizes = [
        "--gin.QUERY_LENGTH=8",
        "--gin.PASSAGE_LENGTH=12",
        f"--gin.MODEL={model}",
        f"--gin.DATA={folder}",
    ]
    flags = [
        *sizes,
        "--batch_size=8",
        "--gin.CHECKPOINT_EVERY=0.5",
        "--eval_every=0.5",
        "--seed=3",
        "--log_every=1",
    ]
    assert in_process("--gin_file=gin/quickstart.gin", *flags, "--steps=12", f"--output={run}") == 0
    assert "run is complete: 12 steps" in capfd.readouterr().out
    config = (run / "config.gin").read_text().splitlines()
    for line in ("steps = 12", "batch_size = 8", "eval_every = 0.5", "seed = 3", "log_every = 1"):
        assert f"train.train.{line}" in config
    assert [line for line in config if ".steps =" in line] == ["train.train.steps = 12"]
    assert not any("output_dir" in line for line in config)
    assert in_process(f"--gin_file={run}/config.gin", f"--output_dir={tmp_path}/again") == 0
    assert losses(tmp_path / "again") == losses(run)
    assert len(losses(run)) == 12
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"6", "12"}
    assert (
        in_process(f"--gin_file={run}/config.gin", f"--output_dir={run}", "--steps=12", "--gin.STEPS=12") == 1
    )
    assert "steps is given twice, by --steps and by --gin.STEPS" in capfd.readouterr().err


@pytest.mark.slow
def test_ones_own_pairs_are_trained_on_for_as_long_as_suits_them(tmp_path, folder, capfd):
    """40 pairs in batches of 8: an epoch is 5 steps, of which a fifth is one."""
    run = tmp_path / "run"
    flags = ["--gin_file=gin/pairs.gin", *small(folder), "--gin.LOG_EVERY=1"]
    assert in_process(*flags, "--epochs=2", f"--output_dir={run}") == 0  # no MIN_STEPS of the file
    assert "run is complete: 10 steps; best nDCG@10" in capfd.readouterr().out
    evaluated = [dev is not None for _, dev in losses(run)]
    assert evaluated.count(True) == 5
    best = json.loads((run / "checkpoints" / "best.json").read_text())["step"]
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"best.json", str(best), "10"}
    model_dir.load(str(run))

    # The same command resumes it; with other epochs it is another run.
    assert in_process(*flags, "--epochs=2", f"--output_dir={run}") == 0
    assert "was already complete: 10 steps" in capfd.readouterr().out
    assert in_process(*flags, "--epochs=1", f"--output_dir={run}") == 1
    assert "steps" in capfd.readouterr().err

    (folder / "qrels" / "dev.tsv").unlink()
    assert in_process(*flags, f"--output_dir={tmp_path}/none") == 1
    assert "has no split 'dev' (has: test, train)" in capfd.readouterr().err

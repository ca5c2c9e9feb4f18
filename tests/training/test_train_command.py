"""`python -m jaxir.train`, with shipped gin files and real model and data files."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxir import cli
from jaxir.interop import model_dir
from tests.training.saved_run import log

pytestmark = pytest.mark.long


def losses(run_dir) -> list[tuple[float | None, float | None]]:
    return [(x.get("loss"), x.get("dev/loss")) for x in log(run_dir) if "checkpoint" not in x]


def train(*flags) -> int:
    return cli.main("jaxir.train:train", list(flags))


@pytest.fixture
def flags(folder, one_layer) -> list[str]:
    """Flags that train a small model on 40 pairs, in batches of 8."""
    sizes = ["--gin.BATCH_SIZE=8", "--gin.QUERY_LENGTH=8", "--gin.PASSAGE_LENGTH=12"]
    return ["--gin_file=gin/pairs.gin", *sizes, f"--gin.MODEL=hf:{one_layer}", f"--gin.DATA={folder}"]


def test_a_run_is_a_model_that_its_config_repeats(tmp_path, flags, one_layer, capfd):
    run = tmp_path / "run"
    typed = [*flags, "--steps=12", "--eval_every=0.5", "--seed=3", "--log_every=1"]
    typed.append("--gin.CHECKPOINT_EVERY=0.5")
    assert train(*typed, f"--output={run}") == 0
    captured = capfd.readouterr()
    assert f"{run} is complete: 12 steps; best nDCG@10" in captured.out
    expected = re.compile(
        r"step \d+/12  .*|compiling the (step|evaluation)( \.\.\.|: \d+\w*)|.* s per step: about .*"
        r"|(truncated|warning: 9 of 40 different queries).*"
    )
    assert [line for line in captured.err.splitlines() if not expected.fullmatch(line)] == []
    loaded, start = model_dir.load(str(run)), model_dir.load(f"hf:{one_layer}")
    assert (loaded.settings.query_max_length, loaded.settings.passage_max_length) == (8, 12)
    ids = jnp.asarray([[2, 7, 9, 3]], jnp.int32)
    ours, before = (np.asarray(m.model.encode(ids, tower="query")) for m in (loaded, start))
    assert np.abs(ours - before).max() > 1e-3

    config = (run / "config.gin").read_text().splitlines()
    for line in ("steps = 12", "eval_every = 0.5", "seed = 3", "log_every = 1"):
        assert f"train.train.{line}" in config
    assert [line for line in config if ".steps =" in line] == ["train.train.steps = 12"]
    assert not any("output_dir" in line for line in config)
    # 2.4 epochs of 5 steps are 12 steps, too; they replace `steps` and MIN_STEPS.
    assert train(f"--gin_file={run}/config.gin", f"--output_dir={tmp_path}/again", "--epochs=2.4") == 0
    assert losses(tmp_path / "again") == losses(run) and len(losses(run)) == 12 + 2
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"6", "12", "best.json"}

    typed.append(f"--output_dir={run}")
    capfd.readouterr()
    assert train(*typed, "--gin.TEMPERATURE=0.5") == 1
    assert "was trained with objective.loss.temperature=0.05, not 0.5; give" in capfd.readouterr().err
    assert train(*typed, "--gin.STEPS=12") == 1
    assert "steps is given twice, by --steps and by --gin.STEPS" in capfd.readouterr().err

    # A complete run gets the files that make it a model again.
    (run / "jaxir.json").write_text("{")
    (run / "tokenizer/tokenizer.json").unlink()
    assert train(*typed) == 0
    assert "was already complete: 12 steps" in capfd.readouterr().out
    assert model_dir.load(str(run)).fingerprint == loaded.fingerprint


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--gin.Contrastive.chunks=3", "2 examples on each of the 4 devices that share it cannot be"),
        ("--gin.LOG_EVERY=many", "must be a whole number of at least 1, not 'many'"),
        ("--gin.AdamW.learning_rate=1e999", "learning_rate must be a number of at least 0, not inf"),
        ("--gin.TEMPERATURE=0", "TEMPERATURE must be a number above 0, not 0"),
        ("--num_negatives=1", "a batch needs 1 negatives per example, but 40 of 40 have none"),
        ("--gin.DEV_SPLIT=held", "has no split 'held' (has: dev, test, train)"),
    ],
)
def test_mistakes_cost_one_sentence_and_write_nothing(tmp_path, flags, capsys, flag, sentence):
    assert train(*flags, f"--output_dir={tmp_path}/run", flag) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and sentence in errors[0]
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused(tmp_path, flags, capsys):
    assert train(*flags, f"--output_dir={tmp_path}/run", "--trackers=wandb,csv") == 2
    said = "error: --trackers must be a list, each 'wandb' or 'trackio', not ['wandb', 'csv']\n"
    assert capsys.readouterr().err == said

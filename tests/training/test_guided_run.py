"""`python -m jaxir.train` with a guide: the guide stays as it was, and the run has the model alone."""

import numpy as np
import pytest

from jaxir import cli
from jaxir.interop import model_dir
from tests.training.saved_run import arrays, log

pytestmark = pytest.mark.slow


def test_a_guided_run_leaves_the_guide_unchanged_and_keeps_its_margin(folder, one_layer, tmp_path, capsys):
    flags = ["--gin_file=gin/pairs.gin", "--gin_file=gin/objectives/gist.gin", f"--data={folder}"]
    flags += [f"--model=hf:{one_layer}", f"--guide=hf:{one_layer}"]
    flags += ["--margin_strategy=relative", "--batch_size=8", "--query_length=8", "--passage_length=12"]
    flags += ["--loss=@matryoshka.matryoshka", "--dimensions=[32,16]", "--chunks=2", "--block_size=4"]
    flags += ["--checkpoint_every=2", "--keep_last=3", "--log_every=1", "--eval_every=4"]

    def train(run, margin):
        typed = ["--steps=4", f"--guide_margin={margin}", f"--output_dir={tmp_path / run}"]
        return cli.main("jaxir.train:train", [*flags, *typed])

    assert train("run", 0.03) == 0
    lines = [line for line in log(tmp_path / "run") if "loss" in line]
    assert 0 < sum(line["masked_by_guide"] for line in lines) < 4
    assert all("loss_at_16" in line for line in lines)
    before, after = arrays(tmp_path / "run", 2), arrays(tmp_path / "run", 4)
    of_guide = [name for name in before if name.startswith("auxiliary")]
    assert of_guide and all(np.array_equal(before[name], after[name]) for name in of_guide)
    assert not any("guide" in name for name in before if name.startswith("opt_state"))
    assert model_dir.load(str(tmp_path / "run")).model.config.backbone.num_layers == 1
    capsys.readouterr()
    assert train("run", 0.2) == 1
    assert "was trained with" in capsys.readouterr().err
    assert train("other", 0.9) == 1
    assert "or a smaller guide_margin or another guide, which may leave out all" in capsys.readouterr().err

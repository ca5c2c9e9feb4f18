"""Runs on texts alone, from the command line: each objective trains, resumes and yields an encoder."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.interop import model_dir
from jaxir.retrieval.encoding.text_encoder import DualEncoder
from tests.training.saved_run import log

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
OBJECTIVES = ("consert", "mlm_autoencoder", "multi_task", "diffcse", "cpdae", "seed", "prop", "ict")
SMALLER = {name: ["DECODER_LAYERS=1"] for name in ("mlm_autoencoder", "multi_task", "seed")}
SMALLER["cpdae"] = ["IDF=True"]
SMALLER["diffcse"] = [f"GENERATOR=hf:{GOLDEN}/mlm_bert", "SENTENCES=True", 'CHANGED_TEXT="both"']


@pytest.fixture
def train(tmp_path):
    rng, words = np.random.default_rng(0), [f"{a}{b}" for a in "dhlm" for b in "aeio"]
    lines = [". ".join(" ".join(rng.choice(words, 3)).capitalize() for _ in range(2)) for _ in range(60)]
    (tmp_path / "texts.txt").write_text("\n".join(lines[:40]) + "\n")
    (tmp_path / "held_out.txt").write_text("\n".join(lines[40:]) + "\n")
    pairs = "".join(f"{n % 5}\t{lines[n]}\t{lines[n + 1]}\n" for n in range(20))
    (tmp_path / "dev.tsv").write_text("score\tsentence1\tsentence2\n" + pairs)

    def run(name: str, *flags: str) -> Path:
        start = [f"--gin.TEXT={tmp_path}/texts.txt", f"--gin.MODEL=st:{GOLDEN / 'bert'}"]
        sizes = ["--gin.PASSAGE_LENGTH=16", "--gin.QUERY_LENGTH=16", "--gin.BATCH_SIZE=8", "--log_every=1"]
        files = ["--gin_file=gin/unsupervised.gin", *(f for f in flags if f.startswith("--gin_file"))]
        others = [f for f in flags if not f.startswith("--gin_file")]
        run_dir = tmp_path / name
        command = [*files, *start, *sizes, *others, f"--output_dir={run_dir}"]
        assert cli.main("jaxir.train:train", command) == 0
        return run_dir

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_trains_resumes_and_leaves_an_encoder(name, train, tmp_path):
    piece = f"--gin_file=gin/objectives/{name}.gin"
    judges = ["--gin_file=gin/evaluators/sts.gin", "--gin_file=gin/evaluators/loss.gin"]
    flags = [piece, *judges, f"--gin.STS={tmp_path}/dev.tsv"]
    flags += [] if name == "ict" else [f"--gin.DEV_TEXT={tmp_path}/held_out.txt"]
    flags += ["--gin.train.train.evaluators=[@loss.Loss(), @sts.STS()]", "--gin.DEV_METRIC=spearman"]
    flags += ["--gin.EVAL_EVERY=2", "--gin.CHECKPOINT_EVERY=2", "--gin.KEEP_LAST=3"]
    flags += [f"--gin.{binding}" for binding in SMALLER.get(name, [])]
    if name == "ict":
        flags += ["--gin.loss.Loss.data=@held_out/clozes.Clozes()"]
        flags += [f"--gin.held_out/clozes.Clozes.path='{tmp_path}/held_out.txt'"]
    whole = train("whole", *flags, "--steps=6")
    lines = log(whole)
    assert {x["step"] for x in lines if "dev/spearman" in x and "dev/loss" in x} == {2, 4, 6}
    losses = [x["loss"] for x in lines if "loss" in x]
    assert len(losses) == 6 and np.isfinite(losses).all() and len(set(losses)) == 6

    # The steps after a checkpoint are lost, and trained again with the same result.
    resumed = Path(shutil.copytree(whole, tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoints" / "6")
    (resumed / "COMPLETE").unlink()
    train("resumed", *flags, "--steps=6")
    one, other = (model_dir.read(str(run))[0].params for run in (whole, resumed))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[n], other[n]) for n in one)

    assert not any(word in n for n in one for word in ("projector", "generator", "discriminator", "decoder"))
    vectors = DualEncoder.load(str(whole)).encode_passages(["da de", "ha lo", "mi ma"])
    assert vectors.shape == (3, 16) and np.isfinite(vectors).all()
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.combinations(vectors, 2))

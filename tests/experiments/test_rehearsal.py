from pathlib import Path

import pytest

from jaxir import cli
from jaxir.cli import gin_config
from jaxir.core.errors import UserError
from jaxir.experiments.rehearsal import rehearse
from jaxir.interop import model_dir
from jaxir.interop.build import Pretrained, PretrainedCrossEncoder, outline_of
from jaxir.train import _write_gin, train

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def run(recipe: str, model: str, *more: str) -> list[str]:
    flags = [f"--gin_file=gin/{recipe}.gin", "--gin.DATA=data", f"--gin.MODEL={model}", "--steps=2", *more]
    return ["-m", "jaxir.train", *flags, "--seed=1", "--output_dir=elsewhere"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> str:
    made = PretrainedCrossEncoder(source=f"hf:{GOLDEN / 'cross_distilbert'}").build(seed=0)
    place = tmp_path_factory.mktemp("models") / "reranker"
    model_dir.save(place, made.model, made.tokenizer, made.settings)
    return str(place)


def test_models_of_each_kind_are_checked(reranker, tmp_path):
    mined = "--gin.MINED=mined.jsonl"
    runs = [
        run("pairs", f"st:{GOLDEN / 'bert'}"),
        run("reranker", f"st:{GOLDEN / 'bert'}", mined),
        run("reranker", reranker, mined),
        run("generator", f"hf:{GOLDEN / 'seq2seq_1_1'}"),
    ]
    rehearse(runs, tmp_path)
    with pytest.raises(UserError, match=r"^training would be refused: .*is a cross-encoder.*expected a dual"):
        rehearse([runs[2], run("pairs", reranker)], tmp_path)


def error_of(words: list[str], capsys) -> str:
    assert cli.main("jaxir.experiments.rehearsal:training", words[2:]) == 1
    return capsys.readouterr().err


def test_objective_of_another_kind_of_model_is_refused(reranker, capsys):
    wrong = run("reranker", reranker, "--gin.MINED=x", "--gin_file=gin/objectives/simcse.gin")
    assert "SimCSE trains a dual encoder" in error_of(wrong, capsys)


def test_stage_whose_result_is_unused_is_refused(tmp_path, capsys):
    (tmp_path / "random.gin").write_text('include "gin/pairs.gin"\nFROM_SCRATCH = True\n')
    second = ["-m", "jaxir.train", f"--gin_file={tmp_path}/random.gin", "--gin.DATA=data", "--steps=2"]
    second += [f"--gin.MODEL={tmp_path}/cell/stage1", f"--output_dir={tmp_path}"]
    assert "stage1 would be trained in vain, because" in error_of(second, capsys)


def test_manual_run_is_compared_by_settings_not_directories(tmp_path, capsys):
    place = tmp_path / "grid" / "cells" / "a" / "model"
    place.mkdir(parents=True)

    def check(data: str, *bindings: str, seed: int = 1) -> str:
        flags = [f"--gin.DATA={data}", "--gin.MODEL=hf:someone/model", "--gin.BATCH_SIZE=8", "--steps=2"]
        flags += [*(f"--gin.{b}" for b in bindings), f"--seed={seed}", f"--output_dir={place}"]
        assert cli.main("jaxir.experiments.rehearsal:manual", ["--gin_file=gin/pairs.gin", *flags]) in (0, 1)
        return capsys.readouterr().err

    assert check("data") == "", "without config.gin"
    given = ["gin/pairs.gin"], ["DATA=/somewhere/else/data", "MODEL=hf:someone/model", "BATCH_SIZE=8"]
    gin_config.bind(train, *given, {"steps": 2, "seed": 1, "output_dir": str(place)})
    _write_gin(place)
    assert check("data") == check("a/longer/way/to/" * 9 + "data") == ""
    for error, differing in {
        check("other"): "with dev_pairs.directory = 'data'",
        check("data", "BATCH_SIZE=16"): "with train.batch_size = 8",
        check("data", seed=2): "with train.seed = 1",
        check("data", "AdamW.b2=0.5"): "without AdamW.b2 = 0.5",
    }.items():
        sentence = f"error: {place} was trained {differing}: give another output_dir, remove that directory"
        assert error.startswith(sentence) and error.count("\n") == 1


def test_custom_source_needs_no_model():
    made = outline_of(Pretrained(source=f"st:{GOLDEN / 'bert'}"))

    class Own:
        def outline(self, read):
            return made[:2]

    assert made[2] is not None and outline_of(Own()) == (*made[:2], None)

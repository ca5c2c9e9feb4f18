"""Runs of sparse encoders: resumed, with adapters, from a dual encoder, and as folders of other libraries."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxir import Pairs, SparseEncoder
from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import PretrainedSparse
from jaxir.interop.formats import convert
from jaxir.objectives.splade import Sparsity, Splade
from jaxir.training.evaluators.sts import STS
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.optimizers import AdamW
from jaxir.training.trainer import train
from tests.training.saved_run import arrays, log

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = [
    "a lazy dog",
    "the quick fox",
    "jumps over",
    "lorem ipsum",
    "dolor sit",
    "red blue",
    "one two",
    "x y",
]
PAIRS = Pairs(TEXTS, [f"{text} indeed" for text in TEXTS])


def recipe(source=f"hf:{GOLDEN}/mlm_bert", *, evaluators=None, dev=PAIRS, **model):
    lengths = {"query_max_length": 8, "passage_max_length": 8}
    return Recipe(
        model=PretrainedSparse(source=source, **lengths | model),
        objective=Splade(sparsity=Sparsity(lambda_d=0.1, lambda_q=0.1, regularizer_warmup=0.5), chunks=2),
        data=PAIRS,
        dev=dev,
        evaluators=evaluators,
        steps=4,
        batch_size=8,
        optimizer=AdamW(learning_rate=1e-2),
        checkpoint_every=2,
        eval_every=2,
        log_every=1,
    )


@pytest.mark.slow
def test_run_resumes_exactly_and_opens_as_a_sparse_encoder(tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    train(recipe(), run)
    logged = log(run)
    steps = {line["step"]: line for line in logged if "regularization" in line}
    sums = {step: line["query_regularizer"] + line["passage_regularizer"] for step, line in steps.items()}
    ramp = [steps[step]["regularization"] / (0.1 * sums[step]) for step in (1, 2, 3, 4)]
    np.testing.assert_allclose(ramp, [0, 0.25, 1, 1], rtol=1e-5)
    assert steps[4]["passage_regularizer"] < steps[1]["passage_regularizer"]
    assert {"dev/nDCG@10", "dev/loss", "dev/query_active_dims", "dev/flops"} <= set().union(*logged)

    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints/4")
    (again / "COMPLETE").unlink()
    train(recipe(), again)
    expected = arrays(run, 4)
    for name, array in arrays(again, 4).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)

    found = SparseEncoder.load(str(run)).encode_queries(TEXTS)
    convert(str(run), tmp_path / "folder", "st")
    np.testing.assert_allclose(
        SparseEncoder.load(f"st:{tmp_path}/folder").encode_queries(TEXTS).toarray(),
        found.toarray(),
        atol=1e-6,
    )
    start = SparseEncoder.load(f"hf:{GOLDEN}/mlm_bert", query_max_length=8)
    assert abs(start.encode_queries(TEXTS) - found).max() > 0.1


@pytest.mark.slow
def test_a_dual_encoder_gets_a_head_and_adapters(tmp_path):
    run, source = tmp_path / "run", f"st:{GOLDEN}/bert"
    train(recipe(source, lora_rank=2, dev=None), run)
    names = {name.replace("']['", ".").strip("[']") for name in arrays(run, 4, "params")}
    assert all("adapter" in name or "head" in name for name in names), names
    assert any("adapter" in name for name in names) and any("head" in name for name in names)
    found, _ = model_dir.read(str(run), kind="sparse_encoder")
    base, _ = model_dir.read(source)
    table = "encoder.embeddings.token.embedding"
    np.testing.assert_array_equal(np.asarray(found.params[table]), np.asarray(base.params[table]))
    convert(str(run), tmp_path / "folder", "st")
    one, other = (
        SparseEncoder.load(spec).encode_queries(TEXTS) for spec in (str(run), f"st:{tmp_path}/folder")
    )
    assert one.nnz  # a new head starts with few weights above 0
    np.testing.assert_allclose(one.toarray(), other.toarray(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": f"hf:{GOLDEN}/t5_1_1"}, "no masked language model has model_type 't5', so the encoder"),
        (
            {"source": f"st:{GOLDEN}/cross_bert"},
            "a sparse encoder starts from a masked language model or one",
        ),
        (
            {"evaluators": [STS(path="DIR")]},
            "this evaluator compares dense vectors, but the model is a sparse",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message, tmp_path):
    (tmp_path / "sts.tsv").write_text("score\tsentence1\tsentence2\n3.0\ta\tb\n1\ta\tc\n")
    if "evaluators" in changes:
        changes = {"evaluators": [STS(path=str(tmp_path / "sts.tsv"))]}
    made = dataclasses.replace(recipe(**changes, dev=None), dev_metric="spearman")
    with pytest.raises(UserError, match=message):
        train(made, tmp_path / "run")

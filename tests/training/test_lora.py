"""LoRA: a run trains and stores adapters alone, resumes exactly, and opens as base plus adapters."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxir import CrossEncoder, DualEncoder, Generator, Pairs
from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import Pretrained, PretrainedCrossEncoder, PretrainedSeq2Seq
from jaxir.interop.formats import convert
from jaxir.interop.weights import stores
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.reranking import Reranking
from jaxir.objectives.seq2seq import Seq2Seq
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.optimizers import AdamW
from jaxir.training.trainer import train

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = [
    "a lazy dog",
    "the quick fox",
    "jumps over",
    "lorem ipsum",
    "dolor sit amet",
    "red blue",
    "one two",
    "x y",
]
PAIRS = Pairs(TEXTS, [f"{t} indeed" for t in TEXTS])


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """golden/qwen3 with another model's tokenizer."""
    folder = Path(shutil.copytree(GOLDEN / "qwen3", tmp_path_factory.mktemp("lora") / "qwen3"))
    shutil.copy(GOLDEN / "bert" / "tokenizer.json", folder)
    return folder


def recipe(source, steps=4, *, objective=None, frozen=None, **model):
    how = {"source": f"hf:{source}", "lora_rank": 3, "query_max_length": 8, "passage_max_length": 8}
    return Recipe(
        model=Pretrained(**how | model),
        objective=objective or Contrastive(),
        data=PAIRS,
        steps=steps,
        batch_size=8,
        optimizer=AdamW(learning_rate=1e-2),
        checkpoint_every=2,
        frozen=frozen,
    )


def arrays(directory):
    return {".".join(keys): spec for keys, spec in stores.orbax_specs(directory).items()}


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_run_stores_only_adapters_and_opens_with_its_base(tmp_path, qwen3, scan):
    run = tmp_path / "run"
    train(recipe(qwen3, lora_targets=["query", "up_proj"], scan_layers=scan), run)
    names = arrays(run / "checkpoints/4/params")
    assert names and all(".adapter." in name for name in names), names
    modules = {n.rpartition(".adapter")[0].rpartition("layers.")[2].lstrip("0123456789.") for n in names}
    assert modules == {"attention.query", "mlp.wi_1"}
    found, _ = model_dir.read(str(run))
    base, _ = model_dir.read(f"hf:{qwen3}")
    for name, value in base.params.items():
        assert np.array_equal(np.asarray(found.params[name]), np.asarray(value)), name
    convert(str(run), tmp_path / "merged", "jaxir")
    one, other = (DualEncoder.load(str(d)).encode_queries(TEXTS) for d in (run, tmp_path / "merged"))
    start = DualEncoder.load(f"hf:{qwen3}").encode_queries(TEXTS)
    np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.abs(one - start).max() > 1e-2


def test_resumed_run_has_the_same_bits(tmp_path, one_layer):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    objective = Contrastive(chunks=2)  # gradient caching in two chunks
    train(recipe(one_layer, objective=objective), whole)
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "4")
    (stopped / "COMPLETE").unlink()
    result = train(recipe(one_layer, objective=objective), stopped)
    assert (result.started_at, result.step) == (2, 4)
    for name in ("params", "opt_state"):
        one, other = (
            stores.open_arrays("x", arrays(d / "checkpoints/4" / name), None) for d in (whole, stopped)
        )
        assert one.keys() == other.keys()
        assert all(np.array_equal(np.asarray(one[n]), np.asarray(other[n])) for n in one)
    with pytest.raises(UserError, match=r"model=.*another output_dir"):
        train(recipe(one_layer, objective=objective, lora_alpha=7.0), stopped)


def reranked(source):
    """A reranker on bert's first layer: its new head is trained and stored, too."""
    model = PretrainedCrossEncoder(source=source, lora_rank=2, query_max_length=8, passage_max_length=8)
    return model, Reranking(), Pairs(TEXTS, TEXTS, [[TEXTS[i - 1]] for i in range(8)])


def written(source):
    model = PretrainedSeq2Seq(source=source, lora_rank=2, query_max_length=8, passage_max_length=8)
    return model, Seq2Seq(source="passage", target="query"), PAIRS


@pytest.mark.parametrize(
    ("make", "folder", "opened"),
    [
        (reranked, "one_layer", lambda run: CrossEncoder.load(run).score([("a dog", "the cat")])),
        pytest.param(
            written,
            "one_layer_seq2seq",
            lambda run: np.array([len(text) for text in Generator.load(run).generate(["a dog"])[0]]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_kinds_of_models_train_adapters(tmp_path, request, make, folder, opened):
    model, objective, data = make(f"hf:{request.getfixturevalue(folder)}")
    how = {"objective": objective, "data": data, "steps": 2, "batch_size": 8}
    train(Recipe(model=model, num_negatives=1 if make is reranked else 0, **how), tmp_path / "run")
    names = arrays(tmp_path / "run/checkpoints/2/params")
    heads = {name for name in names if ".adapter." not in name}
    new = {"pooler.kernel", "pooler.bias", "classifier.kernel", "classifier.bias"}
    assert heads == (new if make is reranked else set()) and len(names) > len(heads)
    assert np.isfinite(opened(str(tmp_path / "run"))).all()


@pytest.mark.slow
def test_towers_of_an_ade_adapt_one_base(tmp_path, one_layer):
    run = tmp_path / "run"
    train(recipe(one_layer, 2, sharing="ade_spl", projection=8, lora_targets="query"), run)
    names = {name.partition(".")[0] for name in arrays(run / "checkpoints/2/params")}
    assert names == {"query_encoder", "passage_encoder", "projection"}
    encoder = DualEncoder.load(str(run))
    assert np.abs(encoder.encode_queries(TEXTS) - encoder.encode_passages(TEXTS)).max() > 1e-4


@pytest.mark.slow
def test_a_second_run_continues_the_adapters_or_adds_new_ones(tmp_path, one_layer):
    first, on, anew = tmp_path / "first", tmp_path / "on", tmp_path / "anew"
    train(recipe(one_layer, 2), first)
    settings = {"query_max_length": 8, "passage_max_length": 8}
    for lora_rank, run in ((None, on), (2, anew)):
        model = Pretrained(source=str(first), lora_rank=lora_rank, **settings)
        how = {"objective": Contrastive(), "data": PAIRS, "steps": 1, "batch_size": 8}
        train(Recipe(model=model, optimizer=AdamW(learning_rate=1e-9, weight_decay=0), **how), run)
    vectors = [DualEncoder.load(str(run)).encode_queries(TEXTS) for run in (first, on, anew)]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)
    np.testing.assert_allclose(vectors[2], vectors[0], atol=1e-5)
    bases = [json.loads((run / "jaxir.json").read_text())["base"]["spec"] for run in (on, anew)]
    assert bases == [f"hf:{one_layer}", str(first)]


@pytest.mark.slow
def test_impossible_adapters_and_a_changed_base_are_refused(tmp_path, one_layer):
    for changes, said in (
        ({"lora_rank": None, "lora_alpha": 1.0}, "give lora_rank, too"),
        ({"lora_targets": "q_prj"}, r"no dense layer of the encoder is called 'q_prj'"),
        ({"from_scratch": True}, "needs trained weights"),
    ):
        with pytest.raises(UserError, match=said):
            train(recipe(one_layer, **changes), tmp_path / "refused")
    source, run = Path(shutil.copytree(one_layer, tmp_path / "bert")), tmp_path / "run"
    train(recipe(source, 2), run)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    bias = next(name for name in tensors if name.endswith("output.LayerNorm.bias"))
    safetensors.numpy.save_file(tensors | {bias: tensors[bias] + 1}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"whose weights are not those that it was trained on"):
        model_dir.read(str(run))
    shutil.rmtree(source)
    with pytest.raises(UserError, match=r"adapts hf:.*, which cannot be read"):
        model_dir.read(str(run))


@pytest.mark.parametrize("weights", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_adapters_of_a_quantised_model(tmp_path, one_layer, weights):
    """QLoRA: the run opens as the quantised base, as it was in training, plus the adapters."""
    run = tmp_path / "run"
    train(recipe(one_layer, weights=weights, scan_layers=True), run)
    names = arrays(run / "checkpoints/4/params")
    assert names and all(".adapter." in name for name in names)
    trained = Pretrained(source=str(run)).build(seed=0)
    assert any(x.dtype in (np.int8, np.uint8) for x in jax.tree.leaves(nnx.state(trained.model)))
    in_training = DualEncoder(trained.model, trained.tokenizer, trained.settings, "the run's")
    opened, unquantised = DualEncoder.load(str(run)), DualEncoder.load(f"hf:{one_layer}")
    one, other, start = (e.encode_queries(TEXTS) for e in (in_training, opened, unquantised))
    np.testing.assert_allclose(one, other, atol=2e-6)
    assert np.abs(one - start).max() > 1e-3


def test_quantised_weights_are_trained_only_by_adapters(tmp_path, one_layer):
    with pytest.raises(UserError, match="weights='nf4' cannot be trained: give lora_rank, too"):
        train(recipe(one_layer, lora_rank=None, weights="nf4"), tmp_path / "run")

"""ONNX exports answer as the encoders, in a process without JAX and jaxir that follows the README."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxir import CrossEncoder, DualEncoder, cli
from jaxir.core.installation import how_to_install
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import Projection
from jaxir.storage import checksums
from tests.interop.conftest import AWKWARD_TEXTS, SMALL_T5
from tests.interop.folders import GOLDEN

pytest.importorskip("jax2onnx")
onnx = pytest.importorskip("onnx")
WORKER = Path(__file__).with_name("onnx_worker.py")
TEXTS = [*AWKWARD_TEXTS, "it's \\ 'a'"]
QUANTIZE = (
    "import sys; from onnxruntime.quantization import quantize_dynamic; quantize_dynamic(*sys.argv[1:])"
)
SENTENCES = [
    "The treaty is kept in the archive of the ministry.",
    "A protein binds to the receptor and the cell divides.",
    "How long does it take to boil an egg?",
    "The goalkeeper saved the penalty in the last minute.",
]
BERT = BertConfig(vocab_size=100, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, max_positions=40)


def python(*arguments: str) -> str:
    """Runs Python in another process, because the converter replaces functions of jax.numpy."""
    env = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def export(model: str, output: Path, *flags: str) -> str:
    return python("-m", "jaxir.export", "--format=onnx", f"--model={model}", f"--output={output}", *flags)


def answers_of(folder: Path) -> dict[str, np.ndarray]:
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    python(str(WORKER), str(folder))
    with np.load(folder / "answers.npz") as answers:
        return dict(answers)


def assert_same_vectors(answers: dict[str, np.ndarray], name: str, encoder: DualEncoder) -> None:
    towers = {"query": encoder.encode_queries, "passage": encoder.encode_passages}
    for tower, encode in towers.items():
        expected = encode(TEXTS, show_progress=False)
        np.testing.assert_allclose(answers[f"{name}.{tower}"], expected, atol=1e-5)
        assert np.abs(expected[0] - expected[1]).max() > 0.01


@pytest.mark.slow
def test_the_readme_gives_the_vectors_of_the_model(tmp_path, save_model):
    more = {"sharing": "ade_spl", "projection": Projection(dimension=24)}
    model = save_model(tmp_path / "model", BERT, Tokenizer.load(GOLDEN / "bert"), **more)
    out = tmp_path / "out"
    assert export(model, out) == f"wrote {out}\n"
    sums = checksums.read(out)
    assert sums.keys() == {p.name for p in out.iterdir()} - {checksums.NAME} >= {"weights.bin"}
    # Rows with one token, with padding, with an unknown id, and with more tokens than the model has
    # positions.
    ids, mask = np.full([4, 41], 7), np.ones([4, 41], np.int64)
    mask[0, 1:] = mask[1, 20:] = mask[2, 40:] = 0
    ids[2, 3] = 100
    np.savez(out / "rows.npz", input_ids=ids[:, :40], attention_mask=mask[:, :40])
    answers = answers_of(tmp_path)
    encoder = DualEncoder.load(model)
    assert_same_vectors(answers, "out", encoder)
    queries, passages = answers["out.query"], answers["out.passage"]
    assert np.abs(queries - passages).max() > 0.01  # the towers differ, and so do the prompts
    expected = encoder.model.encode(jax.numpy.asarray(np.where(mask, ids, 0)[:, :40], "int32"), tower="query")
    np.testing.assert_allclose(answers["out.rows"], expected, atol=1e-5)
    assert np.isnan(answers["out.rows"]).any(1).tolist() == [False, False, True, False]

    # Shared parameters are stored once.
    params = jax.tree.leaves(nnx.state(encoder.model))
    assert (out / "weights.bin").stat().st_size < sum(p.nbytes for p in params) + 4096 * len(params)
    about = json.loads((out / "jaxir_export.json").read_text())
    assert about["fingerprint"] == encoder.fingerprint and "jax2onnx" in about["versions"]


@pytest.mark.slow
def test_vectors_of_other_models(tmp_path, save_model, two_sentencepieces, minilm_folder):
    """Exports T5 with SentencePiece and stacked layers, a model with padding id 1, and a real model."""
    models = {
        "t5": save_model(tmp_path / "model", SMALL_T5, two_sentencepieces, sharing="ade"),
        "roberta": f"st:{GOLDEN / 'roberta'}",
        "minilm": f"st:{minilm_folder}",
    }
    for name, model in models.items():
        export(model, tmp_path / name)
    answers = answers_of(tmp_path)
    for name, model in models.items():
        assert_same_vectors(answers, name, DualEncoder.load(model))


@pytest.mark.slow
def test_pairs_have_the_scores_of_the_cross_encoder(tmp_path, save_cross_encoder, minilm_folder):
    """Exports models with token types and a prompt, with neither, with BPE, and a real cross-encoder."""
    models = {name: f"hf:{GOLDEN / f'cross_{name}'}" for name in ("deberta", "distilbert", "modernbert")}
    bert = f"hf:{GOLDEN / 'cross_bert'}"
    models["bert"] = save_cross_encoder(tmp_path / "model", bert, query_prompt="ask: ")
    models["minilm"] = save_cross_encoder(tmp_path / "real", f"st:{minilm_folder}")
    for name, model in models.items():
        export(model, tmp_path / name)
    # Rows with one token, with padding, and with an unknown id.
    ids, mask = np.full([3, 40], 7), np.ones([3, 40], np.int64)
    mask[0, 1:] = mask[1, 20:] = 0
    ids[2, 3] = 30_522
    types = mask * (np.arange(40) > 9)
    np.savez(tmp_path / "bert" / "rows.npz", input_ids=ids, attention_mask=mask, token_type_ids=types)
    answers = answers_of(tmp_path)
    for name, model in models.items():
        scorer = CrossEncoder.load(model)
        pairs = [(a, b) for a in TEXTS for b in TEXTS]
        expected = scorer.score(pairs)
        assert sum(len(row.ids) == scorer.max_length for row in scorer.tokens(pairs)) > 5, "some are cut"
        np.testing.assert_allclose(answers[f"{name}.score"], expected, atol=1e-5)
        assert np.ptp(expected) > 0.01, name
        graph = onnx.load(tmp_path / name / "score.onnx", load_external_data=False).graph
        inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if name in ("bert", "minilm") else [])]
        assert [value.name for value in graph.input] == inputs
    model, given = CrossEncoder.load(models["bert"]).model, (np.where(mask, ids, 0), types)
    expected = model.score(*(jax.numpy.asarray(x, "int32") for x in given))
    np.testing.assert_allclose(answers["bert.rows"][:, 0], expected, atol=1e-5)
    assert np.isnan(answers["bert.rows"][:, 0]).tolist() == [False, False, True]


@pytest.mark.slow
def test_default_dynamic_quantization_keeps_vectors(tmp_path, minilm_folder):
    """Quantises a real model with both sets of operators; a column of its kernels is 40 times the others."""
    encoder = DualEncoder.load(f"st:{minilm_folder}")
    tokens = encoder.tokenizer.encode_batch(TEXTS + SENTENCES, max_length=40)
    ids = np.array([np.pad(row, (0, 40 - len(row))) for row in tokens], np.int64)
    given = {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}
    expected = encoder.model.encode(jax.numpy.asarray(ids, "int32"), tower="query")
    for operators in ("onnx", "onnxruntime"):
        out = tmp_path / operators
        export(f"st:{minilm_folder}", out, f"--operators={operators}")
        python("-c", QUANTIZE, str(out / "query.onnx"), str(out / "int8.onnx"))
        graph = onnx.load(out / "query.onnx", load_external_data=False).graph
        kinds = [node.op_type for node in graph.node]
        assert "Gemm" not in kinds and kinds.count("LayerNormalization") == 13
        assert kinds.count("Softmax") == (6 if operators == "onnx" else 0)
        assert (out / "int8.onnx").stat().st_size < 0.26 * (out / "weights.bin").stat().st_size
        float32, int8 = (session_of(out / name).run(None, given)[0] for name in ("query.onnx", "int8.onnx"))
        np.testing.assert_allclose(float32, expected, atol=1e-5)
        cosines = (int8 * float32).sum(1)
        assert cosines[-len(SENTENCES) :].min() > 0.993  # .9915 without products of outliers
        assert cosines.min() > 0.973  # the empty text has the lowest cosine


def session_of(graph: Path):
    import onnxruntime

    return onnxruntime.InferenceSession(str(graph))


def to_onnx(*args, **kwargs):
    raise NotImplementedError("no plugin\nfor pad")


FAILED = (
    r"error: jax2onnx cannot convert the backbone 'bert'.* \(.*: no plugin for pad\); --format=saved_model"
)


@pytest.mark.parametrize(
    ("module", "message"),
    [(None, re.escape(how_to_install("onnx"))), (types.SimpleNamespace(to_onnx=to_onnx), FAILED)],
    ids=["missing", "failing"],
)
def test_missing_or_failing_converter_costs_one_sentence(module, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax2onnx", module)
    flags = ["--format=onnx", f"--model=st:{GOLDEN / 'bert'}", f"--output={tmp_path / 'out'}"]
    assert cli.main("jaxir.export:export", flags) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1
    assert not list(tmp_path.iterdir())

"""A reader trained and used as users do it: its answers are in one passage of several."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxir import cli
from jaxir.core.features import PADDING_TOKEN
from jaxir.evaluate import evaluate
from jaxir.interop import model_dir
from jaxir.retrieval.answering.answer_writer import longest_of
from tests.training.saved_run import log

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
START = f"hf:{GOLDEN / 'seq2seq_1_1'}"
ANSWERS = ["a dog", "cheese", "the table", "night", "mat", "a list", "JAX", "the sea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes one question many times; of each copy's passages, only the second contains its answer."""
    place = tmp_path_factory.mktemp("data")
    files = {"queries": [], "corpus": [], "answers": []}
    run = []
    for i, answer in enumerate(ANSWERS):
        files["queries"].append({"_id": f"q{i}", "text": "what is it"})
        files["answers"].append({"_id": f"q{i}", "answers": [answer, f"{answer}!"]})
        files["corpus"].append({"_id": f"x{i}", "text": "nobody knows"})
        files["corpus"].append({"_id": f"d{i}", "text": f"it is {answer}"})
        run += [f"q{i} Q0 x{i} 1 2 t\n", f"q{i} Q0 d{i} 2 1 t\n"]
    for name, records in files.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (place / "run.trec").write_text("".join(run))
    return place


def train(folder, output, *more: str, model: str = START) -> int:
    flags = ["--gin_file=gin/reader.gin", f"--gin.MODEL={model}", f"--gin.DATA={folder}"]
    flags += [f"--gin.ANSWERS={folder}/answers.jsonl", f"--gin.RUN={folder}/run.trec", "--batch_size=8"]
    flags += ["--gin.QUERY_LENGTH=12", "--gin.PASSAGE_LENGTH=48", "--gin.PASSAGES=2", "--gin.REMAT=False"]
    return cli.main("jaxir.train:train", [*flags, f"--output_dir={output}", *more])


def read(folder, model, output, *more: str) -> int:
    flags = [f"--{name}={folder}/{name}.jsonl" for name in ("queries", "corpus")]
    flags += [f"--model={model}", f"--run={folder}/run.trec", f"--output={output}", "--max_new_tokens=12"]
    return cli.main("jaxir.read:read", [*flags, *more])


def exact(folder, output) -> float:
    return evaluate(predictions=str(output), answers=f"{folder}/answers.jsonl")["metrics"]["EM"]


@pytest.mark.slow
def test_reader_learns_from_the_second_passage(folder, tmp_path, capsys):
    run = tmp_path / "run"
    settings = ["--gin_file=gin/evaluators/reading.gin", f"--gin.DEV_RUN={folder}/run.trec"]
    settings += ["--gin.DEV_NEW_TOKENS=12", "--gin.DROPOUT=0.0", "--gin.LEARNING_RATE=1e-2"]
    settings += ["--steps=400", "--gin.EVAL_EVERY=100", "--gin.CHECKPOINT_EVERY=100"]
    assert train(folder, run, *settings) == 0
    lines = log(run)
    dev = [line for line in lines if "dev/EM" in line]
    assert len(dev) == 4 and max(line["dev/EM"] for line in dev) == 1.0 and dev[-1]["dev/loss"] < 1
    best = json.loads((run / "checkpoints/best.json").read_text())
    assert best["step"] == next(line["step"] for line in dev if line["dev/EM"] == 1.0)
    out = tmp_path / "out.jsonl"
    assert read(folder, run, out, "--passages=2") == 0
    assert f"{out}: 8 texts, 8 outputs, by {run}" in capsys.readouterr().out
    assert exact(folder, out) == 1.0
    beams = tmp_path / "beams.jsonl"
    assert read(folder, run, beams, "--passages=2", "--num_beams=3", "--batch_tokens=128") == 0
    assert exact(folder, beams) == 1.0
    # Without their second passages all questions are the same.
    assert read(folder, run, tmp_path / "first.jsonl", "--passages=1") == 0
    assert exact(folder, tmp_path / "first.jsonl") <= 1 / 8


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--passages=3"], "has at most 2 passages per question, but the reader reads 3"),
        (["--passages=2", "--passage_length=4"], "leave no room for passages in 4 tokens"),
        (["--passages=2", "--run=nowhere.trec"], "nowhere.trec: no such run file"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(folder, tmp_path, capsys, flags, sentence):
    assert read(folder, START, tmp_path / "out.jsonl", *flags) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.splitlines()[-1].startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_expanded_queries_are_refused_as_questions(folder, tmp_path, capsys):
    chosen = tmp_path / "gar.jsonl"
    made = [{"_id": f"q{i}", "outputs": ["a river"]} for i in range(len(ANSWERS))]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made))
    flags = [f"--queries={folder}/queries.jsonl", f"--expansions={tmp_path}/made.jsonl", f"--output={chosen}"]
    assert cli.main("jaxir.expand:choose", flags) == 0
    assert json.loads(chosen.read_text().splitlines()[0])["text"] == "what is it ? a river"
    assert read(folder, START, tmp_path / "out.jsonl", "--passages=2", f"--queries={chosen}") == 1
    assert f"error: {chosen} has expanded queries" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_the_authors_checkpoints_are_read(tmp_path, capsys):
    """facebookresearch/FiD saves T5's encoder, and each of its blocks, in a wrapper."""
    theirs = shutil.copytree(GOLDEN / "seq2seq_1_0", tmp_path / "theirs")
    tensors = safetensors.numpy.load_file(theirs / "model.safetensors")

    def wrapped(name: str) -> str:
        inside = name.removeprefix("encoder.")
        parts = inside.split(".")
        if parts[0] == "block":
            inside = ".".join([*parts[:2], "module", *parts[2:]])
        return name if name == inside else f"encoder.encoder.{inside}"

    renamed = {wrapped(name): value for name, value in tensors.items()}
    renamed["encoder.encoder.embed_tokens.weight"] = tensors["shared.weight"].copy()
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    renamed[bias] = np.ones((32, 4), np.float32)
    assert sum(".module." in name for name in renamed) > 10
    safetensors.numpy.save_file(renamed, theirs / "model.safetensors")
    expected = model_dir.load(f"hf:{GOLDEN / 'seq2seq_1_0'}", kind="seq2seq")
    assert bias not in capsys.readouterr().err
    found = model_dir.load(f"hf:{theirs}", kind="seq2seq")
    assert f"warning: {theirs}: {bias}, a bias" in capsys.readouterr().err
    assert found.fingerprint == expected.fingerprint


def test_a_passage_that_spells_padding_keeps_its_end():
    pad = PADDING_TOKEN
    sources = np.array([[[5, pad, pad, 7, 1, 0], [5, 1, 0, 0, 0, 0]], [[0] * 6, [5, 1, 0, 0, 0, 0]]])
    assert longest_of(sources).tolist() == [5, 2]

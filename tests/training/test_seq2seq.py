"""A generator trained and used as users do it: it learns its targets and writes files of outputs."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxir import cli, expand
from jaxir.data.formats.expansions import read_expansions
from jaxir.models.decoding import Decoding
from jaxir.retrieval.encoding import outputs_file
from jaxir.retrieval.encoding.generator import Generator

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TARGETS = {
    "the cat sat on the mat": "a dog",
    "a dog and a cat": "the cheese",
    "cats chase mice": "on the table",
    "mice eat the cheese": "last night",
    "left on the table": "the mat",
    "How do I sort a list": "a new list",
    "numerical computation": "JAX is a library",
    "the Rhine": "the North Sea",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    examples = [{"source": source, "target": target} for source, target in TARGETS.items()]
    (place / "targets.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples))
    texts = [{"_id": f"t{i}", "text": text} for i, text in enumerate(TARGETS)]
    (place / "texts.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
    return place


def train(data, output, *more: str, model: Path = GOLDEN / "seq2seq_1_1") -> int:
    flags = ["--gin_file=gin/generator.gin", "--gin_file=gin/experiments/targets.gin"]
    flags += [f"--gin.TARGETS={data}/targets.jsonl", f"--gin.MODEL=hf:{model}"]
    flags += ["--gin.QUERY_LENGTH=16", "--gin.PASSAGE_LENGTH=32", "--batch_size=8", "--gin.DROPOUT=0.1"]
    return cli.main("jaxir.train:train", [*flags, f"--output_dir={output}", *more])


def generate(data, model, output, *more) -> int:
    flags = {"model": model, "input": f"{data}/texts.jsonl", "output": output}
    flags |= dict(flag.removeprefix("--").split("=", 1) for flag in more)
    return expand.main(["generate", *(f"--{name}={value}" for name, value in flags.items())])


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_seq2seq_learns_and_generates_its_targets(data, tmp_path, capsys):
    settings = ("--steps=300", "--gin.LEARNING_RATE=1e-2", "--gin.DROPOUT=0.0", "--gin.CHECKPOINT_EVERY=300")
    trained = tmp_path / "run"
    assert train(data, trained, *settings) == 0
    lines = [x for x in records(trained / "log.jsonl") if "loss" in x]
    assert lines[0]["loss"] > 2 and lines[-1]["loss"] < 0.05 and lines[-1]["token_accuracy"] == 1.0
    out = tmp_path / "out.jsonl"
    assert generate(data, trained, out, "--max_new_tokens=16") == 0
    assert f"{out}: 8 texts, 8 outputs, by {trained}" in capsys.readouterr().out
    expected = [{"_id": f"t{i}", "outputs": [target]} for i, target in enumerate(TARGETS.values())]
    assert records(out) == expected
    assert generate(data, trained, out, "--max_new_tokens=16", "--num_beams=3", "--num_outputs=3") == 0
    beams = [r["outputs"] for r in records(out)]
    assert [found[0] for found in beams] == list(TARGETS.values())
    assert all(len(found) == len(set(found)) <= 3 for found in beams)
    # Converted to Hugging Face's form and back, the model writes the same outputs.
    convert = [f"--source={trained}", f"--output={tmp_path}/hf", "--to=hf"]
    assert cli.main("jaxir.convert:convert", convert) == 0
    assert generate(data, f"hf:{tmp_path}/hf", tmp_path / "again.jsonl", "--max_new_tokens=16") == 0
    assert records(tmp_path / "again.jsonl") == expected


@pytest.mark.slow
def test_resume_refuses_other_settings_of_the_written_texts(data, one_layer_seq2seq, tmp_path, capsys):
    settings = ["--gin_file=gin/evaluators/generation.gin", f"--gin.DEV_TARGETS={data}/targets.jsonl"]
    settings += ["--gin.DEV_METRIC=rougeL", "--gin.EVAL_EVERY=1", "--gin.CHECKPOINT_EVERY=1", "--steps=1"]
    settings += ["--gin.REMAT=False"]
    assert train(data, tmp_path / "run", *settings, "--gin.DEV_NEW_TOKENS=4", model=one_layer_seq2seq) == 0
    capsys.readouterr()
    assert train(data, tmp_path / "run", *settings, "--gin.DEV_NEW_TOKENS=5", model=one_layer_seq2seq) == 1
    assert "max_new_tokens=4, num_beams=1, not rougeL on 8" in capsys.readouterr().err
    assert train(data, tmp_path / "run", *settings, "--gin.DEV_NEW_TOKENS=4", model=one_layer_seq2seq) == 0


@pytest.fixture(scope="module")
def generator(one_layer_seq2seq):
    return Generator.load(f"hf:{one_layer_seq2seq}")


SAMPLED = Decoding(max_new_tokens=5, num_outputs=3, top_k=30, seed=3)


@pytest.mark.slow
def test_interrupted_generation_resumes_to_the_same_output(data, generator, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    report = outputs_file.write_outputs(generator, data / "texts.jsonl", whole, SAMPLED, window=3)
    assert report.texts == 8 and 8 < report.outputs <= 24
    calls, real = [], generator.generate

    def stopping(texts, *args, **kwargs):
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(texts, *args, **kwargs)

    monkeypatch.setattr(generator, "generate", stopping)
    with pytest.raises(KeyboardInterrupt):
        outputs_file.write_outputs(generator, data / "texts.jsonl", cut, SAMPLED, window=3)
    unfinished = tmp_path / ".cut.jsonl.unfinished"
    assert not cut.exists()
    assert [p.name for p in sorted(unfinished.iterdir())] == ["made.json", "outputs-00000.jsonl"]
    outputs_file.write_outputs(generator, data / "texts.jsonl", cut, SAMPLED, window=3)
    assert calls == [3, 3, 3, 2]
    assert cut.read_bytes() == whole.read_bytes() and not unfinished.exists()


def test_outputs_without_text_are_left_out(data, tmp_path):
    """Readers would refuse such outputs, like empty ones. Here the best token is a zero-width space."""
    model = shutil.copytree(GOLDEN / "seq2seq_1_1", tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    best = next(number for number, (token, _) in enumerate(vocabulary) if token == "at")
    vocabulary[best][0] = "\u200b"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    how = Decoding(max_new_tokens=1, num_beams=2, num_outputs=2)
    blank = Generator.load(f"hf:{model}")
    outputs_file.write_outputs(blank, data / "texts.jsonl", tmp_path / "out.jsonl", how)
    found = list(read_expansions(tmp_path / "out.jsonl", [f"t{i}" for i in range(len(TARGETS))]))
    assert len(found) == len(TARGETS)
    assert 1 in {len(outputs) for _, outputs in found}, "guard: the other one of two was left out"


@pytest.fixture
def damaged(one_layer_seq2seq, tmp_path) -> str:
    """A generator with a weight that is not a number."""
    model = shutil.copytree(one_layer_seq2seq, tmp_path / "damaged")
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    weights["decoder.block.0.layer.2.DenseReluDense.wo.weight"][0, 0] = np.nan
    safetensors.numpy.save_file(weights, model / "model.safetensors", {"format": "pt"})
    return f"hf:{model}"


@pytest.mark.parametrize("flag", ["--top_p=0.9", "--num_beams=2"])
def test_logits_that_are_not_finite_are_refused(data, damaged, tmp_path, capsys, flag):
    """Regression: such logits gave a file without outputs."""
    assert generate(data, damaged, tmp_path / "out.jsonl", "--max_new_tokens=4", flag) == 1
    assert f"error: model {damaged} returns logits that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


class Elsewhere:
    """Replaces a Ray cluster: finishes windows in reverse order, and ends after `most` of them."""

    batch_tokens = None

    def __init__(self, most: int):
        self.most, self.windows = most, []

    def map(self, start, windows):
        make = pickle.loads(pickle.dumps(start))()
        for window in reversed(list(windows())):
            if len(self.windows) == self.most:
                raise KeyboardInterrupt
            self.windows.append(window[0])
            yield pickle.loads(pickle.dumps(make(window)))


def test_a_cluster_writes_the_same_outputs_and_resumes_them(data, generator, tmp_path):
    whole, shared = tmp_path / "whole.jsonl", tmp_path / "shared.jsonl"
    outputs_file.write_outputs(generator, data / "texts.jsonl", whole, SAMPLED, window=3)
    first, second = Elsewhere(most=1), Elsewhere(most=3)
    how = {"how": SAMPLED, "window": 3}
    with pytest.raises(KeyboardInterrupt):
        outputs_file.write_outputs(generator, data / "texts.jsonl", shared, cluster=first, **how)
    report = outputs_file.write_outputs(generator, data / "texts.jsonl", shared, cluster=second, **how)
    assert (first.windows, second.windows, report.texts) == ([2], [1, 0], 8)
    assert shared.read_bytes() == whole.read_bytes()


def test_resume_refuses_other_settings_of_generation(
    data, generator, one_layer_seq2seq, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(generator, "generate", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        outputs_file.write_outputs(generator, data / "texts.jsonl", tmp_path / "a.jsonl", Decoding(top_k=5))
    # A directory without windows may be replaced.
    (tmp_path / ".a.jsonl.unfinished" / "outputs-00000.jsonl").touch()
    model = f"hf:{one_layer_seq2seq}"
    assert generate(data, model, tmp_path / "a.jsonl", "--top_k=4") == 1
    assert "was started with another" in (told := capsys.readouterr().err) and "(5, now 4)" in told, told
    assert generate(data, model, tmp_path / "a.jsonl", "--top_k=5", "--batch_tokens=64") == 1
    assert "was started with another batch_tokens" in capsys.readouterr().err


def many_texts(place: Path) -> Path:
    """Four windows of texts, so that the command can be killed in between."""
    texts = place / "texts.jsonl"
    texts.write_text("".join(json.dumps({"_id": f"{i}", "text": f"the cat {i}"}) + "\n" for i in range(4096)))
    return texts


def command(texts: Path, output: Path) -> list[str]:
    given = [f"--model=hf:{GOLDEN / 'seq2seq_1_1'}", f"--input={texts}", f"--output={output}"]
    return [sys.executable, "-m", "jaxir.expand", "generate", *given, "--max_new_tokens=8", "--top_p=0.9"]


def wait_for(process: subprocess.Popen, found) -> None:
    while process.poll() is None and not found():
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_share_the_texts_and_one_finishes_what_they_began(tmp_path):
    texts, output, whole = many_texts(tmp_path), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    subprocess.run(command(texts, whole), check=True)

    def start() -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            run = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        envs = [os.environ | run | {"JAX_PROCESS_ID": str(i)} for i in range(2)]
        return [subprocess.Popen(command(texts, output), env=env, **pipes) for env in envs]

    first, second = start()
    told = [process.communicate(timeout=200) for process in (first, second)]
    assert first.returncode == second.returncode == 0, told
    assert "4,096 texts" in told[0][0] and "texts" not in told[1][0]
    assert output.read_bytes() == whole.read_bytes()

    output.unlink()
    first, second = start()
    unfinished = tmp_path / ".out.jsonl.unfinished"
    wait_for(second, lambda: list(unfinished.glob("outputs-*")))
    second.send_signal(signal.SIGKILL)
    first.kill()  # without the other process it would end only after a minute
    for process in (first, second):
        process.communicate(timeout=200)
    assert not output.exists() and 0 < len(list(unfinished.glob("outputs-*"))) < 4
    subprocess.run(command(texts, output), check=True)
    assert output.read_bytes() == whole.read_bytes() and not unfinished.exists()


def test_bad_input_is_refused_in_one_sentence(data, tmp_path, capsys):
    model, other = f"hf:{GOLDEN / 'seq2seq_1_1'}", tmp_path / "mine.jsonl"
    other.write_text('{"_id": "1", "text": "dear"}\n')
    for given, output, flags, sentence in (
        (model, tmp_path / "out.jsonl", ["--num_outputs=3"], "num_outputs is 3, but num_beams is 1"),
        (f"hf:{GOLDEN / 'bert'}", tmp_path / "out.jsonl", [], "model_type 'bert' is not a generator"),
        (model, tmp_path / "out.jsonl", ["--input=nowhere.jsonl"], "nowhere.jsonl"),
        ("hf:nowhere", other, [], "is not a file of outputs"),
    ):
        assert generate(data, given, output, *flags) == 1
        error = capsys.readouterr().err
        assert sentence in error and error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [other] and "dear" in other.read_text()
    assert expand.main([]) == 2

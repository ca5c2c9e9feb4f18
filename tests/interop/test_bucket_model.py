"""Models in a bucket, in real processes, against a local server that speaks Cloud Storage's protocol."""

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxir import cli
from jaxir.interop import model_dir
from jaxir.interop.weights import stores, streaming
from tests import bucket_server
from tests.interop.folders import GOLDEN

T5 = f"st:{GOLDEN / 't5_1_1'}"
MODEL = "gs://bucket/models/t5"
RECIPE = """
from __gin__ import dynamic_registration
from jaxir import train
from jaxir.data.sets import pair_sources
from jaxir.interop import build
from jaxir.objectives import contrastive
from jaxir.runtime import partitioning

train.train.model = @build.Pretrained()
build.Pretrained.source = "gs://bucket/models/t5"
build.Pretrained.query_max_length = 8
build.Pretrained.passage_max_length = 8
train.train.objective = @contrastive.Contrastive()
train.train.data = @pair_sources.JsonlPairs()
pair_sources.JsonlPairs.path = "{data}/pairs.jsonl"
train.train.mesh = @partitioning.MeshConfig()
partitioning.MeshConfig.fsdp = 4
train.train.steps = 2
train.train.batch_size = 8
"""


@pytest.fixture
def bucket():
    with bucket_server.serve() as served:
        yield served


def start(bucket, *commands: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", bucket_server.COMMANDS, *commands]
    return subprocess.Popen(command, env=bucket.environment, **pipes)


def statuses(output: str) -> list[str]:
    return [line[-1] for line in output.splitlines() if line.startswith("exit status ")]


@pytest.mark.slow
def test_a_model_is_in_a_bucket_only_when_it_is_whole(bucket, tmp_path):
    convert = f"convert --source={T5} --output={MODEL}"
    begun, released = threading.Event(), threading.Event()

    def admit(name: str) -> bool:
        if name.startswith("models/t5/params/"):
            begun.set()
            released.wait(60)
        return True

    bucket.admit = admit
    process = start(bucket, convert)
    assert begun.wait(60), process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    released.set()
    half = bucket.names("models/t5/")
    assert "models/t5/UNFINISHED" in half and "models/t5/jaxir.json" not in half

    read = f"convert --source={MODEL} --output={tmp_path}/back"
    process = start(bucket, read, convert, read, convert)
    output, said = process.communicate(timeout=120)
    assert statuses(output) == ["1", "0", "0", "1"], said
    lines = [line for line in said.splitlines() if line.startswith(("error: ", "note: "))]
    expected = [f"error: {MODEL}: this model is incomplete; wait for the process that writes it"]
    expected += [f"note: {MODEL} holds an unfinished model", f"error: {MODEL} already exists"]
    assert [line.startswith(e) for line, e in zip(lines, expected, strict=True)] == [True] * 3, lines
    assert model_dir.load(f"{tmp_path}/back").fingerprint == model_dir.load(T5).fingerprint
    assert bucket.written()[-1] == "models/t5/jaxir.json", "without it there is no model"
    assert "models/t5/UNFINISHED" not in bucket.names()
    assert output.splitlines()[-1] == "False", "TensorFlow was imported"
    assert not bucket.credentials, "a public bucket needs none"


@pytest.mark.slow
def test_training_and_encoding_start_from_a_bucket(bucket, tmp_path):
    pairs = "".join(f'{{"query": "what is {i}", "passage": "it is number {i}"}}\n' for i in range(16))
    (tmp_path / "pairs.jsonl").write_text(pairs)
    (tmp_path / "recipe.gin").write_text(RECIPE.format(data=tmp_path))
    rows = "".join(f'{{"_id": "{i}", "text": "text number {i}"}}\n' for i in range(5))
    (tmp_path / "corpus.jsonl").write_text(rows)
    process = start(
        bucket,
        f"convert --source={T5} --output={MODEL}",
        f"train --gin_file={tmp_path}/recipe.gin --output_dir={tmp_path}/run",
        f"encode --model={MODEL} --input={tmp_path}/corpus.jsonl --output={tmp_path}/there",
        f"encode --model={T5} --input={tmp_path}/corpus.jsonl --output={tmp_path}/here",
    )
    output, said = process.communicate(timeout=280)
    assert output.count("exit status 0") == 4, said
    there, here = (np.load(tmp_path / name / "embeddings-00000.npy") for name in ("there", "here"))
    np.testing.assert_array_equal(there, here)


@pytest.mark.slow
def test_t5x_checkpoints_in_a_bucket_are_written_and_read(bucket, tmp_path):
    run, tokenizer = "gs://bucket/models/run", f"--tokenizer={GOLDEN / 't5_1_1'}"
    export = f"export --model=st:{GOLDEN / 't5_1_1'} --format=t5x --output={run}"
    process = start(
        bucket,
        export,
        f"convert --source=t5x:{run} --output={tmp_path}/newest {tokenizer}",
        f"convert --source=t5x:{run}/checkpoint_0/ --output={tmp_path}/named {tokenizer}",
        f"convert --source=t5x:gs://bucket/models/other --output={tmp_path}/other {tokenizer}",
        f"convert --source=t5x:{run} --output={tmp_path}/beside",
        export,
    )
    output, said = process.communicate(timeout=300)
    assert statuses(output) == ["0", "0", "0", "1", "0", "1"], said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: gs://bucket/models/other: no T5X checkpoint in it")
    assert errors[1].startswith(f"error: {run} already exists")
    expected = model_dir.load(f"st:{GOLDEN / 't5_1_1'}").fingerprint
    for name in ("newest", "named", "beside"):
        assert model_dir.load(f"{tmp_path}/{name}").fingerprint == expected
    names = bucket.written()
    assert "models/run/checkpoint_0/checkpoint" in names
    assert "models/run/checkpoint_0/target.encoder.layers_0.mlp.wo.kernel/.zarray" in names
    assert b"t5x-dummy-bucket" in bucket["models/run/checkpoint_0/checkpoint"]
    assert names[-1] == "models/run/checkpoint_0/checkpoint", "the index is written last"


def test_convert_refuses_impossible_outputs_before_reading(tmp_path, capsys):
    (tmp_path / "here").write_text("a file")
    for output, to, message in (
        ("gs://bucket/m", "hf", "gs://bucket/m: this can be written to local paths only"),
        (str(tmp_path), "jaxir", f"{tmp_path} already exists"),
        (str(tmp_path), "t5x", f"{tmp_path} already exists"),
    ):
        flags = ["--source=hf:nobody/has-this", f"--output={output}", f"--to={to}"]
        assert cli.main("jaxir.convert:convert", flags) == 1
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_chunks_of_parameters_are_small(tmp_path):
    streaming.write_params(tmp_path / "params", {"wi": np.zeros((1024, 2560), np.float32)})
    (spec,) = stores.orbax_specs(tmp_path / "params").values()
    import tensorstore

    chunk = tensorstore.open(spec, open=True).result().chunk_layout.read_chunk.shape
    assert 4 * np.prod(chunk) <= 8 << 20 and chunk[0] < 2560 and chunk[1] < 2560, chunk

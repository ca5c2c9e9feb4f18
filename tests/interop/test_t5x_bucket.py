"""gs:// through TensorStore's own driver, against a local server that speaks Cloud Storage's protocol."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxir.interop import model_dir
from tests import bucket_server

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture
def bucket():
    with bucket_server.serve() as served:
        yield served


@pytest.mark.slow
def test_a_bucket_is_written_and_read(bucket, tmp_path):
    run, tokenizer = "gs://bucket/models/run", f"--tokenizer={GOLDEN / 't5_1_1'}"
    export = f"export --model=st:{GOLDEN / 't5_1_1'} --format=t5x --output={run}"
    commands = [
        export,
        f"convert --source=t5x:{run} --output={tmp_path}/newest {tokenizer}",
        f"convert --source=t5x:{run}/checkpoint_0/ --output={tmp_path}/named {tokenizer}",
        f"convert --source=t5x:gs://bucket/models/other --output={tmp_path}/other {tokenizer}",
        f"convert --source=t5x:{run} --output={tmp_path}/beside",
        export,
    ]
    done = subprocess.run(
        [sys.executable, "-c", bucket_server.COMMANDS, *commands],
        env=bucket.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    codes = [line[-1] for line in done.stdout.splitlines() if line.startswith("exit status ")]
    assert codes == ["0", "0", "0", "1", "0", "1"], done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
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

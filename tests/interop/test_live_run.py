"""A run is read while its trainer replaces and removes checkpoints."""

import json
import subprocess
import sys

import pytest

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.model import run_dir
from tests.interop.test_model_dir import ROBERTA, write_run

# As in `training.checkpoints`: a checkpoint appears by a rename, best.json names it, the older one goes.
TRAINER = """
import json, os, pathlib, shutil, sys
checkpoints = pathlib.Path(sys.argv[1]) / "checkpoints"
for step in range(2, int(sys.argv[2])):
    new, old = checkpoints / f"{step}.orbax-checkpoint-tmp", checkpoints / str(step - 1)
    shutil.copytree(old, new)
    record = json.loads((new / "run" / "metadata").read_text())
    (new / "run" / "metadata").write_text(json.dumps(record | {"step": step}))
    new.rename(checkpoints / str(step))
    (checkpoints / "new").write_text(json.dumps({"step": step}))
    os.replace(checkpoints / "new", checkpoints / "best.json")
    shutil.rmtree(old.rename(checkpoints / f".{step - 1}.removed"))
    """


@pytest.fixture(scope="module")
def loaded():
    return model_dir.load(ROBERTA)


def test_run_is_read_while_it_is_trained(tmp_path, loaded):
    write_run(tmp_path / "run", loaded, {1: 1.5})
    expected = model_dir.load(str(tmp_path / "run")).fingerprint
    command = [sys.executable, "-c", TRAINER, tmp_path / "run", "60"]
    trainer = subprocess.Popen(command)
    try:
        count = 0
        while trainer.poll() is None:
            assert model_dir.load(str(tmp_path / "run")).fingerprint == expected
            count += 1
    finally:
        trainer.kill()
        trainer.wait()
    assert count and trainer.returncode == 0
    model, _ = model_dir.read(str(tmp_path / "run"))
    assert model.checkpoint == run_dir.checkpoint_of(tmp_path / "run") == tmp_path / "run/checkpoints/59"


def test_run_with_missing_checkpoints_or_metadata_is_refused(tmp_path, loaded):
    write_run(tmp_path / "run", loaded, {1: 1.5})
    checkpoint = tmp_path / "run" / "checkpoints" / "1"
    (checkpoint / "run" / "metadata").rename(tmp_path / "metadata")
    with pytest.raises(UserError, match=r"run/metadata: no such file"):
        model_dir.load(str(tmp_path / "run"))
    checkpoint.rename(tmp_path / "gone")
    with pytest.raises(UserError, match="no checkpoint in it yet"):
        model_dir.load(str(tmp_path / "run"))
    (tmp_path / "run" / "checkpoints" / "best.json").write_text(json.dumps({"step": 3}))
    (tmp_path / "gone").rename(checkpoint)
    with pytest.raises(UserError, match=r"best\.json names step 3, but there is no such checkpoint"):
        model_dir.load(str(tmp_path / "run"))

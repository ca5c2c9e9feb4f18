"""A run that starts from a T5X checkpoint, named by a gin macro, and is exported with Adafactor's state."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.interop import formats, model_dir, t5x
from jaxir.interop.t5x import optimizer as t5x_optimizer
from jaxir.training.step.optimizers import Adafactor, AdamW
from tests.interop import t5x_writer
from tests.interop.folders import GOLDEN

RECIPE = """
from __gin__ import dynamic_registration
from jaxir.runtime import partitioning
from jaxir import train
from jaxir.data.sets import pair_sources
from jaxir.interop import build
from jaxir.training.step import optimizers
include "gin/models/t5_1_1/base.gin"
include "gin/objectives/samtone.gin"

TOKENIZER = "{tokenizer}"
PROJECTION = 16
QUERY_LENGTH = 8
PASSAGE_LENGTH = 12
DTYPE = "float32"
train.train.data = @pair_sources.JsonlPairs()
pair_sources.JsonlPairs.path = "{data}/train.jsonl"
train.train.optimizer = @optimizers.Adafactor()
train.train.mesh = @partitioning.MeshConfig()
partitioning.MeshConfig.fsdp = 2
build.Pretrained.dropout_rate = 0.0
train.train.steps = 2
train.train.batch_size = 8
"""


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    """A T5 1.1 of one layer, large enough for some of its second moments to be factored."""
    rng = np.random.default_rng(0)
    width, joined, units = 128, 64, 136
    layer = {f"attention/{name}/kernel": (width, joined) for name in ("query", "key", "value")}
    layer |= {"attention/out/kernel": (joined, width), "mlp/wo/kernel": (units, width)}
    layer |= {f"mlp/wi_{i}/kernel": (width, units) for i in (0, 1)}
    layer |= {f"pre_{name}_layer_norm/scale": (width,) for name in ("attention", "mlp")}
    shapes = {f"encoder/layers_{i}/{name}": shape for i in (0, 1) for name, shape in layer.items()} | {
        "token_embedder/embedding": (140, width),
        "encoder/relpos_bias/rel_embedding": (4, 32),
        "encoder/encoder_norm/scale": (width,),
        "projection_layer/kernel": (width, 16),
    }
    return {p: (rng.normal(size=s) * s[0] ** -0.5).astype(np.float32) for p, s in shapes.items()}


@pytest.fixture
def recipe(tmp_path, params) -> Path:
    t5x_writer.write(tmp_path / "start", params)
    words, rng = ["apple", "cherry", "dune", "ember", "fjord", "grove"], np.random.default_rng(0)
    rows = [" ".join(rng.choice(words, 3)) for _ in range(24)]
    lines = [json.dumps({"query": f"{row} {i}", "passage": f"{i} {row}"}) for i, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    path = tmp_path / "recipe.gin"
    path.write_text(RECIPE.format(tokenizer=GOLDEN / "t5_1_1", data=tmp_path))
    return path


def train(recipe: Path, *flags: str) -> int:
    output = f"--output_dir={recipe.parent / 'run'}"
    return cli.main("jaxir.train:train", [f"--gin_file={recipe}", output, *flags])


def export(recipe: Path, name: str, *flags: str) -> int:
    flags = (f"--model={recipe.parent / 'run'}", f"--output={recipe.parent / name}", *flags)
    return cli.main("jaxir.export:export", ["--format=t5x", *flags])


def check_slots(states: dict, params: dict[str, np.ndarray]) -> None:
    for path, value in params.items():
        node = states
        for name in path.split("/"):
            node = node[name]
        assert set(node) == {"m", "v", "v_col", "v_row"}
        factored = value.ndim == 2 and min(value.shape) >= 128
        row, column = sorted(value.shape) if factored else (1, 1)
        assert node["m"].shape == (1,)
        assert node["v"].shape == ((1,) if factored else value.shape), path
        assert (node["v_row"].shape, node["v_col"].shape) == ((row,), (column,)), path
        used = node["v_row"] if factored else node["v"]
        assert used.dtype == np.float32 and used.max() > 0, path


def index_of(checkpoint: Path) -> dict:
    return serialization.msgpack_restore((checkpoint / "checkpoint").read_bytes())["optimizer"]


@pytest.mark.slow
def test_from_t5x_through_training_to_t5x(recipe, params):
    start = recipe.parent / "start" / "checkpoint_1000"
    assert train(recipe, "--gin.SCAN=True", f"--gin.INITIAL_CHECKPOINT_PATH='{start}'") == 0
    assert export(recipe, "plain") == 0
    assert export(recipe, "full", "--optimizer_state") == 0
    assert list(index_of(recipe.parent / "plain" / "checkpoint_2")["state"]) == ["step"]
    full = index_of(recipe.parent / "full" / "checkpoint_2")
    assert full["state"]["step"] == 2
    check_slots(full["state"]["param_states"], params)
    back = model_dir.read(f"t5x:{recipe.parent / 'full'}")[0].params["encoder.layers.1.mlp.wo.kernel"]
    assert 1e-4 < np.abs(np.asarray(back) - params["encoder/layers_1/mlp/wo/kernel"]).max() < 0.1


@pytest.mark.parametrize(("scan", "clip_norm"), [(False, None), (True, 1e9)], ids=["unrolled", "scanned"])
def test_each_layer_has_its_own_slots(scan, clip_norm, params, tmp_path):
    save_run(tmp_path / "run", params, Adafactor(clip_norm=clip_norm), scan=scan)
    formats.convert(str(tmp_path / "run"), tmp_path / "out", "t5x", optimizer_state=True)
    states = index_of(tmp_path / "out" / "checkpoint_5")["state"]["param_states"]
    check_slots(states, params)
    for i in (0, 1):
        # The gradient of a parameter was the parameter, so v_row is the mean of its squares.
        value = np.square(params[f"encoder/layers_{i}/mlp/wo/kernel"])
        slots = states["encoder"][f"layers_{i}"]["mlp"]["wo"]["kernel"]
        np.testing.assert_allclose(slots["v_row"], value.mean(0), rtol=1e-5)
        np.testing.assert_allclose(slots["v_col"], value.mean(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (AdamW(), "its optimizer is not Adafactor"),
        (Adafactor(min_dim_size_to_factor=16), "is .*v_row.*, but T5X needs .*'v'"),
        (None, "no optimizer state in it"),
    ],
)
def test_optimizer_states_that_t5x_cannot_hold_are_refused(optimizer, message, tmp_path):
    params = {"x": {"kernel": jnp.ones((32, 48))}}
    if optimizer is not None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "5" / "opt_state", optimizer.build(10).transform.init(params))
        save_record(tmp_path / "5")
    with pytest.raises(UserError, match=message):
        t5x_optimizer.read(tmp_path / "5", {"x.kernel": params["x"]["kernel"]})


def save_run(directory: Path, params: dict[str, np.ndarray], optimizer, *, scan: bool) -> None:
    """Writes a run's checkpoint 5 after one update, with the parameters as their gradient."""
    t5x_writer.write(directory.parent / "start", params)
    start, tokenizer = directory.parent / "start", str(GOLDEN / "t5_1_1")
    loaded = model_dir.load(f"t5x:{start}", tokenizer=tokenizer, scan_layers=scan)
    model_dir.write_description(directory, loaded.model.config, loaded.tokenizer, loaded.settings)
    values = nnx.to_pure_dict(nnx.state(loaded.model, nnx.Param))
    transform = optimizer.build(10).transform
    with jax.numpy_dtype_promotion("standard"):
        updated = jax.jit(lambda x: transform.update(x, transform.init(x), x)[1])(values)
    parts = {"params": values, "opt_state": updated}
    for name, tree in parts.items():
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((directory / "checkpoints" / "5" / name).absolute(), tree)
    save_record(directory / "checkpoints" / "5")


def save_record(checkpoint: Path) -> None:
    (checkpoint / "run").mkdir()
    record = {"step": int(checkpoint.name), "dev_value": None, "checksum": 1, "settings": {}}
    (checkpoint / "run" / "metadata").write_text(json.dumps(record))


def test_two_starting_points_are_refused(recipe, capsys):
    start = recipe.parent / "start"
    assert train(recipe, f"--gin.INITIAL_CHECKPOINT_PATH={start}", "--gin.MODEL=hf:x") == 1
    both = f"MODEL (hf:x) and INITIAL_CHECKPOINT_PATH ({start}) are both given"
    assert capsys.readouterr().err == f"error: {both}: keep the one to start from\n"
    assert not (recipe.parent / "run").exists()


def test_t5x_run_starts_from_default_model_or_initial_checkpoint():
    assert t5x.start_from(default="hf:a") == "hf:a"
    assert t5x.start_from(default="hf:a", model="st:b") == "st:b"
    for path in ("gs://bucket/run", "t5x:gs://bucket/run"):
        assert t5x.start_from(default="hf:a", initial_checkpoint_path=path) == "t5x:gs://bucket/run"

"""`python -m jaxir.plan` in its own process, as users run it: no data, no weights, no network."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import serialization, traverse_util

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.experiments.towers import UnderIdentityProjection
from jaxir.interop.build import FromScratch, Pretrained
from jaxir.interop.huggingface import hf_config
from jaxir.interop.weights.weights import write_json
from jaxir.models import deberta, t5
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.planning import architecture, devices
from jaxir.planning import run_plan as planning

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = t5.T5Config(
    vocab_size=72, embed_dim=32, num_layers=2, num_heads=2, head_dim=16, mlp_dim=64, dropout_rate=0.0
)
MACROS = ("QUERY_LENGTH=8", "PASSAGE_LENGTH=16", "BATCH_SIZE=16", "PROJECTION=8", "STEPS=1000", "FSDP=2")


@pytest.fixture
def model(tmp_path) -> Path:
    """A Hugging Face folder without weights or tokenizer."""
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", hf_config.describe(SMALL, 0))
    return tmp_path / "model"


def plan(
    *arguments: str, cwd: Path, command: str = "plan", **environment: str
) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | environment
    line = [sys.executable, "-m", f"jaxir.{command}", *arguments]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)


def libtpu() -> str | None:
    try:
        return str(devices.find_libtpu())
    except UserError:
        return None


@pytest.mark.slow
def test_gpus_by_arithmetic_with_nothing_but_a_recipe(model, tmp_path, tmp_path_factory):
    typed = (*MACROS, f"MODEL=hf:{model}", "SHARING=ade_spl")
    macros = [f"--gin.{m}" for m in typed if not m.startswith(("BATCH_SIZE", "STEPS"))]
    flags = ["--batch_size=16", "--steps=1000"]  # of which the recipe says others
    place = {"cwd": tmp_path, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    for _ in range(2):  # the second time with the programs that the first has kept
        done = plan("--gin_file=gin/samtone_base.gin", "--topology=gpu:4xh100", *flags, *macros, **place)
        assert done.returncode == 0, done.stderr
    assert "plan for gpu:4xh100: 4 h100 chips" in done.stdout
    assert "ADE-SPL of T5 2 x 32" in done.stdout
    assert "16 pairs of 8 + 16 tokens, 384 in all" in done.stdout
    assert "slices=1, data=2, fsdp=2, tensor=1" in done.stdout
    assert "all-gather          fsdp" in done.stdout
    assert "1,000 steps" in done.stdout
    assert done.stdout.startswith("fits: ")
    assert {p.name for p in tmp_path.iterdir()} == {"model"}  # nothing was written


@pytest.mark.slow
def test_plan_that_does_not_fit_exits_with_1_and_advice(tmp_path):
    done = plan(
        "--gin_file",
        "gin/samtone_xxl.gin",
        "--fsdp=1",
        "--topology",
        "gpu:1xl4",
        "--prices=l4=0.7",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "SDE of T5 24 x 4096, 4,7" in done.stdout  # the recipe's model, its hub never asked
    assert done.stdout.startswith("does not fit: ") and not done.stderr
    advised = [
        line.split() for line in done.stdout.splitlines() if line.startswith("    python -m jaxir.plan ")
    ]
    assert "--gin_file gin/samtone_xxl.gin --prices=l4=0.7 --topology=gpu:8xl4" in " ".join(advised[-1])
    done = plan(*advised[-1][3:], cwd=tmp_path)  # as it stands
    assert done.returncode == 0 and done.stdout.startswith("fits: "), done.stderr
    assert re.search(
        r"^20,000 steps at full speed: .* h to .* h, costs [\d,.]+ to [\d,.]+$", done.stdout, re.M
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--topology=v5z:4x4",), "no chip 'v5z'; did you mean 'v5", marks=pytest.mark.slow),
        pytest.param(
            ("--topology=gpu:4xh100", "--batch_size=510"),
            "batch_size must be a multiple of the 4 devices",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--topology=gpu:4xh100", "--passage_length=10000000000"),
            "10000000000, 10000000000]), more than chips hold: batch_size is 512, and lengths may be",
            marks=pytest.mark.slow,
        ),
        (
            ("--topology=gpu:4xh100", "--fsdp=8"),
            "does not cover 4 devices exactly: for gpu:4xh100 set --fsdp=4",
        ),
        pytest.param(
            ("--topology=gpu:4xh100", "--epochs=2"),
            "a plan reads no data: how many steps are 2.0 epochs? give --steps",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--topology=gpu:1xl4", "--model=hf:./nowhere"),
            "./nowhere: no such directory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_users_error_costs_one_sentence(arguments, message, tmp_path):
    done = plan("--gin_file=gin/samtone_base.gin", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert not done.stdout
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_training_still_needs_data(tmp_path):
    done = plan("--gin_file=gin/samtone_base.gin", "--output_dir=run", cwd=tmp_path, command="train")
    assert done.stderr.strip() == "error: DATA must be set: --data=..."


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("plan", ("--topology=gpu:2xh100",)),
        ("train", ("--plan=gpu:2xh100",)),
        ("train", ("--plan", "gpu:2xh100", "--output=run", "--eval_every=3", "--data=nowhere")),
    ],
)
def test_training_hands_plans_over(command, arguments, monkeypatch):
    """What only training has a use for may be typed, and need not be."""
    planned = []
    monkeypatch.setattr(planning, "run", lambda *given, **_: planned.append(given) or 1)
    flags = ["--gin_file=gin/samtone_base.gin", *arguments, "--steps=7", "--gin.EPOCHS=None", "--seed=3"]
    assert cli.main(f"jaxir.{command}:{command}", flags) == 1
    ((topology, recipe),) = planned
    assert topology == "gpu:2xh100"
    assert (recipe.steps, recipe.seed, recipe.batch_size, recipe.data) == (7, 3, 512, None)
    assert recipe.model.source == "hf:google/t5-v1_1-base"
    assert recipe.objective.loss.__name__ == "samtone"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--topology must be given (see python -m jaxir.plan --help)"),
        (("--topology=gpu:1xl4", "--gin.BATCH=3"), "BATCH is set but nothing uses it"),
        (("--topology=gpu:1xl4", "--output=run"), "there is no flag --output"),
        (
            ("--topology=gpu:1xl4", "--gin.BATCH_SIZE=%gin.REQUIRED"),
            "train.batch_size must be set: --batch_size",
        ),
    ],
)
def test_a_command_line_that_is_none(flags, sentence, capsys):
    assert cli.main("jaxir.plan:plan", ["--gin_file=gin/samtone_base.gin", *flags]) in (1, 2)
    assert capsys.readouterr().err.startswith(f"error: {sentence}")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed, as on a TPU")
def test_without_the_tpu_compiler_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(devices, "TOOLS", tmp_path)
    with pytest.raises(UserError, match=r"run `make plan-tools`.*libtpu==\d") as error:
        devices.find_libtpu()
    assert "\n" not in str(error.value)
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "libtpu.so").touch()
    assert devices.find_libtpu() == tmp_path / "libtpu" / "libtpu.so"


def test_a_published_model_needs_neither_network_nor_files():
    config, settings = architecture.describe(
        Pretrained(
            source="hf:google/t5-v1_1-xxl", sharing="ade", projection=768, dtype="bfloat16", remat=True
        )
    )
    wanted = t5.preset("1.1-xxl", dtype="bfloat16", remat=True)
    assert config.backbone == wanted
    assert (config.sharing, config.projection.dimension) == ("ade", 768)
    assert settings.query_max_length == 512


def test_a_folder_is_described_by_its_config(model):
    config, settings = architecture.describe(
        Pretrained(source=f"hf:{model}", scan_layers=True, query_max_length=8, passage_max_length=9)
    )
    assert config.backbone.embed_dim == SMALL.embed_dim
    assert config.backbone.scan_layers
    assert (settings.query_max_length, settings.passage_max_length) == (8, 9)
    with pytest.raises(UserError, match="shares a projection"):
        architecture.describe(Pretrained(source=f"hf:{model}", sharing="ade_spl"))


def test_a_t5x_checkpoint_is_described_by_shapes(tmp_path):
    """Neither a tokenizer nor a number is read: there are none."""
    width, joined, units = SMALL.embed_dim, SMALL.num_heads * SMALL.head_dim, SMALL.mlp_dim
    block = {f"attention.{name}": (width, joined) for name in ("query", "key", "value")}
    block |= {"attention.out": (joined, width), "mlp.wo": (units, width)}
    block |= {f"mlp.wi_{i}": (width, units) for i in (0, 1)}
    beside = {"token_embedder.embedding": (SMALL.vocab_size, width)}
    scales = ["encoder_norm"]
    for i in range(SMALL.num_layers):
        beside |= {f"encoder.layers_{i}.{name}.kernel": shape for name, shape in block.items()}
        scales += [f"layers_{i}.pre_{name}_layer_norm" for name in ("attention", "mlp")]
    leaves = {name: outside(tmp_path / "checkpoint_7", name, shape) for name, shape in beside.items()}
    leaves |= {f"encoder.{name}.scale": np.ones(width, np.float32) for name in scales}
    leaves["encoder.relpos_bias.rel_embedding"] = np.ones((SMALL.num_heads, 32), np.float32)
    target = traverse_util.unflatten_dict({tuple(name.split(".")): leaf for name, leaf in leaves.items()})
    index = {"version": 3, "optimizer": {"target": target, "state": {"step": np.int32(7)}}}
    (tmp_path / "checkpoint_7" / "checkpoint").write_bytes(serialization.msgpack_serialize(index))
    config, settings = architecture.describe(
        Pretrained(source=f"t5x:{tmp_path}", sharing="ade", projection=8, query_max_length=4)
    )
    assert (config.backbone.embed_dim, config.backbone.num_layers) == (width, SMALL.num_layers)
    assert config.backbone.gated and config.backbone.mlp_dim == units
    assert (config.sharing, config.projection.dimension, settings.query_max_length) == ("ade", 8, 4)


def outside(checkpoint: Path, name: str, shape: tuple[int, ...]) -> dict:
    """Writes the description of a zarr array without its numbers; returns what the index says of it."""
    metadata = {"chunks": list(shape), "shape": list(shape), "compressor": {"id": "gzip", "level": 1}}
    (checkpoint / f"target.{name}").mkdir(parents=True)
    layout = {"dtype": "<f4", "fill_value": None, "filters": None, "order": "C", "zarr_format": 2}
    write_json(checkpoint / f"target.{name}" / ".zarray", metadata | layout)
    kvstore = {"driver": "file", "path": f"target.{name}/"}
    return {"driver": "zarr", "dtype": "float32", "kvstore": kvstore, "metadata": metadata}


def test_a_new_model_is_described_by_itself():
    config = DualEncoderConfig(backbone=SMALL)
    new = FromScratch(config=config, tokenizer="nowhere", query_max_length=4, passage_max_length=5)
    found, settings = architecture.describe(new)
    assert found is config
    assert (settings.query_max_length, settings.passage_max_length) == (4, 5)


@pytest.mark.parametrize("sharing", ["sde", "ade", "ade_spl"])
def test_towers_under_an_identity_are_described_as_they_are_built(sharing, model):
    """From a folder without weights, and refused where building would be."""
    config, settings = architecture.describe(
        UnderIdentityProjection(source=f"hf:{model}", sharing=sharing, query_max_length=8)
    )
    assert (config.sharing, config.projection.dimension) == (sharing, SMALL.embed_dim)
    assert settings.query_max_length == 8
    with pytest.raises(UserError, match="projection cannot be set"):
        architecture.describe(UnderIdentityProjection(source=f"hf:{model}", projection=8))


def test_any_class_that_says_what_it_would_build_can_be_planned(model):
    class Halved:
        def outline(self, read):
            found = read(f"hf:{model}", None)
            backbone = dataclasses.replace(found.config.backbone, num_layers=1)
            return dataclasses.replace(found.config, backbone=backbone), found.settings

    assert architecture.describe(Halved())[0].backbone.num_layers == 1
    with pytest.raises(UserError, match=r"cannot plan with dict: it has no outline\(\)"):
        architecture.describe({})


@pytest.mark.skipif(libtpu() is None, reason="libtpu is not installed (make plan-tools)")
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["v5e:2x2"])
def test_a_tpu_slice_with_its_own_compiler(machine, model, tmp_path):
    macros = [f"--gin.{m}" for m in (*MACROS, f"MODEL=hf:{model}")]
    quick = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0", "JAX_OPTIMIZATION_LEVEL": "O1"}
    done = plan("--gin_file=gin/samtone_base.gin", f"--topology={machine}", *macros, cwd=tmp_path, **quick)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "compiled by the TPU's compiler" in done.stdout
    assert "of 15.75 GiB" in done.stdout
    assert "\n  as scheduled " in done.stdout and " behind other work, " in done.stdout
    assert "all-gather          fsdp" in done.stdout
    assert f" quick settings: {' '.join(f'{name}={value}' for name, value in quick.items())}\n" in done.stdout
    assert done.stdout.count("warning: ") == 1 and "Plan without them before you trust a fit" in done.stdout
    assert done.stdout.startswith("fits, by quick settings: ")
    assert "remat but for products" in done.stdout
    assert_products_are_those_that_were_asked_for(done.stdout, times=1)


def assert_products_are_those_that_were_asked_for(told: str, *, times: float) -> None:
    """The compiler's convolutions are these, shared by four chips, and some computed anew."""
    line = next(x for x in told.splitlines() if "products, each chip" in x)
    run, useful = (
        float(part.split()[0]) for part in line.split("chip")[1].replace("of them useful", "").split(", ")
    )
    assert run == pytest.approx(useful * times, rel=0.15)


FSDP_BY_SPARSE_CORES = """
import jax, jax.numpy as jnp
from jaxir.runtime import compile_cache
from jaxir.costs import collectives, hlo, overlap, targets
from jaxir.runtime.partitioning import MeshConfig, gather_weight
from jaxir.planning import devices

target = targets.parse("v5p:2x2x1")
found = devices.get(target)
for sparse_cores in (False, True):
    partitioner = MeshConfig(fsdp=4, sparse_cores=sparse_cores).build(found)

    def loss(weights, x):
        def layer(x, w):
            return jax.nn.relu(x @ gather_weight(w, ("embed", None))), None

        return jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum()

    arrays = ((6, 2048, 2048), (None, "embed", None)), ((16384, 2048), ("batch", None))
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16", sharding=partitioner.sharding(axes)) for s, axes in arrays]
    with partitioner():
        lowered = jax.jit(jax.grad(loss)).lower(*shapes)
    program = hlo.parse(compile_cache.compile_step(lowered, partitioner).as_text())
    sent = sum(c.traffic for c in collectives.read(program, partitioner.mesh))
    followed = overlap.read(program, target, partitioner.mesh, found)
    print(sent, sum(followed.hidden_bytes.values()), followed.seconds)
"""


@pytest.mark.skipif(libtpu() is None, reason="libtpu is not installed (make plan-tools)")
@pytest.mark.slow
def test_sparse_cores_hide_what_fsdp_sends(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-c", FSDP_BY_SPARSE_CORES]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "does not know" not in done.stderr
    (sent, hidden, seconds), (also, behind, sooner) = (
        map(float, x.split()) for x in done.stdout.splitlines()
    )
    assert also == pytest.approx(sent, rel=0.1) and sent > 6 * 2048 * 2048 * 2
    assert hidden < 0.1 * sent and behind > 0.5 * sent
    assert sooner < 0.95 * seconds


@pytest.mark.skipif(libtpu() is None, reason="libtpu is not installed (make plan-tools)")
@pytest.mark.slow
def test_deberta_on_a_tpu_slice(tmp_path):
    """Its attention has products of its own; two towers of two lengths meet two sets of distances."""
    (tmp_path / "model").mkdir()
    small = deberta.DebertaConfig(
        vocab_size=64,
        embed_dim=32,
        num_layers=2,
        num_heads=2,
        mlp_dim=64,
        relative_buckets=8,
        relative_max_distance=16,
    )
    write_json(tmp_path / "model" / "config.json", hf_config.describe(small, 0))
    pieces = [
        f"--gin_file=gin/{x}.gin" for x in ("models/deberta", "objectives/samtone", "runs/samtone_paper")
    ]
    macros = [f"--gin.{m}" for m in (*MACROS, f"MODEL=hf:{tmp_path / 'model'}", "DROPOUT=0.0")]
    quick = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0", "JAX_OPTIMIZATION_LEVEL": "O1"}
    done = plan(*pieces, "--topology=v5e:2x2", *macros, cwd=tmp_path, **quick)
    assert done.returncode == 0, done.stderr
    assert "SDE of Deberta 2 x 32" in done.stdout and "compiled by the TPU's compiler" in done.stdout
    assert "all-gather          fsdp" in done.stdout and "fits, by quick settings: " in done.stdout
    assert_products_are_those_that_were_asked_for(done.stdout, times=4 / 3)

"""`python -m jaxir.plan` in its own process, as users run it, and the descriptions of models it plans."""

import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.experiments.towers import UnderIdentityProjection
from jaxir.interop.build import FromScratch, Pretrained
from jaxir.interop.huggingface import hf_config
from jaxir.interop.weights.weights import write_json
from jaxir.models import t5
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.planning import architecture, devices
from jaxir.planning import run_plan as planning
from jaxir.runtime.compile_cache import aside
from tests.interop import t5x_writer
from tests.models.test_encoders import DEBERTA, MODERNBERT
from tests.planning.conftest import QUICK, SMALL, users_environment

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PLAN = ("-m", "jaxir.plan", "--gin_file=gin/samtone_base.gin")


@pytest.mark.slow
def test_gpu_plan_needs_only_a_recipe(in_process, small_macros, tmp_path, tmp_path_factory):
    macros = [m for m in small_macros if not m.startswith(("--gin.BATCH_SIZE", "--gin.STEPS"))]
    flags = ["--topology=gpu:4xh100", "--batch_size=16", "--steps=1000", "--gin.SHARING=ade_spl"]
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    for _ in range(2):  # the second run finds the cached programs of the first
        done = in_process(*PLAN, *flags, *macros, **cache)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits: ")
    for line in ("ADE-SPL of T5 2 x 32", "16 pairs of 8 + 16 tokens, 384 in all", "all-gather          fsdp"):
        assert line in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"model"}  # nothing was written


@pytest.mark.slow
def test_plan_that_does_not_fit_exits_with_1_and_advice(in_process):
    words = "-m jaxir.plan --gin_file gin/samtone_xxl.gin --fsdp=1 --topology gpu:1xl4 --prices=l4=0.7"
    done = in_process(*words.split())
    assert done.returncode == 1
    assert "SDE of T5 24 x 4096, 4,7" in done.stdout  # the recipe's model, without asking the hub
    assert done.stdout.startswith("does not fit: ") and not done.stderr
    *_, advised = re.findall(r"^    python (-m jaxir\.plan .*)", done.stdout, re.M)
    assert "--gin_file gin/samtone_xxl.gin --prices=l4=0.7 --topology=gpu:8xl4" in advised
    done = in_process(*advised.split())  # run unchanged
    assert done.returncode == 0 and done.stdout.startswith("fits: "), done.stderr
    costs = r"^20,000 steps at full speed: .* h to .* h, costs [\d,.]+ to [\d,.]+$"
    assert re.search(costs, done.stdout, re.M)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("plan", ("--topology=gpu:2xh100",)),
        ("train", ("--plan", "gpu:2xh100", "--output=run", "--eval_every=3", "--data=nowhere")),
    ],
)
def test_train_plan_flag_plans_the_same_recipe(command, arguments, monkeypatch):
    """Settings that only training uses may be given or left out."""
    planned = []
    monkeypatch.setattr(planning, "run", lambda *given, **_: planned.append(given) or 1)
    flags = ["--gin_file=gin/samtone_base.gin", *arguments, "--steps=7", "--gin.EPOCHS=None", "--seed=3"]
    assert cli.main(f"jaxir.{command}:{command}", flags) == 1
    ((topology, recipe),) = planned
    assert topology == "gpu:2xh100"
    assert (recipe.steps, recipe.seed, recipe.batch_size, recipe.data) == (7, 3, 512, None)
    assert recipe.model.source == "hf:google/t5-v1_1-base"
    assert recipe.objective.loss.__name__ == "samtone"


RECIPE = """
from jaxir.interop.build import Pretrained
from jaxir.objectives.contrastive import Contrastive
from jaxir.training.run.recipe import Recipe


def recipe():
    return Recipe(model=Pretrained(source="m"), objective=Contrastive(), data=None, epochs=2, batch_size=8)
"""


def test_python_recipe_is_planned(tmp_path, monkeypatch, capsys):
    planned = []
    monkeypatch.setattr(planning, "run", lambda *given, **how: planned.append((*given, how["command"])) or 0)
    (tmp_path / "mine.py").write_text(RECIPE)
    flags = [f"--recipe={tmp_path}/mine.py", "--topology=gpu:2xh100"]
    assert cli.main("jaxir.plan:plan", [*flags, "--steps=7"]) == 0
    ((topology, recipe, command),) = planned
    assert (topology, recipe.steps, recipe.epochs, recipe.batch_size) == ("gpu:2xh100", 7, None, 8)
    advised = command.changed({"batch_size": 4})
    assert advised == f"python -m jaxir.plan {' '.join(flags)} --steps=7 --batch_size=4"
    assert cli.main("jaxir.train:train", [flags[0], "--plan=gpu:2xh100", "--steps=7"]) == 0
    assert planned[1][:2] == (topology, recipe)
    assert cli.main("jaxir.plan:plan", [*flags, "--gin_file=gin/pairs.gin"]) == 2
    assert "leave out gin files" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed, as on a TPU")
def test_missing_tpu_compiler_names_its_installation(monkeypatch, tmp_path):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(devices, "TOOLS", tmp_path)
    with pytest.raises(UserError, match=r"run `make plan-tools`.*libtpu==\d") as error:
        devices.find_libtpu()
    assert "\n" not in str(error.value)
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "libtpu.so").touch()
    assert devices.find_libtpu() == tmp_path / "libtpu" / "libtpu.so"


def test_published_model_is_described_offline():
    how = {"dtype": "bfloat16", "remat": True}
    published = Pretrained(source="hf:google/t5-v1_1-xxl", sharing="ade", projection=768, **how)
    config, settings = architecture.describe(published)
    assert config.backbone == t5.preset("1.1-xxl", **how)
    assert (config.sharing, config.projection.dimension) == ("ade", 768)
    assert settings.query_max_length == 512


def test_local_folder_is_described_by_its_config(model):
    lengths = {"query_max_length": 8, "passage_max_length": 9}
    config, settings = architecture.describe(Pretrained(source=f"hf:{model}", scan_layers=True, **lengths))
    assert config.backbone.embed_dim == SMALL.embed_dim and config.backbone.scan_layers
    assert (settings.query_max_length, settings.passage_max_length) == (8, 9)
    with pytest.raises(UserError, match="'ade_spl' needs a projection"):
        architecture.describe(Pretrained(source=f"hf:{model}", sharing="ade_spl"))


def test_t5x_checkpoint_is_described_without_its_arrays(tmp_path):
    checkpoint = t5x_writer.write(tmp_path, t5x_writer.golden_t5(GOLDEN / "t5_1_1"), version=3)
    for chunk in checkpoint.glob("target.*/[0-9]*"):
        chunk.unlink()
    config, settings = architecture.describe(Pretrained(source=f"t5x:{tmp_path}", query_max_length=4))
    assert config == architecture.describe(Pretrained(source=f"st:{GOLDEN / 't5_1_1'}"))[0]
    assert settings.query_max_length == 4


def test_towers_under_identity_projection_are_described_without_weights(model):
    towers = UnderIdentityProjection(source=f"hf:{model}", sharing="ade_spl", query_max_length=8)
    config, settings = architecture.describe(towers)
    assert (config.sharing, config.projection.dimension) == ("ade_spl", SMALL.embed_dim)
    assert settings.query_max_length == 8
    with pytest.raises(UserError, match="projection cannot be set"):
        architecture.describe(UnderIdentityProjection(source=f"hf:{model}", projection=8))


def test_any_class_with_an_outline_can_be_planned(model):
    class Halved:
        def outline(self, read):
            found = read(f"hf:{model}", None)
            backbone = dataclasses.replace(found.config.backbone, num_layers=1)
            return dataclasses.replace(found.config, backbone=backbone), found.settings

    assert architecture.describe(Halved())[0].backbone.num_layers == 1
    lengths = {"query_max_length": 4, "passage_max_length": 5}
    new = FromScratch(config=DualEncoderConfig(backbone=SMALL), tokenizer="nowhere", **lengths)
    found, settings = architecture.describe(new)
    assert found is new.config and lengths.items() <= vars(settings).items()
    with pytest.raises(UserError, match=r"cannot plan with dict: it has no outline\(\)"):
        architecture.describe({})


@pytest.mark.slow
def test_tpu_plan_uses_the_tpu_compiler(tpu_compiler, in_process, small_macros):
    done = in_process(*PLAN, "--topology=v5e:2x2", *small_macros, **QUICK)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for text in (
        *("compiled by the TPU's compiler", "of 15.75 GiB", "\n  as scheduled ", " behind other work, "),
        *("all-gather          fsdp", "Plan without these settings before you", "remat except products"),
        f" quick settings: {' '.join(f'{name}={value}' for name, value in QUICK.items())}\n",
    ):
        assert text in done.stdout
    assert done.stdout.count("warning: ") == 1
    assert done.stdout.startswith("fits, by quick settings: ")
    assert_products_run(done.stdout, times=1)


def assert_products_run(text: str, *, times: float) -> None:
    """Each of four chips runs `times` its share of the useful products."""
    line = next(x for x in text.splitlines() if "products, each chip" in x)
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


@pytest.mark.slow
def test_sparse_cores_hide_what_fsdp_sends(tpu_compiler, in_process):
    done = in_process("-c", FSDP_BY_SPARSE_CORES)
    assert done.returncode == 0, done.stderr
    assert "does not know" not in done.stderr
    (sent, hidden, seconds), (also, behind, sooner) = (
        map(float, x.split()) for x in done.stdout.splitlines()
    )
    assert also == pytest.approx(sent, rel=0.1) and sent > 6 * 2048 * 2048 * 2
    assert hidden < 0.1 * sent and behind > 0.5 * sent
    assert sooner < 0.95 * seconds


@pytest.mark.slow
def test_deberta_on_a_tpu_slice(tpu_compiler, in_process, small_macros, model):
    """DeBERTa's attention has further products; two towers of two lengths use two sets of distances."""
    write_json(model / "config.json", hf_config.describe(DEBERTA, 0))
    pieces = ("models/deberta", "objectives/samtone", "runs/samtone_paper")
    flags = [*(f"--gin_file=gin/{x}.gin" for x in pieces), "--topology=v5e:2x2", "--gin.DROPOUT=0.0"]
    done = in_process("-m", "jaxir.plan", *flags, *small_macros, **QUICK)
    assert done.returncode == 0, done.stderr
    assert "SDE of DeBERTa 2 x 32" in done.stdout and "compiled by the TPU's compiler" in done.stdout
    assert "all-gather          fsdp" in done.stdout and "fits, by quick settings: " in done.stdout
    assert_products_run(done.stdout, times=4 / 3)


@pytest.mark.slow
def test_late_interaction_on_a_tpu_slice(tpu_compiler, in_process, model):
    """Plans count MaxSim's products, and its passages go round the ring of chips."""
    backbone = dataclasses.replace(MODERNBERT, local_attention=64, max_positions=64)
    write_json(model / "config.json", hf_config.describe(backbone, 0))
    flags = ["--gin_file=gin/late_interaction.gin", f"--model=hf:{model}", "--topology=v5e:2x2"]
    flags += ["--steps=1000", "--batch_size=64", "--query_length=16", "--passage_length=32", "--dropout=0.0"]
    done = in_process("-m", "jaxir.plan", *flags, "--projection=64", **QUICK)
    assert done.returncode == 0, done.stderr
    assert "ModernBERT 3 x 32, 64 dimensions a token" in done.stdout
    assert "compiled by the TPU's compiler" in done.stdout and "collective-permute  data" in done.stdout
    assert_products_run(done.stdout, times=1)


@pytest.mark.slow
def test_signal_during_compilation_ends_the_plan(tpu_compiler, small_macros, tmp_path):
    (tmp_path / "tmp").mkdir()
    more = {"TMPDIR": str(tmp_path / "tmp"), "JAX_LOG_COMPILES": "1", "JAX_COMPILATION_CACHE_DIR": ""}
    command = [sys.executable, *PLAN, "--topology=v5e:2x2", *small_macros]
    how = {"cwd": tmp_path, "env": users_environment(**more), "start_new_session": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **how, **pipes) as process:
        assert next(line for line in process.stderr if "MLIR module conversion jit(step)" in line)
        process.send_signal(signal.SIGTERM)
        try:
            out, rest = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, rest
    words = [line for line in rest.splitlines() if not line.startswith("WARNING:jax")]
    assert words == ["stopped by SIGTERM"]
    assert not out and not list((tmp_path / "tmp").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tmp"}


def test_background_compilation_returns_raises_and_is_interrupted():
    assert aside(lambda: threading.current_thread().name) == "compiler"
    with pytest.raises(ZeroDivisionError):
        aside(lambda: 1 // 0)
    going = threading.Event()
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        aside(lambda: going.wait(30))
    going.set()

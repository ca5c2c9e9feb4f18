"""Plans of a small dual encoder, compared with shapes, results by hand, and XLA."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from jaxir import losses
from jaxir.core.errors import UserError
from jaxir.costs import collectives, hlo, targets, work
from jaxir.costs.collectives import Collective
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.models.dual_encoder import DualEncoderConfig, Projection
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.reranking import Reranking
from jaxir.planning import prices, program, run_plan
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.memory import HEADROOM
from jaxir.training.step.optimizers import Adafactor, AdamW
from tests.planning.conftest import SMALL

LAYERS, E, HEADS, K, F, D = 2, 32, 2, 16, 64, 24  # sizes of the model SMALL and of its projection
LENGTHS = EncoderSettings(query_max_length=8, passage_max_length=16)
BATCH = 24


def config(**changes) -> DualEncoderConfig:
    backbone = dataclasses.replace(SMALL, **{"scan_layers": True} | changes)
    return DualEncoderConfig(backbone=backbone, projection=Projection(dimension=D))


def planned(model=None, *, optimizer=None, mesh=None, devices=4, objective=None, **how) -> program.Planned:
    mesh = mesh or MeshConfig(fsdp=2)
    recipe = Recipe(
        model=object(),  # unused: the configuration is given
        mesh=mesh,
        objective=objective or Contrastive(),
        data=None,
        optimizer=optimizer or Adafactor(),
        **({"steps": 1000, "batch_size": BATCH} | how),
    )
    partitioner = mesh.build(jax.devices()[:devices])
    return program.Planned(recipe=recipe, config=model or config(), settings=LENGTHS, partitioner=partitioner)


def small_step(model=None, *, objective=None, **how) -> program.Step:
    return step_of(model or config(), objective=objective or Contrastive(), **how)


@functools.cache
def step_of(model, **how) -> program.Step:
    """Returns the step of a plan; cached, so that JAX traces each step once."""
    return program.make_step(planned(model, **how))


def traced(function, step) -> work.Work:
    with step.partitioner():
        return work.traced(function, step.state, step.batch)


def test_products_of_a_step_equal_a_hand_count():
    step = small_step()
    with step.partitioner():
        forward = work.traced(step.forward, step.trained, step.state, step.batch).flops
    expected = 0
    for length in (LENGTHS.query_max_length, LENGTHS.passage_max_length):
        dense = BATCH * length * (4 * E * HEADS * K + 3 * E * F)
        attention = BATCH * HEADS * length * length * K * 2
        positions = HEADS * 32 * length * length  # a one-hot product, shared by all layers
        expected += 2 * (LAYERS * (dense + attention) + BATCH * E * D + positions)
    expected += 2 * 2 * BATCH * BATCH * D  # products of queries with passages and with queries
    assert forward == expected


def test_objective_of_another_kind_of_model_is_refused():
    with pytest.raises(UserError, match=r"Reranking trains a cross-encoder .* model is a dual encod"):
        small_step(objective=Reranking())


@pytest.fixture(scope="module")
def compiled() -> tuple[program.Step, program.Compiled]:
    """The scanned step, fully sharded, compiled for four CPU devices."""
    step = small_step(mesh=MeshConfig(fsdp=4))
    return step, program.compile_step(step)


def test_compiled_chip_does_its_share_of_the_products(compiled):
    step, done = compiled
    whole = traced(step.function, step).flops
    unrolled = small_step(config(scan_layers=False))
    assert whole == traced(unrolled.function, unrolled).flops
    assert work.compiled(done.program).flops * 4 == pytest.approx(whole, rel=0.02)
    assert done.temporaries > 0
    assert done.short_by == 0
    assert useful(step) == useful(unrolled) == whole


def useful(step) -> float:
    with step.partitioner():
        return work.differentiated(step.forward, step.trained, step.state, step.batch)


def test_counted_work_of_frozen_layers_is_their_forward_pass():
    def loss(trained, frozen, tokens):
        # 3 products, one for each layer.
        given, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), tokens, frozen)
        ids = jax.numpy.argmax(given @ frozen[0], -1)  # 1 product

        def turn(x, w):
            # x @ w costs 3 products, and x @ frozen[0] costs 2, because frozen[0] gets no gradient.
            return jax.nn.relu(x @ w), x @ frozen[0]

        found, others = jax.lax.scan(turn, jax.nn.one_hot(ids, 8), trained)
        # 3 products of half the size.
        more = jax.lax.cond(ids[0] > 0, lambda x: x @ x.T, lambda x: x[:, :4], found)
        return found.sum() + others.sum() + more.sum()

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 8, 8), (3, 8, 8), (4, 8))]
    product = 2 * 4 * 8 * 8
    assert work.differentiated(loss, *shapes) == product * (3 + 1 + 2 * (3 + 2) + 3 / 2)


@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "tensor": 2}])
def test_products_of_maxsim_over_a_ring_count_those_of_all_devices(mesh):
    vectors, mask = jax.ShapeDtypeStruct((64, 8, 16), "float32"), jax.ShapeDtypeStruct((64, 8), bool)

    def loss(trained, mask):
        return losses.maxsim(trained[0], mask, trained[1], mask).sum()

    with MeshConfig(**mesh).build(jax.devices()[:4])():
        flops = work.differentiated(loss, (vectors, vectors), mask)
        step = work.traced(jax.value_and_grad(loss), (vectors, vectors), mask).flops
    assert flops == step == 3 * 2 * (64 * 8) ** 2 * 16


@pytest.mark.slow
def test_remat_saves_memory_and_leaves_useful_flops():
    plain, products, remat = (small_step(config(remat=of)) for of in (False, "products", True))
    all_kept, some_kept, least_kept = (step.activation_bytes() for step in (plain, products, remat))
    assert least_kept < 0.5 * all_kept
    assert least_kept < 0.7 * some_kept
    assert some_kept < 0.7 * all_kept
    assert useful(remat) == useful(products) == useful(plain) == traced(plain.function, plain).flops


def test_state_and_batch_are_the_compiled_programs_arguments():
    step = small_step(optimizer=AdamW(), mesh=MeshConfig(tensor=2, fsdp=2), num_negatives=2)
    with step.partitioner():
        lowered = step.function.lower(step.state, step.batch)
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    held = program.bytes_of(step.state) + program.bytes_of(step.batch)
    assert compiled.memory_analysis().argument_size_in_bytes == held
    assert program.bytes_of(step.batch) * 2 == 4 * BATCH * (8 + 16 * 3 + 2 * 4)


def make(text="gpu:4xl4", model=None, **how) -> run_plan.Plan:
    return run_plan.make(targets.parse(text), planned(model, **how))


@pytest.fixture(scope="module")
def gpu() -> run_plan.Plan:
    return make()


def test_estimated_plan_is_consistent(gpu):
    made = gpu
    assert made.fits and not made.compiled
    assert made.mesh == {"slices": 1, "data": 2, "fsdp": 2, "tensor": 1}
    step = small_step()
    assert made.num_parameters == sum(x.size for x in jax.tree.leaves(step.state.params))
    assert made.memory.state == program.bytes_of(step.state) - 4  # excludes the step counter
    assert made.memory.temporaries > made.memory.gradients + made.memory.activations > 0
    assert made.costs.work.flops * 4 == pytest.approx(traced(step.function, step).flops, rel=0.02)
    assert made.costs.work.vector > 0
    assert made.costs.roofline.overlapped <= made.costs.roofline.in_turn
    assert made.costs.roofline.parts[made.costs.roofline.bound] == made.costs.roofline.overlapped
    # Gradients of parameters that "data" does not split are reduced over it; "fsdp" gathers weights.
    kinds = {(c.kind, c.axes) for c in made.costs.collectives}
    assert ("all-reduce", ("data",)) in kinds
    assert ("all-gather", ("fsdp",)) in kinds
    text = run_plan.render(made)
    assert text.startswith("fits: ") and "1,000 steps" in text and "parameters, float32" in text


@pytest.mark.parametrize(
    ("changed", "quick"),
    [
        ({}, False),
        ({"jax_optimization_level": "O1"}, True),
        ({"jax_memory_fitting_effort": -0.5, "jax_memory_fitting_level": "O0"}, True),
        ({"jax_exec_time_optimization_effort": 0.5, "jax_optimization_level": "O3"}, False),
    ],
)
def test_plan_names_its_compiler_settings(changed, quick, gpu):
    """Plans for GPUs name none, because they use no compiler."""
    was = {name: getattr(jax.config, name) for name in changed}
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        found = program.compiler_settings()
    finally:
        for name, value in was.items():
            jax.config.update(name, value)
    assert found.given == tuple(f"{name.upper()}={value}" for name, value in changed.items())
    text = run_plan.render(gpu._replace(compiled=True, settings=found))
    for line in found.given:
        assert line in text
    for said in ("  under quick settings: ", "warning: compiled under quick"):
        assert (said in text) == quick
    assert text.startswith("fits, by quick settings: " if quick else "fits: ")
    short = gpu._replace(compiled=True, settings=found, short_by=1)
    assert ("does not fit, by quick settings: " in run_plan.render(short)) == quick
    assert "settings" not in run_plan.render(gpu._replace(settings=found))


def test_plan_that_does_not_fit_advises_changes():
    large = config(embed_dim=4096, num_layers=24, mlp_dim=10240, num_heads=64)
    one = MeshConfig(fsdp=1)  # nothing is compiled for a mesh of one device
    made = make("gpu:1xl4", model=large, mesh=one, devices=1)
    assert not made.fits
    text = run_plan.render(made)
    assert text.startswith("does not fit: ")
    words, command = made.advice[-2:]
    assert re.fullmatch(r"\d+ chips, fsdp=\d+.* \(about [\d.]+ GiB on each chip\):", words)
    assert re.fullmatch(r"  python -m jaxir\.plan --topology=gpu:(\d+)xl4 --fsdp=\1.*", command)
    assert text.splitlines()[1:4] == ["try one of these:", f"  {made.advice[0]}", f"  {made.advice[1]}"]


@pytest.mark.slow
def test_advised_settings_fit():
    """Memory is computed from shapes: chunks do not make the logits of a batch smaller."""
    target = dataclasses.replace(targets.parse("gpu:4xl4"), chip=chip(make().memory.total * 0.9))
    changed = {"--fsdp": "fsdp", "--remat": "remat", "--chunks": "chunks", "--batch_size": "size"}
    commands = run_plan.make(target, planned()).advice[1::2]
    assert len(commands) > 1
    for command in commands:
        flags = dict(word.split("=") for word in command.split()[3:])
        given = {changed[flag]: value for flag, value in flags.items() if flag in changed}
        if "--topology" in flags or "size" in given:
            continue
        how = {"model": config(remat={"True": True}.get(given.get("remat"), given.get("remat", False)))}
        how["mesh"] = MeshConfig(fsdp=int(given.get("fsdp", 2)))
        how["objective"] = Contrastive(chunks=int(given.get("chunks", 1)))
        assert run_plan.make(target, planned(**how)).fits, command


def test_priced_plan_costs_chip_hours(gpu):
    priced = prices.read(["l4=90000", "h100=3"], [gpu.target])
    lines = run_plan.render(gpu, priced).splitlines()
    assert re.fullmatch(r"1,000 steps at full speed: .*, costs [\d,.]+ to [\d,.]+", lines[1])
    hours = gpu.costs.roofline.overlapped * 1000 / 3600
    assert f"costs {hours * 4 * priced['l4']:,.2f}" in "\n".join(lines[2:])


def test_compiler_error_yields_the_missing_memory():
    message = "Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm. Exceeded"
    found = program._does_not_fit(RuntimeError(message), held=2**30)
    assert (found.limit, found.temporaries) == (int(15.75 * 2**30), int(19.5 * 2**30))
    assert found.short_by == pytest.approx(4.75 * 2**30)
    with pytest.raises(UserError, match="the compiler refused the step: mosaic failed"):
        program._does_not_fit(RuntimeError("mosaic failed\nat line 3"), held=0)


@pytest.mark.parametrize("chunks", [1, 3])
def test_remat_recomputes_the_products_of_its_policy(chunks):
    objective = Contrastive(chunks=chunks)
    flops = []
    for remat in (False, "products", True):
        step = small_step(config(remat=remat), objective=objective)
        flops.append(traced(step.function, step).flops)
    attention = linear = 0
    for length in (LENGTHS.query_max_length, LENGTHS.passage_max_length):
        attention += 2 * LAYERS * 2 * BATCH * HEADS * length * length * K
        # All products except a block's last.
        linear += 2 * LAYERS * BATCH * length * (4 * E * HEADS * K + 2 * E * F)
    assert flops[1] - flops[0] == attention
    assert flops[2] - flops[1] == linear


@pytest.mark.slow
def test_auto_remat_is_chosen_for_the_planned_chip():
    def on_one(remat, room):  # one device: needs no partitioning
        one = planned(config(remat=remat), mesh=MeshConfig(fsdp=1), devices=1)
        return run_plan.make(dataclasses.replace(targets.parse("gpu:1xl4"), chip=chip(room)), one)

    wanted = on_one("products", 2**40)
    chosen = on_one("auto", wanted.memory.total)
    assert "float32, remat except products, scanned" in chosen.model
    assert chosen.memory.total == wanted.memory.total < on_one(False, 2**40).memory.total


@pytest.mark.slow
def test_chunks_are_chosen_for_the_planned_chips_memory():
    size = make(objective=Contrastive(chunks=3)).memory.total
    tight = dataclasses.replace(targets.parse("gpu:4xl4"), chip=chip(size))
    chosen = run_plan.make(tight, planned(objective=Contrastive(chunks="auto")))
    assert chosen.batch.endswith("embedded in 3 chunks")
    assert chosen.memory.total == size and chosen.fits


def chip(room: float) -> targets.Chip:
    """A chip that has just enough memory for `room` bytes and some counters."""
    return dataclasses.replace(targets.parse("gpu:4xl4").chip, memory=(room + 64) / HEADROOM)


def test_float32_products_of_gpus_count_as_tf32(gpu):
    # Most products of the partitioned program are float32.
    assert gpu.costs.work.single_flops > 0.9 * gpu.costs.work.flops
    for dtype, least, most in (("float32", 0.9, 1.0), ("bfloat16", 0.0, 0.2)):
        step = small_step(config(dtype=dtype))
        done = traced(step.function, step)
        assert least <= done.single_flops / done.flops <= most


def test_plan_warns_of_whole_batch_activations():
    array = hlo.Array("f32", (BATCH, LENGTHS.passage_max_length, E), False)
    lost = Collective("all-gather", ("data",), array.bytes, 1, 2, (0, 1), (array,), "scatter-add")
    weights = lost._replace(arrays=(hlo.Array("bf16", (E, F), False),))
    biases = lost._replace(arrays=(hlo.Array("f32", (HEADS, 16, 16), False),))
    ids = lost._replace(arrays=(array._replace(dtype="s32"),))
    embeddings = lost._replace(arrays=(hlo.Array("f32", (BATCH, D), False),))
    assert run_plan.warn([weights, biases, ids, embeddings], BATCH, LENGTHS) == []
    optimizers = lost._replace(source="jit(step)/vmap()/reduce_sum")
    backward = lost._replace(source="jit(step)/transpose(jvp())/dot_general")
    lines = run_plan.warn([lost, weights, optimizers, backward], BATCH, LENGTHS)
    assert [line.rsplit(": ", 1)[1] for line in lines] == [lost.source, backward.source]
    assert "f32[24, 16, 32]" in lines[0]


def test_plan_warns_of_gradients_reduced_whole():
    params = {"wi": jax.ShapeDtypeStruct((LAYERS, E, F), np.float32)}
    array = hlo.Array("bf16", (E, F), False)
    whole = Collective("all-reduce", ("fsdp",), array.bytes, 8, 4, (0, 1, 2, 3), (array,), "")
    (line,) = run_plan.warn_of_whole_gradients([whole], params)
    assert "(now 4)" in line
    assert run_plan.warn_of_whole_gradients([whole._replace(kind="reduce-scatter")], params) == []
    assert run_plan.warn_of_whole_gradients([whole._replace(axes=("data",))], params) == []


def test_shipped_step_gathers_no_activations(compiled):
    step, done = compiled
    found = collectives.read(done.program, step.partitioner.mesh)
    assert sum(c.count for c in found if c.kind == "all-gather") > 10 * LAYERS
    assert run_plan.warn(found, BATCH, LENGTHS) == []
    # Guard: the warning recognises differentiated operations by "jvp(" in their names, which JAX may change.
    named = [c for c in found if c.source.startswith("jit(")]
    assert sum("jvp(" in c.source for c in named) > len(named) / 2 > 1

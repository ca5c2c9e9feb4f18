"""Overlap of communication in schedules as a TPU's compiler writes them, compared with results by hand."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxir.costs import collectives, hlo, overlap, roofline, targets, work

V5E = targets.parse("v5e:2x2")
SQUARE = [types.SimpleNamespace(coords=(x, y, 0)) for x in range(2) for y in range(2)]
# Seconds of a gather in a ring of four chips: each sends 3/4 of the whole array over two links.
GATHER = 3 / 4 * 4096 * 4096 * 2 / (2 * V5E.chip.link_bandwidth)
PRODUCT = 2 * 4096**3 / V5E.chip.flops  # takes longer than its HBM traffic and than a gather
COPY = 4096 * 4096 * 2 / V5E.chip.memory_bandwidth
BIG = "bf16[4096,4096]{1,0}"
# Arrays in the chip's own memory (S(1)) cause no HBM traffic.
WHOLE, PART = "bf16[4096,4096]{1,0:S(1)}", "bf16[1024,4096]{1,0:S(1)}"
OVER_ALL = "replica_groups=[1,4]<=[4], dimensions={0}"


def program(body: str, others: str = "") -> hlo.Program:
    """Returns a program of these lines, with %a and %b defined, and other computations."""
    lines = [f"%a = {WHOLE} parameter(0)", f"%b = {PART} parameter(1)"]
    lines += [line.strip() for line in body.strip().splitlines()]
    main = "ENTRY %main (a: f32[1]) -> f32[1] {\n  " + "\n  ".join(lines) + "\n}\n"
    return hlo.parse(f"HloModule m\n\n{others}{main}")


def product(name: str) -> str:
    return f"%{name} = {WHOLE} convolution(%a, %a), dim_labels=bf_io->bf"


def follow(found: hlo.Program) -> overlap.Overlap:
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    followed = overlap.read(found, V5E, mesh, SQUARE)
    sent = collectives.read(found, mesh)
    times = roofline.estimate(work.compiled(found), sent, V5E, SQUARE)
    assert times.overlapped <= followed.seconds * (1 + 1e-9)
    assert followed.seconds <= times.in_turn * (1 + 1e-9)
    assert sum(followed.hidden_bytes.values()) <= sum(c.traffic for c in sent)
    return followed


STARTED = f"({PART}, {WHOLE}) all-gather-start(%b), {OVER_ALL}"
NINE = [f"%s{i} = {STARTED}" for i in range(9)], [f"%g{i} = {WHOLE} all-gather-done(%s{i})" for i in range(9)]
COPIED, HERE = f"%c = ({WHOLE}, {BIG}, u32[]) copy-start(%a)", f"%d = {WHOLE} copy-done(%c)"


@pytest.mark.parametrize(
    ("lines", "seconds", "hidden"),
    [
        ([product("x"), f"%g = {WHOLE} all-gather(%b), {OVER_ALL}", product("y")], 2 * PRODUCT + GATHER, 0),
        ([f"%s = {STARTED}", product("x"), f"%g = {WHOLE} all-gather-done(%s)"], PRODUCT, GATHER),
        ([f"%s = {STARTED}", f"%g = {WHOLE} all-gather-done(%s)", product("x")], PRODUCT + GATHER, 0),
        ([*NINE[0], product("x"), *NINE[1]], 9 * GATHER, PRODUCT),  # a link sends one array at a time
        ([COPIED, product("x"), HERE], PRODUCT, 0),
        ([COPIED, HERE, product("x")], PRODUCT + COPY, 0),
    ],
)
def test_work_between_start_and_done_hides_a_transfer(lines, seconds, hidden):
    assert COPY < PRODUCT < 9 * GATHER
    found = follow(program("\n".join(lines)))
    assert found.seconds == pytest.approx(seconds)
    assert found.hidden_seconds == pytest.approx(hidden)
    if hidden == GATHER:
        assert found.hidden_bytes == {("all-gather", ("fsdp",)): pytest.approx(3 / 4 * 4096 * 4096 * 2)}
    assert any(found.hidden_bytes.values()) == (hidden > 0)


def test_start_of_a_computation_with_a_collective_hides_it():
    wrapped = f"""%wrapped (p: f32[1]) -> f32[1] {{
  %p = {PART} parameter(0)
  ROOT %g = {WHOLE} all-gather(%p), {OVER_ALL}
}}

"""
    lines = f"%s = (({PART}), {WHOLE}, u32[]) async-start(%b), calls=%wrapped\n{product('x')}"
    text = f"{lines}\n%u = (({PART}), {WHOLE}, u32[]) async-update(%s)\n%d = {WHOLE} async-done(%u)"
    found = follow(program(text, wrapped))
    assert found.hidden_seconds == pytest.approx(GATHER)
    assert found.seconds == pytest.approx(PRODUCT)
    # A SparseCore runs this collective.
    where = 'async_execution_thread="sparsecore", to_apply=%wrapped'
    line = f"%s = (({PART}, token[]), {WHOLE}) call-start(%b), {where}"
    read = program(f"{line}\n{product('x')}\n%d = {WHOLE} call-done(%s)", wrapped)
    found = follow(read)
    assert found.hidden_seconds == pytest.approx(GATHER)
    assert found.seconds == pytest.approx(PRODUCT)
    (gather,) = collectives.read(read, Mesh(np.array(jax.devices()[:4]), ("fsdp",)))
    assert gather.kind == "all-gather" and gather.traffic == 3 / 4 * 4096 * 4096 * 2


# libtpu's form of collectives in a loop, whose condition has the number of iterations. A gather is fused into
# its start, a product that continues it, and its end. A scattered reduction is a fusion.
CARRIED = f"""HloModule m

%start (p0: f32[1]) -> f32[1] {{
  %p0 = {PART} parameter(0)
  %g1 = {WHOLE} all-gather(%p0), {OVER_ALL}, frontend_attributes={{chain_id="7"}}
  ROOT %r0 = ({PART}, {WHOLE}) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}}

%carry (p1: f32[1]) -> f32[1] {{
  %p1 = {WHOLE} parameter(0)
  %p2 = {PART} parameter(1)
  %g2 = {WHOLE} all-gather(%p2), {OVER_ALL}, frontend_attributes={{chain_id="7"}}
  ROOT %r1 = {WHOLE} convolution(%p1, %p1), dim_labels=bf_io->bf
}}

%end (p3: f32[1]) -> f32[1] {{
  %p3 = {PART} parameter(0)
  %g3 = {WHOLE} all-gather(%p3), {OVER_ALL}, frontend_attributes={{chain_id="7"}}
  ROOT %r2 = {WHOLE} custom-call(%g3), custom_call_target="AsyncCollectiveDone"
}}

%scatter (p5: f32[1]) -> f32[1] {{
  %p5 = {WHOLE} parameter(0)
  %reduced = {WHOLE} all-reduce(%p5), replica_groups=[1,4]<=[4], to_apply=%sum
  %zero = s32[] constant(0)
  ROOT %own = {PART} dynamic-slice(%reduced, %zero, %zero), dynamic_slice_sizes={{1024,4096}}
}}

%body (s: (s32[])) -> (s32[]) {{
  %s = (s32[]) parameter(0)
  %a = {WHOLE} constant(0)
  %b = {PART} constant(0)
  %started = ({PART}, {WHOLE}) fusion(%b), kind=kCustom, calls=%start
  {product("apart")}
  %carried = {WHOLE} fusion(%a, %b), kind=kOutput, calls=%carry
  %ended = {WHOLE} fusion(%b), kind=kCustom, calls=%end
  %all-reduce-scatter.1 = {PART} fusion(%a), kind=kCustom, calls=%scatter
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %o = (s32[]) tuple(%next)
}}

%condition (c: (s32[])) -> pred[] {{
  %c = (s32[]) parameter(0)
  %last = s32[] constant(6)
  %i.1 = s32[] get-tuple-element(%c), index=0
  ROOT %more = pred[] compare(%i.1, %last), direction=LT
}}

ENTRY %main (a: f32[1]) -> f32[1] {{
  %first = s32[] constant(1)
  %begin = s32[] copy(%first)
  %tuple = (s32[]) tuple(%begin)
  ROOT %loop = (s32[]) while(%tuple), condition=%condition, body=%body
}}
"""


def test_collectives_fused_into_products_count_once_an_iteration():
    program = hlo.parse(CARRIED)
    sent = collectives.read(program, Mesh(np.array(jax.devices()[:4]), ("fsdp",)))
    found = {c.kind: (c.count, c.bytes, c.traffic) for c in sent}
    size = 4096 * 4096 * 2
    assert found == dict.fromkeys(("all-gather", "reduce-scatter"), (5, size, 5 * size * 3 / 4))
    assert work.compiled(program).flops == 5 * 2 * 2 * 4096**3 and not program.endless


@pytest.mark.parametrize("carries", [True, False])
def test_fused_collectives_advance_during_their_products_only(carries):
    text = CARRIED if carries else CARRIED.replace("calls=%carry", "calls=%plain")
    plain = CARRIED[CARRIED.index("%carry (") : CARRIED.index("%end (")].replace("%carry", "%plain", 1)
    plain = "\n".join(line for line in plain.splitlines() if "all-gather" not in line) + "\n\n"
    loop = hlo.parse(text.replace("%end (", plain + "%end (", 1))
    found = follow(loop)
    hidden = 5 * GATHER if carries else 0.0
    assert found.hidden_seconds == pytest.approx(hidden)
    assert sum(found.hidden_bytes.values()) == pytest.approx(hidden * 2 * V5E.chip.link_bandwidth)
    assert found.seconds == pytest.approx(5 * (2 * PRODUCT + 2 * GATHER) - hidden, rel=1e-5)

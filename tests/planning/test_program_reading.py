"""Loops, collectives, operations and bytes that are read from compiled programs equal known numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxir.costs import collectives, hlo, targets, work

B, E, F, INNER, OUTER = 8, 16, 32, 5, 3


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))


def compiled_loop(mesh, *, unroll):
    """A nested scan whose inner body multiplies by E x F and F x E matrices and reduces over "tensor"."""
    sharded = {
        "x": NamedSharding(mesh, PartitionSpec("data")),
        "a": NamedSharding(mesh, PartitionSpec(None, None, "tensor")),
        "b": NamedSharding(mesh, PartitionSpec(None, "tensor")),
    }
    shapes = {"x": (B, E), "a": (INNER, E, F), "b": (INNER, F, E)}
    abstract = {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharded[k]) for k, s in shapes.items()}

    def inner(x, layer):
        return jnp.tanh(x @ layer[0] @ layer[1]), None

    def outer(x, _):
        return jax.lax.scan(inner, x, (a_b["a"], a_b["b"]), unroll=INNER if unroll else 1)[0], None

    a_b = {}

    def function(arrays):
        a_b.update(arrays)
        return jax.lax.scan(outer, arrays["x"], None, length=OUTER, unroll=OUTER if unroll else 1)[0]

    jitted = jax.jit(function, out_shardings=sharded["x"])
    return jitted.lower(abstract).compile(), function, abstract


@pytest.mark.parametrize("unroll", [False, True])
def test_loop_counts_as_often_as_it_iterates(mesh, unroll):
    compiled, function, abstract = compiled_loop(mesh, unroll=unroll)
    program = hlo.parse(compiled.as_text())
    assert any(s.instruction.op == "while" for s in program.steps()) == (not unroll)
    flops = OUTER * INNER * 2 * 2 * B * E * F
    assert work.compiled(program).flops * 4 == flops
    assert work.traced(function, abstract).flops == flops
    assert not program.endless

    found = [c for c in collectives.read(program, mesh) if c.axes == ("tensor",)]
    assert sum(c.count for c in found) == OUTER * INNER
    assert {c.kind for c in found} == {"all-reduce"}
    assert sum(c.bytes * c.count for c in found) == OUTER * INNER * (B // 2) * E * 4
    # Each device of a ring of two sends half of the array twice.
    assert sum(c.traffic for c in found) == OUTER * INNER * (B // 2) * E * 4


def test_operations_agree_with_xla_cost_analysis(mesh):
    compiled, _, _ = compiled_loop(mesh, unroll=True)
    ours = work.compiled(hlo.parse(compiled.as_text()))
    theirs = compiled.cost_analysis()
    assert theirs["flops"] == pytest.approx(ours.flops + ours.vector, rel=0.02)


def test_loops_of_unknown_length_are_reported():
    def halve(x):
        return jax.lax.while_loop(lambda v: jnp.sum(v) > 1, lambda v: v @ v / 8, x)

    program = hlo.parse(jax.jit(halve).lower(jnp.ones((4, 4))).compile().as_text())
    assert work.compiled(program).flops == 2 * 4**3
    assert len(program.endless) == 1


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}, x", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}, x", [[0, 1], [2, 3]]),
    ],
)
def test_groups_of_a_collective(text, groups):
    assert collectives.read_groups(text, 4) == groups


def test_the_axes_a_collective_crosses(mesh):
    assert collectives.crossed([[0, 1], [2, 3]], mesh) == ("tensor",)
    assert collectives.crossed([[0, 2], [1, 3]], mesh) == ("data",)
    assert collectives.crossed([[0, 3]], mesh) == ("data", "tensor")
    assert collectives.crossed([[0, 1]], Mesh(mesh.devices[::-1], mesh.axis_names)) == ("tensor",)


@pytest.mark.parametrize(
    ("use", "read"),
    [
        ("dynamic-slice(%p, %i, %i), dynamic_slice_sizes={4,8}", 4 * 8),
        ("fusion(%i, %p), kind=kLoop, calls=%sliced", 4 * 8),
        ("fusion(%i, %p), kind=kLoop, calls=%whole", 64 * 8),
    ],
)
def test_fusion_reads_only_what_it_slices(use, read):
    program = hlo.parse(
        f"""HloModule slices

%sliced (j: s32[], r: f32[64,8]) -> f32[4,8] {{
  %j = s32[] parameter(0)
  %r = f32[64,8]{{1,0}} parameter(1)
  ROOT %t = f32[4,8]{{1,0}} dynamic-slice(%r, %j, %j), dynamic_slice_sizes={{4,8}}
}}

%whole (k: s32[], w: f32[64,8]) -> f32[4,8] {{
  %k = s32[] parameter(0)
  %w = f32[64,8]{{1,0}} parameter(1)
  %n = f32[64,8]{{1,0}} negate(%w)
  ROOT %u = f32[4,8]{{1,0}} dynamic-slice(%n, %k, %k), dynamic_slice_sizes={{4,8}}
}}

%outer (p: f32[64,8], i: s32[]) -> f32[4,8] {{
  %p = f32[64,8]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[4,8]{{1,0}} {use}
  ROOT %e = f32[4,8]{{1,0}} exponential(%s)
}}

ENTRY %main (x: f32[64,8], at: s32[]) -> f32[4,8] {{
  %x = f32[64,8]{{1,0}} parameter(0)
  %at = s32[] parameter(1)
  ROOT %f = f32[4,8]{{1,0}} fusion(%x, %at), kind=kLoop, calls=%outer
}}
"""
    )
    assert work.compiled(program).bytes == 4 * (read + 1 + 4 * 8)


def convolution(shapes: tuple[str, str, str], attributes: str) -> work.Work:
    left, right, out = shapes
    text = (
        "HloModule m\n\nENTRY %main (a: f32[1]) -> f32[1] {\n"
        f"  %a = {left}{{0}} parameter(0)\n  %b = {right}{{0}} parameter(1)\n"
        f"  ROOT %c = {out}{{0}} convolution(%a, %b), {attributes}\n}}\n"
    )
    return work.compiled(hlo.parse(text))


PLAIN = ("f32[5,6]", "f32[6,7]", "f32[5,7]")


@pytest.mark.parametrize(("precision", "passes"), [("highest", 6), ("high", 3), ("default", 1)])
def test_float32_product_takes_the_passes_of_its_precision(precision, passes):
    attribute = "" if precision == "default" else f", operand_precision={{{precision},{precision}}}"
    done = convolution(PLAIN, f'dim_labels=bf_io->bf{attribute}, metadata={{op_name="high"}}')
    chip = targets.parse("v5e:2x2").chip
    assert done.seconds(chip)[0] == pytest.approx(passes * 2 * 5 * 6 * 7 / chip.flops)


@pytest.mark.parametrize(
    ("shapes", "attributes", "flops"),
    [
        (PLAIN, "dim_labels=bf_io->bf", 2 * 5 * 6 * 7),
        # A product for each of 3 heads, as a convolution with dilated input.
        (
            ("f32[5,3,6]", "f32[3,6,7]", "f32[5,3,7]"),
            "window={size=3 stride=2 pad=2_2 lhs_dilate=3 rhs_reversal=1}, dim_labels=b0f_0io->b0f",
            2 * 5 * 6 * 7 * 3,  # position 2 o + k - 2 is an element if 3 divides it: one k for each o
        ),
        # A window of 3 over 5 elements with a border of 1: two of the 15 positions lie outside.
        (
            ("f32[1,5,1]", "f32[3,1,1]", "f32[1,5,1]"),
            "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            2 * 13,
        ),
    ],
)
def test_convolution_counts_only_positions_with_an_element(shapes, attributes, flops):
    assert convolution(shapes, attributes).flops == flops


def test_loop_reads_slices_of_its_stack():
    n, e = 64, 128

    def function(x, layers):
        return jax.lax.scan(lambda x, layer: (x @ layer, None), x, layers)[0]

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((e, e), (n, e, e))]
    moved = work.compiled(hlo.parse(jax.jit(function).lower(*shapes).compile().as_text())).bytes
    once = n * e * e * 4  # bytes of all layers, each read once
    # An iteration copies a layer out and multiplies with it; it does not read the whole stack.
    assert 2 * once < moved < 10 * once


# libtpu's form of a Pallas kernel; the text does not show its body.
KERNEL = """HloModule attend

ENTRY %main (q: bf16[16,64,128], lengths: s32[16]) -> (bf16[16,64,128], f32[16,1,2,64]) {
  %q = bf16[16,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %lengths = s32[16]{0:T(128)} parameter(1)
  %room = bf16[12,64,128]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %attention_forward.1 = (bf16[16,64,128]{2,1,0:T(8,128)(2,1)}, f32[16,1,2,64]{3,2,1,0:T(2,128)}) custom-call(%lengths, %q, %q, %q), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[16]{0}, bf16[16,64,128]{2,1,0}}, frontend_attributes={kernel_metadata={
"elementwise":"777"
}}, metadata={op_name="attention_forward/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzvUgFN","cost_estimate":{"flops":"3221","transcendentals":"77","bytes_accessed":"99","remote_bytes_transferred":"0"},"needs_layout_passes":true}}
}
"""  # noqa: E501


def test_kernel_counts_as_it_declares():
    done = work.compiled(hlo.parse(KERNEL))
    assert done == work.Work(3221, 0, 777, 4 * 16 * 64 * 128 * 2 + 16 * 4 + 16 * 2 * 64 * 4)
    silent = hlo.parse(KERNEL.replace('"elementwise":"777"', "").replace('"flops":"3221",', ""))
    assert work.compiled(silent) == done._replace(flops=0, vector=0)

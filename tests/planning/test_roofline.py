"""Roofline times and bandwidths by hand, rounding of reports, and machines by name."""

import types

import pytest

from jaxir.core.errors import UserError
from jaxir.costs import roofline, targets, work
from jaxir.costs.chips import CHIPS, SLICES
from jaxir.costs.collectives import Collective
from jaxir.planning.plan_report import duration, si


def ring(coords, slices=None):
    slices = slices or [0] * len(coords)
    return [types.SimpleNamespace(coords=(*c, 0), slice_index=s) for c, s in zip(coords, slices, strict=True)]


def test_bandwidth_follows_the_torus():
    v5e = targets.parse("v5e:4x4")
    devices = ring([(x, y) for x in range(4) for y in range(4)])
    link = v5e.chip.link_bandwidth
    assert roofline.bandwidth([0, 1, 2, 3], v5e, devices) == link  # a line, whose ends are not joined
    assert roofline.bandwidth(range(16), v5e, devices) == 2 * link
    wide = targets.parse("v5e:16x16")
    assert roofline.bandwidth(range(16), wide, ring([(0, y) for y in range(16)])) == 2 * link
    v5p = targets.parse("v5p:4x4x4")
    cube = ring([(x, y, z) for x in range(4) for y in range(4) for z in range(4)])
    assert roofline.bandwidth(range(64), v5p, cube) == 6 * v5p.chip.link_bandwidth
    two = targets.parse("v5e:2x2*2")
    apart = ring([(0, 0), (0, 1), (0, 0), (0, 1)], [0, 0, 1, 1])
    assert roofline.bandwidth(range(4), two, apart) == 2 * two.chip.network_bandwidth


def test_bandwidth_of_gpus_ends_at_the_node():
    target = targets.parse("gpu:16xh100")
    inside, outside = target.chip.link_bandwidth, target.chip.network_bandwidth
    assert roofline.bandwidth(range(8), target, []) == inside
    assert roofline.bandwidth([0, 8], target, []) == outside
    assert roofline.bandwidth(range(16), target, []) == 8 * outside


def test_roofline_divides_work_by_published_rates():
    target = targets.parse("gpu:8xh100")
    gather = Collective("all-gather", ("fsdp",), 8_000_000, 10, 8, tuple(range(8)), (), "")
    done = work.Work(flops=989e12, precise_flops=0.0, vector=0.0, bytes=3350e9)
    times = roofline.estimate(done, [gather], target, [])
    assert times.compute == pytest.approx(1)
    assert times.memory == pytest.approx(1)
    assert times.vector is None
    assert times.interconnect == pytest.approx(10 * 7e6 / 450e9)
    precise = roofline.estimate(done._replace(precise_flops=done.flops), [], target, [])
    assert precise.compute == pytest.approx(989 / 67)
    # A GPU multiplies float32 in TF32, at half the rate; a TPU in bfloat16.
    single = done._replace(single_flops=done.flops / 2)
    assert roofline.estimate(single, [], target, []).compute == pytest.approx(1.5)
    of_tpu = [work.seconds(targets.parse("v5e:2x2").chip)[0] for work in (done, single)]
    assert of_tpu[0] == of_tpu[1] > 0


def test_units_of_a_report_are_chosen_after_rounding():
    numbers = {0: "0 ", 0.5: "0.5 ", 999: "999 ", 1000: "1 k", 1500: "1.5 k", 999_400: "999 k"}
    numbers |= {999_600: "1 M", 999.9e9: "1 T", 1e15: "1 P", 2.5e21: "2.5e+03 E"}
    assert {number: si(number) for number in numbers} == numbers
    times = {0.0697: "69.7 ms", 0.9994: "999 ms", 0.9996: "1 s", 119.4: "119 s", 119.7: "2 min"}
    times |= {7199: "120 min", 7200: "2.0 h", 123_456: "34.3 h"}
    assert {seconds: duration(seconds) for seconds in times} == times


@pytest.mark.parametrize(
    ("text", "count", "shape", "slices"),
    [
        ("v5p:4x4x4", 64, (4, 4, 4), 1),
        ("v5e:4x4", 16, (4, 4), 1),
        ("v6e:8x8*2", 128, (8, 8), 2),
        ("V4:2x2x1", 4, (2, 2, 1), 1),
        ("gpu:1xl4", 1, (1,), 1),
        ("gpu:8xh100", 8, (8,), 1),
        ("gpu:16xA100", 16, (16,), 2),
    ],
)
def test_machine_names_are_parsed(text, count, shape, slices):
    target = targets.parse(text)
    assert (target.count, target.shape, target.slices) == (count, shape, slices)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *[("v5e-4", "v5e:2x2"), ("v5litepod-16", "v5e:4x4"), ("tpu-v5e-8", "v5e:2x4"), ("v6e:8", "v6e:2x4")],
        *[("v4-8", "v4:2x2x1"), ("v5p-16", "v5p:2x2x2")],  # two cores a chip
        *[("v5e:4x2", "v5e:2x4"), ("v5p:4x4", "v5p:2x2x4")],
        *[("a100", "gpu:1xa100"), ("H100", "gpu:1xh100"), ("gpu:h100", "gpu:1xh100")],
        *[("8xa100", "gpu:8xa100"), ("a100:8", "gpu:8xa100"), ("h100x8", "gpu:8xh100")],
        *[("a100-80gb", "gpu:1xa100"), ("gpu:h100:8", "gpu:8xh100"), ("l40s-4", "gpu:4xl40s")],
    ],
)
def test_other_names_of_a_machine_are_understood(text, meant):
    assert targets.parse(meant).name == meant
    with pytest.raises(UserError, match=f"; did you mean '{meant}'?"):
        targets.parse(text)


@pytest.mark.parametrize("text", ["tpu", "t4", "v5e:3x3", "gpu:8", ""])
def test_unknown_names_get_no_suggestion(text):
    with pytest.raises(UserError) as error:
        targets.parse(text)
    assert "did you mean" not in str(error.value)


def test_every_tpu_has_slices_and_every_slice_parses():
    assert set(SLICES) == {name for name, chip in CHIPS.items() if chip.kind == "tpu"}
    for name, shapes in SLICES.items():
        counts = [targets.parse(f"{name}:{shape}").count for shape in shapes]
        assert counts == sorted(counts)
        assert all(shape.count("x") == CHIPS[name].torus - 1 for shape in shapes)


def test_larger_machines_are_offered_smallest_first():
    """12 GPUs are not a multiple of the 8 of a node; offering them made the plan of six GPUs fail."""
    assert [t.name for t in targets.parse("v5p:8x8x8").larger()] == ["v5p:8x8x16", "v5p:8x16x16"]
    for machine, counts in (("8xh100", [16, 32, 64, 128]), ("3xl4", [6, 24, 48]), ("6xh100", [24, 48, 96])):
        assert [t.count for t in targets.parse(f"gpu:{machine}").larger()] == counts


def test_torus_ends_are_joined_as_published():
    assert CHIPS["v5p"].wraps((4, 4, 8)) == (True, True, True)
    assert CHIPS["v5p"].wraps((2, 4, 4)) == (False, False, False)
    assert CHIPS["v5e"].wraps((8, 16)) == (False, True)

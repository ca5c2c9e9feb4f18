"""Machines by name, and the tables of chips."""

import pytest

from jaxir.core.errors import UserError
from jaxir.costs import targets
from jaxir.costs.chips import CHIPS, SLICES


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


def test_larger_slices_are_offered_smallest_first():
    assert [t.name for t in targets.parse("v5p:8x8x8").larger()] == ["v5p:8x8x16", "v5p:8x16x16"]
    assert [t.count for t in targets.parse("gpu:8xh100").larger()] == [16, 32, 64, 128]


def test_larger_gpu_counts_fill_their_nodes():
    """12 GPUs are not a multiple of the 8 of a node; offering them made the plan of six GPUs fail."""
    assert [t.count for t in targets.parse("gpu:3xl4").larger()] == [6, 24, 48]
    assert [t.count for t in targets.parse("gpu:6xh100").larger()] == [24, 48, 96]


def test_torus_ends_are_joined_as_published():
    assert CHIPS["v5p"].wraps((4, 4, 8)) == (True, True, True)
    assert CHIPS["v5p"].wraps((2, 4, 4)) == (False, False, False)
    assert CHIPS["v5e"].wraps((8, 16)) == (False, True)

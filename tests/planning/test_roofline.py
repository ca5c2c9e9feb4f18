"""Roofline times and bandwidths, by hand."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxir.costs import collectives, roofline, targets, work
from jaxir.costs.collectives import Collective


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


def test_meshes_of_any_device_order_are_read():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices[::-1], ("data", "fsdp"))
    assert collectives.crossed([[0, 1]], mesh) == ("fsdp",)

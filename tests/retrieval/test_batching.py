"""Plans of batches: each text once, few shapes, little padding."""

import itertools

import jax
import numpy as np
import pytest

from jaxir.retrieval.encoding import batch_runner
from jaxir.retrieval.encoding.batching import Batch, choose_lengths, plan_batches


def real_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Token counts like those of real passages: median 65, 256 at most."""
    return np.clip(np.random.default_rng(seed).lognormal(4.2, 0.7, count), 4, 256).astype(int)


def padding_ratio(plan: list[Batch], counts: np.ndarray) -> float:
    return sum(b.rows * b.length for b in plan) / counts.sum()


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("shape_cost", [0, 512])
def test_each_text_is_in_one_batch_that_holds_it(devices, shape_cost):
    counts = real_lengths(777)
    plan = plan_batches(counts, batch_tokens=1024, shape_cost=shape_cost, row_multiple=devices)
    assert sorted(np.concatenate([b.texts for b in plan])) == list(range(777))
    for batch in plan:
        assert counts[batch.texts].max() <= batch.length and len(batch.texts) <= batch.rows
        assert batch.length % 8 == batch.rows % devices == 0
        assert batch.rows * batch.length <= 1024 * devices


def test_all_batches_are_full_but_the_last():
    plan = plan_batches(real_lengths(2000), batch_tokens=1024)
    assert len(plan) > 50
    assert all(len(b.texts) == b.rows == 1024 // b.length for b in plan[:-1])


def test_padding_and_shapes_are_bounded():
    counts = real_lengths(4000)
    every_length = plan_batches(counts, batch_tokens=1024)
    assert padding_ratio(every_length, counts) < 1.09
    assert len({b.shape for b in every_length}) <= 256 // 8 + 1
    fewer = plan_batches(counts, batch_tokens=1024, shape_cost=1024)
    assert len({b.shape for b in fewer}) < 0.75 * len({b.shape for b in every_length})
    assert padding_ratio(fewer, counts) < 1.12


@pytest.mark.parametrize(
    ("counts", "how", "shapes"),
    [
        ([7], {"batch_tokens": 1024}, [(1, 8)]),
        ([300, 5, 300], {"batch_tokens": 128, "row_multiple": 2}, [(2, 304), (2, 8)]),
        ([], {"batch_tokens": 1024}, []),
        ([0, 0, 0], {"batch_tokens": 1024}, [(4, 8)]),
    ],
    ids=["one short text", "longer than the budget", "no texts", "texts without tokens"],
)
def test_few_texts_have_few_rows(counts, how, shapes):
    assert [batch.shape for batch in plan_batches(counts, **how)] == shapes


def test_chosen_lengths_cost_least():
    counts = np.array([3, 9, 9, 17, 30, 31, 60])
    steps = -(-counts // 8)
    for shape_cost in (0, 5, 20, 50, 1000):
        costs = {}
        for size in range(1, 9):
            for lengths in itertools.combinations(range(1, 9), size):
                if lengths[-1] >= steps.max():
                    held = [next(n for n in lengths if n >= s) for s in steps]
                    costs[lengths] = 8 * sum(held) + shape_cost * len(lengths)
        chosen = tuple(choose_lengths(counts, shape_cost) // 8)
        assert costs[chosen] == min(costs.values())


@pytest.mark.parametrize("options", batch_runner.COMPILER_OPTIONS.values(), ids=batch_runner.COMPILER_OPTIONS)
def test_other_platforms_compiler_options_are_still_known(options):
    """XLA refuses unknown options, and every platform's XLA knows all options."""
    add = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), np.float32))
    np.testing.assert_array_equal(add.compile(compiler_options=options)(np.zeros(3, np.float32)), 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        add.compile(compiler_options={"xla_gpu_no_such_option": 1})

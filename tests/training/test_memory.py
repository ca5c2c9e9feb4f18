"""The fewest chunks of gradient caching that fit into memory."""

import jax
import jax.numpy as jnp
import pytest
import tiny_run
from flax import nnx

from jaxir.errors import UserError
from jaxir.objectives.contrastive import Contrastive
from jaxir.training.memory import HEADROOM, device_memory, fit_chunks, memory_of

ROWS = 64


@pytest.fixture(scope="module")
def compile_step():
    model = tiny_run.bert(num_layers=1)
    graph, state = nnx.split(model)
    ids = jnp.ones([ROWS, tiny_run.LENGTH], jnp.int32)
    batch = {"query_ids": ids, "passage_ids": ids}
    done = {}

    def compile_step(objective):
        if objective.chunks not in done:
            gradient = jax.grad(lambda state: objective(nnx.merge(graph, state), batch)[0])
            done[objective.chunks] = jax.jit(gradient).lower(state).compile()
        return done[objective.chunks]

    compile_step.done = done
    return compile_step


@pytest.mark.slow
def test_takes_the_fewest_chunks_that_fit(compile_step):
    sizes = {n: memory_of(compile_step(Contrastive(chunks=n))) for n in (1, 2, 4, 8, 16)}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert sizes[16] < sizes[1] / 2
    for wanted, size in sizes.items():
        limit = int(size / HEADROOM) + 1
        objective, compiled, note = fit_chunks(
            Contrastive(chunks="auto"), compile_step, rows=ROWS, limit=limit
        )
        assert objective == Contrastive(chunks=wanted)
        assert compiled is compile_step(objective)
        assert note.startswith(f"{wanted} chunks: ")


def test_a_step_that_never_fits_costs_a_sentence(compile_step):
    with pytest.raises(UserError, match=r"does not fit into 0\.0 GiB even with one example a chunk"):
        fit_chunks(Contrastive(chunks="auto"), compile_step, rows=ROWS, limit=10_000)


@pytest.mark.slow
def test_what_cannot_fit_is_not_compiled(compile_step):
    sizes = {n: memory_of(compile_step(Contrastive(chunks=n))) for n in (1, 16)}
    tried = []

    def counting(objective):
        tried.append(objective.chunks)
        return compile_step(objective)

    fit_chunks(Contrastive(chunks="auto"), counting, rows=ROWS, limit=int(sizes[16] / HEADROOM) + 1)
    first = next(n for n in (2, 4, 8, 16) if sizes[1] <= sizes[16] * n)
    assert tried[:2] == [1, first]


def test_some_memory_is_left_and_what_cannot_fit_is_left_out():
    def chosen(rows, sizes):
        tried = []

        def compile_step(objective):
            tried.append(objective.chunks)
            return objective.chunks

        how = {"rows": rows, "limit": 1000, "size_of": sizes.get}
        try:
            return fit_chunks(Contrastive(chunks="auto"), compile_step, **how)[1], tried
        except UserError:
            return None, tried

    assert chosen(8, {1: 919}) == (1, [1])
    assert chosen(8, {1: 930, 2: 600}) == (2, [1, 2])  # 8 % are for what lies between arrays
    # Of 16 chunks none holds less than a sixteenth.
    assert chosen(16, {1: 10_000, 16: 900}) == (16, [1, 16])
    assert chosen(8, {1: 10_000}) == (None, [1])


def test_what_is_written_in_place_counts_once():
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    twice, once = (
        memory_of(jax.jit(lambda x: x + 1.0, donate_argnums=donated).lower(x).compile())
        for donated in ((), 0)
    )
    assert twice - once == 4 << 20


def test_the_loop_chooses(tmp_path, capsys):
    free = device_memory()
    assert 2**20 < free < 2**50
    result = tiny_run.run(tmp_path / "auto", steps=4, objective=Contrastive(chunks="auto"))
    assert result.step == 4
    assert "1 chunks: 0.0 of" in capsys.readouterr().err

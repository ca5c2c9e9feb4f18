"""The choice of the fewest chunks of gradient caching, and the least recomputation, that fit into memory."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.objectives.contrastive import Contrastive
from jaxir.training import loop
from jaxir.training.step.memory import HEADROOM, device_memory, fit_memory, memory_of
from tests.training import tiny_run

ROWS = 64


@pytest.fixture(scope="module")
def compile_step():
    model = tiny_run.bert(num_layers=1)
    graph, state = nnx.split(model)
    ids = jnp.ones([ROWS, tiny_run.LENGTH], jnp.int32)
    batch = {"query_ids": ids, "passage_ids": ids}
    done = {}

    def compile_step(remat, objective):
        if objective.chunks not in done:
            gradient = jax.grad(lambda state: objective(nnx.merge(graph, state), batch)[0])
            done[objective.chunks] = jax.jit(gradient).lower(state).compile()
        return done[objective.chunks]

    return compile_step


@pytest.mark.slow
def test_takes_the_fewest_chunks_that_fit(compile_step):
    sizes = {n: memory_of(compile_step(False, Contrastive(chunks=n))) for n in (1, 2, 4, 8, 16)}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert sizes[16] < sizes[1] / 2
    for wanted, size in sizes.items():
        limit = int(size / HEADROOM) + 1
        how = {"rows": ROWS, "limit": limit}
        _, objective, compiled, note = fit_memory(False, Contrastive(chunks="auto"), compile_step, **how)
        assert objective == Contrastive(chunks=wanted)
        assert compiled is compile_step(False, objective)
        assert note.startswith(f"{wanted} chunks: ")


def test_step_that_never_fits_is_refused(compile_step):
    with pytest.raises(UserError, match=r"into 0\.0 GiB per device even with one example per chunk"):
        fit_memory(False, Contrastive(chunks="auto"), compile_step, rows=ROWS, limit=10_000)


def test_headroom_is_kept_and_impossible_chunks_are_not_compiled():
    def chosen(rows, sizes):
        tried = []

        def compile_step(remat, objective):
            tried.append(objective.chunks)
            return objective.chunks

        how = {"rows": rows, "limit": 1000, "size_of": sizes.get}
        try:
            return fit_memory(False, Contrastive(chunks="auto"), compile_step, **how)[2], tried
        except UserError:
            return None, tried

    assert chosen(8, {1: 919}) == (1, [1])
    # 930 of 1,000 is too much: 8 % stay free for gaps between arrays.
    assert chosen(8, {1: 930, 2: 600}) == (2, [1, 2])
    # With n chunks, a step needs at least 1/n of 10,000: fewer than 16 cannot fit, so they are not tried.
    assert chosen(16, {1: 10_000, 16: 900}) == (16, [1, 16])
    assert chosen(8, {1: 10_000}) == (None, [1])


def test_fewest_chunks_come_first_and_then_the_quickest_to_recompute():
    def chosen(chunks, *sizes, **how):
        def compile_step(remat, objective):
            tried.append(remat)
            policies = [False, *["weights"] * how.get("gathers", False), "products", True]
            return sizes[policies.index(remat)] / objective.chunks

        tried = []
        how |= {"rows": 8, "limit": 1000, "size_of": lambda size: size}
        remat, objective, _, note = fit_memory("auto", Contrastive(chunks=chunks), compile_step, **how)
        return remat, objective.chunks, note.partition(":")[0], len(tried)

    assert chosen(1, 8000, 3000, 900) == (True, 1, "remat=True", 3)
    assert chosen(2, 8000, 1800, 900) == ("products", 2, "remat=products", 2)
    assert chosen("auto", 8000, 3000, 900) == (True, 1, "1 chunks, remat=True", 3)
    # Steps of 8,000 and 3,000 cannot fit in two chunks, so they are not compiled.
    assert chosen("auto", 8000, 3000, 1500) == (True, 2, "2 chunks, remat=True", 4)
    # If times are known, the quickest that fits is chosen.
    seconds = {900: 3.0, 800: 2.0, 700: 2.5}.get
    assert chosen(1, 900, 800, 700, seconds_of=seconds) == ("products", 1, "remat=products", 3)
    assert chosen(1, 950, 800, 700, seconds_of=seconds) == ("products", 1, "remat=products", 3)
    assert chosen(1, 950, 930, 700, seconds_of=seconds) == (True, 1, "remat=True", 3)
    # For scanned blocks, keeping everything is not assumed to be the quickest; known times decide.
    assert chosen(1, 900, 800, 700, scanned=True) == ("products", 1, "remat=products", 1)
    assert chosen(1, 900, 930, 700, scanned=True) == (True, 1, "remat=True", 2)
    assert chosen("auto", 8000, 3000, 1500, scanned=True) == (True, 2, "2 chunks, remat=True", 3)
    assert chosen(1, 900, 800, 700, scanned=True, seconds_of={900: 1.0, 800: 2.0, 700: 2.5}.get)[0] is False
    # Weights that devices gather from each other may be kept.
    assert chosen(1, 8000, 910, 850, 700, gathers=True) == ("weights", 1, "remat=weights", 2)
    with pytest.raises(UserError, match=r"even with remat=True: split .* \(fsdp\), or set chunks$"):
        chosen(1, 8000, 3000, 2000)
    with pytest.raises(UserError, match=r"with one example per chunk and remat=True: split .* \(fsdp\)$"):
        chosen("auto", 10_000, 10_000, 10_000)


def test_donated_buffers_count_once():
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    steps = (jax.jit(lambda x: x + 1.0, donate_argnums=donated) for donated in ((), 0))
    twice, once = (memory_of(step.lower(x).compile()) for step in steps)
    assert twice - once == 4 << 20


@pytest.mark.slow
def test_the_loop_chooses(tmp_path, capsys):
    free = device_memory()
    assert 2**20 < free < 2**50
    result = tiny_run.run(tmp_path / "auto", steps=4, objective=Contrastive(chunks="auto"))
    assert result.step == 4
    assert "1 chunks: 0.0 of" in capsys.readouterr().err


@pytest.mark.slow
def test_the_loop_chooses_what_is_recomputed(tmp_path, capsys, monkeypatch):
    """A resumed run chooses again, because its settings record "auto", not the choice."""
    model = {"num_layers": 1, "scan_layers": True, "remat": "auto"}

    def run(*sizes, **how):
        left = list(sizes)
        monkeypatch.setattr(loop, "device_memory", lambda: 1000)
        monkeypatch.setattr(loop, "fit_memory", functools.partial(fit_memory, size_of=lambda _: left.pop(0)))
        settings = {"steps": 12, "dev": None, "model": tiny_run.bert(**model)}
        result = tiny_run.run(tmp_path / "run", **settings | how)
        assert not left
        return result

    with pytest.raises(UserError, match=r"does not fit into .* even with remat=True: split"):
        run(2000, 2000, 2000, 2000)  # with FSDP, four levels are tried: weights may be kept, too
    sent = tiny_run.Hooked(tiny_run.pairs(64), lambda step: step == 8 and os.kill(os.getpid(), 15))
    assert run(2000, 900, data=sent).stopped_by == 15
    assert "remat=products: " in capsys.readouterr().err
    with pytest.raises(UserError, match="was trained with model="):
        run(model=tiny_run.bert(**model | {"remat": "products"}))
    assert run(2000, 2000, 900).step == 12
    assert "remat=True: " in capsys.readouterr().err

"""Training a reader: its loss by hand, chunks, dropout, and answers in chunks."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.features import TextFormat
from jaxir.interop import model_dir
from jaxir.models import layers
from jaxir.models.decoding import Decoding
from jaxir.objectives.reader import FusionInDecoder
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.evaluators.evaluation_context import Bench
from jaxir.training.step.optimizers import AdamW
from jaxir.training.step.train_state import initial_state, plan_state

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "seq2seq_1_0"


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "reader.npz"))


@pytest.fixture(scope="module")
def model():
    """A model with dropout, which is on only with a key."""
    read = model_dir.load(f"hf:{GOLDEN}", kind="seq2seq").model
    backbone = dataclasses.replace(read.config.backbone, dropout_rate=0.2)
    made = dataclasses.replace(read.config, backbone=backbone).make(rngs=nnx.Rngs(0))
    nnx.update(made, nnx.state(read, nnx.Param))
    return made


@pytest.fixture(scope="module")
def loss_of(model, golden):
    graph = nnx.graphdef(model)
    batch = {name: jnp.asarray(golden[name]) for name in ("source_ids", "target_ids")}

    def of(state, chunks, key=None):
        return FusionInDecoder(passages=3, chunks=chunks)(nnx.merge(graph, state), batch, key)[0]

    return of


@pytest.fixture(scope="module")
def step(model, loss_of):
    """Returns loss and gradients by number of chunks, each computed once."""
    gradient = jax.jit(jax.value_and_grad(loss_of), static_argnums=1)
    return functools.cache(lambda chunks: gradient(nnx.state(model), chunks))


def test_the_loss_is_the_mean_cross_entropy_of_all_tokens_of_transformers_logits(step, golden):
    target, logits = golden["target_ids"], golden["logits"].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    right = np.take_along_axis(probabilities, target[..., None], -1)[..., 0]
    assert len(set((target != 0).sum(1))) > 1, "equal lengths would not show a mean over questions"
    loss, _ = step(1)
    np.testing.assert_allclose(loss, -np.log(right[target != 0]).mean(), rtol=1e-5)


@pytest.mark.slow
def test_chunks_change_nothing_and_dropout_does(step, model, loss_of):
    loss, gradients = step(1)
    again, chunked = step(2)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    sizes = []
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(chunked), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
        sizes.append(float(jnp.abs(one).max()))
    assert min(sizes) > 0, "nothing is left untrained"
    dropped = jax.jit(loss_of, static_argnums=1)
    losses = {float(dropped(nnx.state(model), 1, jax.random.key(seed))) for seed in (0, 1)} | {float(loss)}
    assert len(losses) == 3 and max(losses) - min(losses) > 1e-3


class Echo(nnx.Module):
    """Writes its input, and records the shapes of its inputs."""

    config = SimpleNamespace(eos_id=1)
    read: tuple[list[tuple[int, ...]]] = ([],)

    def __init__(self):
        self.weight = layers.param(jnp.zeros([8]), "mlp")

    def generate(self, ids, how):
        self.read[0].append(ids.shape)
        return ids[:, :1]


@pytest.mark.parametrize(("chunks", "devices", "rows"), [(1, 1, 8), (4, 1, 2), (4, 4, 4)])
def test_answers_are_written_for_one_chunk_of_questions_at_a_time(chunks, devices, rows):
    bench = Bench(
        tokenizer=SimpleNamespace(decode=lambda ids: " ".join(str(number) for number in ids)),
        form=TextFormat(4, 6),
        objective=FusionInDecoder(chunks="auto"),
        training_data=None,
        batch_size=8,
        partitioner=MeshConfig().build(jax.devices()[:devices]),
    )
    ids = np.arange(2, 2 + 11 * 2 * 3, dtype=np.int32).reshape(11, 2, 3)
    write = bench.texts(ids, Decoding(max_new_tokens=3))
    bench.objective = dataclasses.replace(bench.objective, chunks=chunks)  # what the training loop does
    model, transform = Echo(), AdamW().build(1).transform
    plan = plan_state(model, transform, bench.partitioner)
    model.read[0].clear()
    bench.compile(plan)
    assert model.read[0] == [(rows, 2, 3)]
    expected = [" ".join(str(number) for number in passages[0]) for passages in ids]
    assert write(initial_state(model, transform, plan)) == expected

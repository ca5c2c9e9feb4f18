"""Dev evaluation against the same numbers computed plainly."""

import itertools
import threading

import jax
import numpy as np
import pytest
from tiny_run import Bag, pairs

from jaxir.errors import UserError
from jaxir.objectives.contrastive import Contrastive
from jaxir.partitioning import MeshConfig
from jaxir.training.dev import DevEvaluation
from jaxir.training.optimizers import AdamW
from jaxir.training.prefetch import prefetch
from jaxir.training.state import initial_state, plan_state


def evaluation(dev, *, distractors=0, batch_size=8, devices=4):
    model = Bag(dropout_rate=0.9)
    partitioner = MeshConfig().build(jax.devices()[:devices])
    transform = AdamW().build(1).transform
    plan = plan_state(model, transform, partitioner)
    evaluate = DevEvaluation(
        dev,
        plan=plan,
        objective=Contrastive(),
        partitioner=partitioner,
        batch_size=batch_size,
        training_pairs=pairs(40, seed=9),
        distractors=distractors,
    )
    return model, evaluate(initial_state(model, transform, plan))


@pytest.mark.parametrize("distractors", [0, 40])
def test_retrieval_metrics_count_every_pair_and_every_distractor(distractors):
    dev = pairs(21, seed=25)
    model, scores = evaluation(dev, distractors=distractors)
    rows = [dict(b) for b, _ in zip(dev.ordered(1), range(21), strict=True)]
    extra = [b["passage_ids"] for b, _ in zip(pairs(40, seed=9).ordered(1), range(distractors), strict=False)]
    query = np.asarray(model.encode(jax.numpy.concatenate([r["query_ids"] for r in rows]), tower="query"))
    passages = [r["passage_ids"] for r in rows] + extra
    passage = np.asarray(model.encode(jax.numpy.concatenate(passages), tower="passage"))
    similarity = query @ passage.T
    ranks = 1 + (similarity > np.diag(similarity)[:, None]).sum(1)
    assert ranks.mean() > 2 and {10, 11} <= {*np.minimum(ranks, 11)} and len(passage) == 21 + distractors
    assert scores["RR@10"] == pytest.approx(np.where(ranks <= 10, 1 / ranks, 0).mean(), abs=1e-6)
    assert scores["nDCG@10"] == pytest.approx(
        np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean(), abs=1e-6
    )


@pytest.mark.parametrize("count", [16, 21])
def test_loss_and_accuracy_are_means_over_full_batches_without_dropout(count):
    dev = pairs(count, seed=1)
    model, scores = evaluation(dev)
    batches = dev.batches(batch_size=1, seed=0)
    rows = [next(batches) for _ in range(count)]
    found = []
    for at in (0, 8):
        batch = {k: jax.numpy.concatenate([r[k] for r in rows[at : at + 8]]) for k in rows[0]}
        loss, metrics = Contrastive()(model, batch, None)
        found.append((float(loss), float(metrics["accuracy"])))
    assert (scores["loss"], scores["accuracy"]) == pytest.approx(np.mean(found, axis=0), rel=1e-5)
    assert found[0] != found[1]


def test_fewer_pairs_than_a_batch_are_one_smaller_batch():
    _, scores = evaluation(pairs(7, seed=1), batch_size=512)
    _, one_device = evaluation(pairs(7, seed=1), batch_size=4, devices=1)
    assert scores["loss"] == pytest.approx(one_device["loss"], rel=1e-5)


def test_texts_that_are_all_one_to_the_model_are_refused():
    dev = pairs(21, seed=1)
    queries = dev._tables["queries"]
    dev._tables["queries"] = queries._replace(flat=np.ones_like(queries.flat))
    with pytest.raises(UserError, match="all 21 texts of the dev pairs' query tower have the same tokens"):
        evaluation(dev)


def test_prefetch_keeps_order_passes_errors_on_and_ends_its_thread():
    def numbers():
        yield from range(5)
        raise ValueError("the sixth")

    with prefetch(numbers(), lambda x: 10 * x) as batches:
        assert [next(batches) for _ in range(5)] == [0, 10, 20, 30, 40]
        with pytest.raises(ValueError, match="the sixth"):
            next(batches)
    with prefetch(itertools.count(), lambda x: x) as batches:
        assert next(batches) == 0
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]

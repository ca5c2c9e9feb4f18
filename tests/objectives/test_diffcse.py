"""DiffCSE: its equations in numpy, the edits of tokens, the authors' code, and initial weights."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop.build import PretrainedPooler
from jaxir.models.dual_encoder import Projection
from jaxir.objectives import token_edits
from jaxir.objectives.diffcse import DiffCSE
from jaxir.objectives.masking import mask_as_bert, most_chosen
from jaxir.objectives.simcse import SimCSE
from jaxir.objectives.weighted_sum import WeightedSum
from tests.objectives.tiny_diffcse import WithoutDropout, diffcse, with_next
from tests.objectives.unlabelled import (
    CLS,
    MASK,
    SEP,
    WORDS,
    batch_of,
    gradients_of,
    made,
    make_model,
    make_texts,
)


def numpy_projector(projector, x):
    """Returns appendix A.1's projection of float64 vectors [B, D]."""
    kernels = [np.asarray(layer.kernel[...], np.float64) for layer in (projector.inner, projector.outer)]
    hidden = x @ kernels[0]
    hidden = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)
    norm = projector.inner_norm
    hidden = np.maximum(hidden * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...]), 0)
    out = hidden @ kernels[1]
    return (out - out.mean(0)) / np.sqrt(out.var(0) + 1e-5)


@nnx.jit
def encoded(model, ids):
    return model.unnormalized().encode(ids, tower="passage")


def vectors_of(model, ids):
    return np.asarray(encoded(model, ids), np.float64)


def contrast(one, other, temperature=0.05, negatives=None):
    one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
    logits = one @ other.T / temperature
    if negatives is not None:
        negatives = negatives / np.linalg.norm(negatives, axis=1, keepdims=True)
        logits = np.concatenate([logits, one @ negatives.T / temperature], axis=1)
    return np.mean(np.log(np.exp(logits).sum(1)) - np.diag(logits[:, : len(one)]))


@nnx.jit
def written(auxiliary, ids):
    """Returns the generator's logits [B, L, V]."""
    return auxiliary.generator(ids)


@nnx.jit
def discriminated(auxiliary, read, vectors):
    """Returns the discriminator's verdicts [B, L] and logits [B, L, V]; a missing head's are None."""

    def first(x):
        return x.at[:, 0].set(vectors.astype(x.dtype))

    discriminator = auxiliary.discriminator
    hidden = discriminator.encoder(read, edit=first)
    verdict = None if discriminator.verdict is None else discriminator.verdict(hidden)[..., 0]
    if discriminator.head is None:
        return verdict, None
    table = discriminator.encoder.token_table.embedding[...]
    return verdict, discriminator.head(hidden) @ table.T + discriminator.head.bias[...][None, None]


def judged(auxiliary, read, vectors):
    """Returns log D and log (1 - D) [B, L], and log p [B, L, V] of tokens; a missing head's are None."""
    z, logits = (
        None if x is None else np.asarray(x, np.float64) for x in discriminated(auxiliary, read, vectors)
    )
    log_p = None if logits is None else logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return *((None, None) if z is None else (-np.log1p(np.exp(-z)), -np.log1p(np.exp(z)))), log_p


@pytest.mark.parametrize("task", ["replaced", "mlm", "corrective"])
def test_the_loss_is_equation_2_3(task):
    """Without a key there is no dropout, and the masks are the constant ones of evaluation."""
    model, ids = make_model(), make_texts()
    objective = diffcse(task=task, weight=0.7)
    auxiliary = made(objective, model)
    batch = batch_of(ids)
    loss, metrics = nnx.jit(objective)(model, batch, auxiliary=auxiliary)
    placing = jax.random.split(jax.random.split(jax.random.key(0), 1)[0])[0]
    chosen = np.asarray(token_edits.choose_tokens(ids, placing, share=0.3))
    norms = auxiliary.projector  # in evaluation, its BatchNorm uses running averages, still 0 and 1
    kernels = [np.asarray(layer.kernel[...], np.float64) for layer in (norms.inner, norms.outer)]
    scale = np.sqrt(1 + 1e-5)
    h = np.maximum(vectors_of(model, ids) @ kernels[0] / scale, 0) @ kernels[1] / scale
    texts = np.asarray(ids)
    read = np.where(chosen, MASK, texts)
    if task != "mlm":
        logits = np.array(written(auxiliary, read))
        logits[..., 0] = -np.inf
        read = np.where(chosen, logits.argmax(-1), texts)
    log_same, log_other, log_p = judged(auxiliary, read, h.astype(np.float32))
    total = 0.0
    for i, row in enumerate(texts):
        for t in range(1, (row != 0).sum()):
            same = read[i, t] == row[t]
            if task == "replaced":
                total -= (log_same if same else log_other)[i, t]
            elif task == "mlm":
                total -= log_p[i, t, row[t]] * chosen[i, t]
            else:
                p = np.exp(log_p[i, t, row[t]])
                total -= np.log(same * np.exp(log_same[i, t]) + np.exp(log_other[i, t]) * p)
    replaced = (read != texts).sum()
    assert task == "mlm" or replaced > len(ids)
    np.testing.assert_allclose(metrics["difference_loss"], total / len(ids), rtol=1e-4)
    np.testing.assert_allclose(metrics["contrastive_loss"], contrast(h, h), rtol=1e-4)
    total = metrics["contrastive_loss"] + 0.7 * metrics["difference_loss"]
    np.testing.assert_allclose(loss, total, rtol=1e-6)
    assert 0 <= metrics["difference_accuracy"] < 1
    if task != "mlm":
        places = (texts != 0).sum() - len(ids)
        np.testing.assert_allclose(metrics["changed_tokens"], replaced / places, rtol=1e-5)


def test_the_projector_uses_and_averages_the_batchs_statistics_in_training():
    model, ids = make_model(dropout=0.0), make_texts()
    objective = diffcse(weight=0.0, contrastive=WithoutDropout())
    auxiliary = made(objective, model)
    loss, _ = objective(model, batch_of(ids), jax.random.key(0), auxiliary=auxiliary)
    h = vectors_of(model, ids)
    projected = numpy_projector(auxiliary.projector, np.concatenate([h, h]))[: len(ids)]
    # Logits are up to 20, where float32 has steps of 2e-6.
    np.testing.assert_allclose(loss, contrast(projected, projected), rtol=1e-4, atol=1e-5)
    inner = h @ np.asarray(auxiliary.projector.inner.kernel[...], np.float64)
    np.testing.assert_allclose(auxiliary.projector.inner_norm.mean[...], 0.1 * inner.mean(0), atol=1e-6)
    np.testing.assert_allclose(auxiliary.projector.inner_norm.var[...], 0.9 + 0.1 * inner.var(0), rtol=1e-5)
    kept = np.asarray(auxiliary.projector.inner_norm.mean[...])
    objective(model, batch_of(ids), auxiliary=auxiliary)
    assert (auxiliary.projector.inner_norm.mean[...] == kept).all()


@pytest.mark.parametrize("use", ["positive", "negative"])
def test_changed_texts_as_positives_and_negatives(use):
    """Section 2.8: a positive adds a term to the loss, a negative adds a column to its denominator."""
    model, ids = make_model(), make_texts()
    objective = diffcse(use=use, change="delete", masking=0.15, projector="none")
    auxiliary = made(objective, model)
    loss, _ = objective(model, batch_of(ids), auxiliary=auxiliary)
    own = jax.random.split(jax.random.split(jax.random.key(0), 1)[0])[0]
    changed = vectors_of(model, token_edits.delete_tokens(ids, own, share=0.15).ids)
    h = vectors_of(model, ids)
    added, column = contrast(h, h) + contrast(h, changed), contrast(h, h, negatives=changed)
    np.testing.assert_allclose(loss, added if use == "positive" else column, rtol=1e-4)
    assert auxiliary.discriminator is auxiliary.generator is None


def test_the_generator_makes_logits_of_masked_tokens_alone():
    model, ids, key = make_model(), make_texts(), jax.random.key(0)
    for objective, places in (
        (diffcse(), most_chosen(12, 0.3)),
        (diffcse(change="insert"), token_edits.most_inserted(12, 0.3)),
        (diffcse(follow="code"), 12),
    ):
        graph, state = nnx.split((model, made(objective, model)))

        def loss(state, key, graph=graph, objective=objective):
            model, auxiliary = nnx.merge(graph, state)
            return objective(model, batch_of(ids), key, auxiliary=auxiliary)[0]

        text = str(jax.make_jaxpr(loss)(state, key))
        assert set(re.findall(rf"f32\[8,(\d+),{WORDS}\]", text)) == {str(places)}


def test_follow_code_reproduces_the_authors_code():
    """There, G replaces every token and has dropout, padding counts, and views have texts of their own."""
    model, ids = make_model(dropout=0.0), make_texts()
    objective = diffcse(follow="code", projector="none", contrastive=WithoutDropout(), weight=1.0)
    auxiliary = made(objective, model)
    batch = batch_of(ids)
    _, metrics = objective(model, batch, auxiliary=auxiliary)
    total, size = 0.0, 0
    h = vectors_of(model, ids)
    for own in jax.random.split(jax.random.key(0), 2):
        placing, replacing = jax.random.split(own)
        chosen = token_edits.choose_tokens(ids, placing, share=0.3)
        masked = mask_as_bert(ids, chosen, replacing, mask_id=MASK, vocab_size=WORDS)
        logits = np.array(written(auxiliary, masked))
        logits[..., 0] = -np.inf
        read = np.where(np.asarray(ids) != 0, logits.argmax(-1), 0)
        read[:, 0] = CLS
        unmasked = (read != np.asarray(ids)) & ~np.asarray(chosen) & (np.asarray(ids) != 0)
        assert unmasked.any()
        log_same, log_other, _ = judged(auxiliary, read, h.astype(np.float32))
        total -= np.where(read == np.asarray(ids), log_same, log_other).sum()
        size += read.size
    np.testing.assert_allclose(metrics["difference_loss"], total / size, rtol=1e-4)
    for follow in ("paper", "code"):  # only the code's generator depends on the key of dropout
        objective = dataclasses.replace(objective, follow=follow)
        change = objective._changed(ids, jax.random.key(3), "replace", auxiliary)
        one, other = (objective._filled(change, auxiliary, jax.random.key(n)) for n in (1, 2))
        assert bool((one != other).any()) == (follow == "code")


def test_a_text_without_a_next_one_costs_nothing():
    model, ids = make_model(), make_texts()
    objective = diffcse(texts="next", weight=1.0, projector="none")
    auxiliary, batch = made(objective, model), with_next(ids)
    some = objective(model, batch, auxiliary=auxiliary)[1]["difference_loss"]
    none = dict(batch, next_ids=jnp.broadcast_to(batch["next_ids"][-1:], ids.shape))
    assert some > 1 and objective(model, none, auxiliary=auxiliary)[1]["difference_loss"] == 0.0


def test_the_losses_of_both_texts_are_added():
    model, batch = make_model(), with_next(make_texts())
    both = diffcse(texts="both", change="delete")
    auxiliary = made(both, model)
    total, same, following = (
        dataclasses.replace(both, texts=t)(model, batch, auxiliary=auxiliary)[1]["difference_loss"]
        for t in ("both", "same", "next")
    )
    # The changed places are drawn anew in each of these runs, so the sums agree only approximately.
    assert total == pytest.approx(float(same + following), rel=0.1)


def test_weight_0_without_a_projector_is_simcse():
    model, batch, key = make_model(), batch_of(make_texts()), jax.random.key(3)
    bare = DiffCSE(weight=0.0, projector="none")
    assert made(bare, model) is None and bare.frozen == ()
    assert WeightedSum(parts={"a": bare, "b": diffcse()}).frozen == ("auxiliary.b.generator.*",)
    encoding = jax.random.split(key, 3)[0]
    expected = SimCSE()(model, batch, encoding)[0]
    np.testing.assert_allclose(bare(model, batch, key, auxiliary=None)[0], expected, rtol=1e-5)
    under = made(DiffCSE(weight=0.0), model)
    assert under.projector is not None and under.generator is under.discriminator is None


def test_the_discriminator_starts_as_a_copy_of_the_encoder():
    model = make_model()
    auxiliary = made(diffcse(), model)
    own, others = (jax.tree.leaves(nnx.state(m)) for m in (auxiliary.discriminator.encoder, model.encoder))
    assert all(map(np.array_equal, own, others))
    places = [{x.unsafe_buffer_pointer() for x in leaves} for leaves in (own, others)]
    assert places[0].isdisjoint(places[1])


def test_a_pooler_starts_from_a_folder(tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    kernel, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 32), (32,)))
    tensors = {"bert.pooler.dense.weight": kernel.T.copy(), "bert.pooler.dense.bias": bias}
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    save_file(tensors, tmp_path / "model.safetensors")
    source = PretrainedPooler(source=f"hf:{tmp_path}")
    objective = diffcse(projector="tanh", pooler=source, weight=0.0)
    projector = made(objective, make_model()).projector
    x = rng.standard_normal((5, 32)).astype(np.float32)
    np.testing.assert_allclose(
        projector(jnp.asarray(x), training=True), np.tanh(x @ kernel + bias), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(UserError, match="is for vectors of 32 numbers, but the encoder's vectors have 8"):
        made(objective, make_model(projection=Projection(dimension=8)))
    with pytest.raises(UserError, match='a pooler initialises projector "tanh"'):
        diffcse(pooler=source)
    save_file({"bert.pooler.dense.bias": bias}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="among its weights: it has no pooler"):
        made(objective, make_model())
    with pytest.raises(UserError, match="st:x: a pooler must be given as hf:NAME or hf:DIRECTORY"):
        made(diffcse(projector="tanh", pooler=PretrainedPooler(source="st:x"), weight=0.0), make_model())


def test_the_discriminator_alone_reaches_the_encoder_through_the_vector():
    model, batch, key = make_model(dropout=0.0), batch_of(make_texts()), jax.random.key(2)
    # The weight is so small that a gradient from another path would exceed the bound below, 1e-15.
    objective = diffcse(contrastive=WithoutDropout(), contrastive_weight=0.0, weight=1e-20)
    auxiliary = made(objective, model)
    _, reached = gradients_of("model", objective, model, auxiliary, batch, key)
    assert all(0 < np.abs(g).max() < 1e-15 for n, g in reached.items() if "key.bias" not in n)
    assert np.abs(reached["encoder.embeddings.token.embedding"]).max() > 1e-25


ONE = jnp.asarray(
    [[CLS, 10, 11, 12, 13, SEP, 0, 0], [CLS, 20, SEP, 0, 0, 0, 0, 0], [CLS, SEP, 0, 0, 0, 0, 0, 0]], jnp.int32
)


def test_masks_are_inserted_among_the_words():
    texts = jnp.asarray([[CLS, *range(4, 24), SEP, 0, 0]] * 500, jnp.int32)
    insert = jax.jit(functools.partial(token_edits.insert_masks, share=0.15, mask_id=MASK))
    found = insert(texts, jax.random.key(0))
    assert found.ids.shape[1] == 24 + token_edits.most_inserted(24, 0.15)
    assert found.ids.shape[1] == token_edits.longest(24, ("insert",), 0.15)
    masked = np.asarray(found.masked)
    assert (masked.sum(1) == 3).all()  # three are 15 % of 20 words
    where = set()
    for ids, new, original in zip(*map(np.asarray, (found.ids, found.masked, found.original)), strict=True):
        assert (ids[new] == MASK).all() and (original[new] == token_edits.NEW).all()
        left = ids[~new]
        assert list(left[:22]) == list(texts[0, :22]) and not left[22:].any()
        assert (original[~new] == left).all()
        where |= set(np.flatnonzero(new))
    assert where == set(range(1, 24))  # no mask before the first token or after the last
    few = insert(ONE, jax.random.key(1))
    assert few.masked.sum(1).tolist() == [1, 1, 0] and few.ids[2].tolist() == [CLS, SEP] + [0] * 7


def test_the_token_after_a_deleted_one_is_marked(monkeypatch):
    chosen = jnp.asarray([[0, 1, 0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0] * 8], bool)
    monkeypatch.setattr(token_edits, "choose_tokens", lambda ids, key, *, share: chosen)
    found = token_edits.delete_tokens(ONE, jax.random.key(0), share=0.15)
    assert found.ids[0].tolist() == [CLS, 11, SEP, 0, 0, 0, 0, 0]
    assert found.original[0].tolist() == [CLS, token_edits.NEW, token_edits.NEW, 0, 0, 0, 0, 0]
    assert found.ids[1].tolist()[:3] == [CLS, SEP, 0] and found.original[1, 1] == token_edits.NEW
    assert (found.original[2] == found.ids[2]).all() and not found.masked.any()


@pytest.mark.parametrize(("share", "kind"), [(0.15, "replace"), (0.3, "replace"), (0.3, "delete")])
def test_the_share_of_the_words_that_changes(share, kind):
    texts = jnp.asarray([[CLS, *range(4, 34), SEP]] * 300, jnp.int32)
    found = token_edits.make_change(texts, jax.random.key(0), kind=kind, share=share, mask_id=MASK)
    left = (np.asarray(found.ids) > SEP).sum() / (300 * 30)
    assert left == pytest.approx(1 - share, abs=0.01)

"""A tiny encoder, texts and pairs for objectives, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.features import TextFormat, TokenCounts
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel
from jaxir.runtime.partitioning import MeshConfig

CLS, SEP, MASK, FIRST_WORD, WORDS = 2, 3, 1, 4, 40
FORM = TextFormat(12, 12, mask_id=MASK, vocabulary="words")


NOT_TRAINED = ("p", "kept", "mu", "idf", "mean", "var")


def make_model(*, dropout: float = 0.1, **settings) -> DualEncoderModel:
    backbone = BertConfig(
        vocab_size=WORDS,
        embed_dim=32,
        num_layers=1,
        num_heads=2,
        mlp_dim=32,
        max_positions=16,
        dropout_rate=dropout,
        attention_dropout_rate=0.0,
    )
    return DualEncoderModel(DualEncoderConfig(backbone=backbone, **settings), rngs=nnx.Rngs(0))


def make_texts(rows: int = 8, length: int = 12, seed: int = 0) -> jax.Array:
    """Returns ids of texts of different lengths: [CLS] is 2, [SEP] 3, padding 0, and words begin at 4."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(FIRST_WORD, WORDS, (rows, length)).astype(np.int32)
    ids[:, 0] = CLS
    for row, count in enumerate(rng.integers(4, length + 1, rows)):
        ids[row, count - 1], ids[row, count:] = SEP, 0
    return jnp.asarray(ids)


def batch_of(ids: jax.Array) -> dict[str, jax.Array]:
    """A batch whose texts are all different."""
    rows = jnp.arange(len(ids), dtype=jnp.int32)
    return {"text_ids": ids, "text_key": jnp.stack([rows, rows], axis=1)}


def batch_of_pairs(rows: int, length: int = 12) -> dict[str, jax.Array]:
    """Pairs with two hard negatives. Two passages are equal; one is a hard negative of another pair."""
    rng = np.random.default_rng(0)
    ids = {"query_ids": (rows, 4), "passage_ids": (rows, length), "negative_ids": (rows, 2, length)}
    keys = {"query_key": (rows, 2), "passage_key": (rows, 2), "negative_key": (rows, 2, 2)}
    arrays = {k: rng.integers(1, WORDS, shape).astype(np.int32) for k, shape in ids.items()}
    arrays |= {k: rng.integers(0, 2**31, shape).astype(np.int32) for k, shape in keys.items()}
    arrays["passage_key"][5] = arrays["passage_key"][2]
    arrays["negative_key"][1, 0] = arrays["passage_key"][0]
    return {k: jnp.asarray(v) for k, v in arrays.items()}


def made(objective, model, corpus=None, seed=1):
    """Returns the auxiliary of an objective, after it has read the `Corpus`, if one is given."""
    auxiliary = objective.auxiliary(model, form=FORM, rngs=nnx.Rngs(seed))
    if corpus is not None:
        objective.read_corpus(auxiliary, corpus)
    return auxiliary


class Corpus:
    """Training data of these texts; `texts` has the words of each, `sets` the distinct ones."""

    def __init__(self, ids: jax.Array):
        self.texts = [row[row > SEP].tolist() for row in np.asarray(ids)]
        self.sets = [set(text) for text in self.texts]

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        assert field == "text"
        counts = (
            np.array([sum(text.count(word) for text in texts) for word in range(vocab_size)], np.int64)
            for texts in (list(map(list, self.sets)), self.texts)
        )
        return TokenCounts(len(self.texts), *counts)


def value_and_grad(objective, model, auxiliary, batch, key):
    """Returns loss, metrics, and the gradients {name: array} of model and auxiliary."""
    graphs, states = zip(*(nnx.split(m) for m in (model, auxiliary)), strict=True)

    def loss_of(states, batch, key):
        model, auxiliary = (nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
        return objective(model, batch, key, auxiliary=auxiliary)

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(states, batch, key)
    named = [
        {".".join(map(str, path)): np.asarray(g[...]) for path, g in nnx.to_flat_state(tree)}
        for tree in gradients
    ]
    return loss, metrics, *named


def gradients_of(part, objective, model, auxiliary, batch, key):
    """Returns the loss, and the gradients {name: array} of only "model" or "auxiliary": a smaller program."""
    modules = {"model": model, "auxiliary": auxiliary}
    graphs = {name: nnx.graphdef(module) for name, module in modules.items()}
    states = {name: nnx.state(module) for name, module in modules.items()}

    def loss_of(moved, states, batch, key):
        states = states | {part: moved}
        made = {name: nnx.merge(graphs[name], state, copy=True) for name, state in states.items()}
        return objective(made["model"], batch, key, auxiliary=made["auxiliary"])[0]

    loss, slopes = jax.jit(jax.value_and_grad(loss_of))(states[part], states, batch, key)
    return loss, {".".join(map(str, path)): np.asarray(g[...]) for path, g in nnx.to_flat_state(slopes)}


def on_mesh(objective, **axes):
    """The objective, called under the partitioner of a mesh: four devices of data, or these axes."""
    partitioner = MeshConfig(**axes or {"data": 4}).build()

    def called(model, batch, key, *, auxiliary):
        with partitioner():
            return objective(model, batch, key, auxiliary=auxiliary)

    return called


def devices_change_nothing(
    objective, model, auxiliary, batch, key, *, axes=None, least=1e-7, atol=2e-4, rtol=1e-7
):
    """Checks that four devices give one device's loss and gradients; only a generator's gradients are 0.

    Statistics (NOT_TRAINED) and the key's bias in attention may have any gradient. `axes` are the mesh's, by
    default `data` alone; `least`, `atol` and `rtol` are for gradients.
    """
    one = value_and_grad(objective, model, auxiliary, batch, key)
    four = value_and_grad(on_mesh(objective, **axes or {}), model, auxiliary, batch, key)
    np.testing.assert_allclose(four[0], one[0], rtol=1e-5)
    for before, after in zip(one[2:], four[2:], strict=True):
        assert before
        for path, gradient in before.items():
            if path.startswith("generator."):
                assert not gradient.any(), path
            elif "attention.key.bias" not in path and path.split(".")[-1] not in NOT_TRAINED:
                assert np.abs(gradient).max() > least, path
            np.testing.assert_allclose(after[path], gradient, atol=atol, rtol=rtol, err_msg=path)

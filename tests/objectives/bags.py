"""Two bags of words: a dual encoder that compiles quickly."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.models import layers
from jaxir.models.dual_encoder import l2_normalize
from tests.objectives.unlabelled import WORDS

WIDTH = 32
TOWERS = ("query", "passage")


class Bags(nnx.Module):
    """Two tables of word vectors with a shared projection to `width` numbers."""

    def __init__(self, dropout_rate: float, *, seed: int = 0, width: int = WIDTH):
        rngs = nnx.Rngs(seed)
        self.dropout_rate = dropout_rate
        tables = (layers.normal(1.0)(rngs.params(), (WORDS, WIDTH)) for _ in TOWERS)
        self.tables = nnx.Dict(
            {t: layers.param(x, "vocab", "embed") for t, x in zip(TOWERS, tables, strict=True)}
        )
        self.kernel = layers.param(layers.normal(0.2)(rngs.params(), (WIDTH, width)), "embed", "mlp")

    def encode(self, ids, *, tower, key=None):
        x = self.tables[tower][...][ids].mean(1)
        if key is not None:
            x *= jax.random.bernoulli(key, 1 - self.dropout_rate, x.shape).astype(jnp.float32)
        return l2_normalize(jnp.tanh(x) @ self.kernel[...])

    def encode_together(self, texts):
        return [self.encode(ids, tower=tower, key=key) for ids, tower, key in texts]

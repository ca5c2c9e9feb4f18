"""Masked language models: an encoder and a head that predicts tokens (Devlin et al. 2019)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.models import activations, layers, outlines
from jaxir.models.backbones import BackboneConfig, make_encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLMConfig:
    """The components of a masked language model.

    Attributes:
      backbone: the encoder.
      activation: activation of the head's dense layer, a name in `activations.ACTIVATIONS`.
      norm_epsilon: epsilon of the head's norm.
      transform: whether the head has a dense layer and a norm; else it reads the encoder's output itself.
      norm_bias: whether the head's norm has a bias.
      tied: whether logits are products with the encoder's token vectors; else the head has its own.
    """

    backbone: BackboneConfig
    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    transform: bool = True
    norm_bias: bool = True
    tied: bool = True

    def make(self, *, rngs: nnx.Rngs) -> MaskedLanguageModel:
        return MaskedLanguageModel(self, rngs=rngs)

    def make_head(self, *, rngs: nnx.Rngs) -> MaskedLMHead:
        return MaskedLMHead(self, rngs=rngs)


class MaskedLMHead(nnx.Module):
    """A dense layer, an activation and a norm. Logits are products with vectors of tokens, plus `bias` [V].

    The kernel starts from N(0, 0.02^2). `table` holds the head's own token vectors, which start in the same
    way; None: the head uses the encoder's token vectors.
    """

    def __init__(self, config: MaskedLMConfig, *, rngs: nnx.Rngs):
        backbone = config.backbone
        width, dtype = backbone.embed_dim, backbone.dtype
        self.activation = config.activation
        if config.transform:
            self.dense = layers.Linear(width, width, axes=("embed", None), dtype=dtype, rngs=rngs)
            how = {"epsilon": config.norm_epsilon, "dtype": dtype, "use_bias": config.norm_bias}
            self.norm = layers.LayerNorm(width, **how)
        else:
            self.dense = self.norm = None
        self.table = None if config.tied else _table(config, rngs=rngs)
        self.bias = layers.param(outlines.filled(0, (backbone.vocab_size,)), "vocab")

    @checked_shapes
    def __call__(self, x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
        """Returns the vectors [B, L, E] to multiply with the token vectors."""
        if self.dense is None:
            return x
        return self.norm(activations.ACTIVATIONS[self.activation](self.dense(x)))


def _table(config: MaskedLMConfig, *, rngs: nnx.Rngs) -> layers.Embedding:
    backbone = config.backbone
    how = {"axis": "vocab", "dtype": backbone.dtype, "rngs": rngs}
    return layers.Embedding(backbone.vocab_size, backbone.embed_dim, **how)


class MaskedLanguageModel(nnx.Module):
    def __init__(self, config: MaskedLMConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)
        self.head = config.make_head(rngs=rngs)

    @checked_shapes
    def __call__(
        self,
        ids: Int[Array, "B L"],
        *,
        places: Int[Array, "B P"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B P V"]:
        """Returns the logits, float32, of the tokens at the positions `places`; None means all positions."""
        hidden = self.encoder(ids, key=key)
        if places is not None:
            hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
        hidden = self.head(hidden)
        table = self.output_table.whole(hidden.dtype)
        logits = jnp.einsum("BLE,VE->BLV", hidden, table, preferred_element_type=jnp.float32)
        return logits + layers.weight(self.head.bias)[None, None]

    @property
    def output_table(self) -> layers.Embedding:
        """The token vectors whose products with the head's output are the logits."""
        return self.encoder.token_table if self.head.table is None else self.head.table

    def most_likely(
        self, ids: jax.Array, *, places: jax.Array | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns the most likely token, never padding, at the positions `places`: int32 [B, P]."""
        logits = jax.lax.stop_gradient(self(ids, places=places, key=key))
        return logits.at[..., 0].set(-jnp.inf).argmax(-1).astype(jnp.int32)

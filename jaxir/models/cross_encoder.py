"""Cross-encoders: a query and a passage read as one sequence give one score (Nogueira & Cho 2019)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Natural, checked
from jaxir.models import layers
from jaxir.models.activations import gelu
from jaxir.models.adapters import Adapters, attach
from jaxir.models.backbones import BackboneConfig, make_encoder
from jaxir.models.dual_encoder import pool
from jaxir.runtime.partitioning import constrain

_ACTIVATIONS = {"tanh": jnp.tanh, "relu": nnx.relu, "gelu": gelu}
_EPSILON = 1e-5  # epsilon of the head's norm, if the backbone has none


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CrossEncoderConfig:
    """The components of a cross-encoder.

    Attributes:
      backbone: the encoder. With two token types it reads type 0 for tokens of the query and 1 for those of
        the passage; otherwise (RoBERTa, DistilBERT) only separators divide query and passage.
      pooling: what the layer after the encoder reads: "cls", the first token, or "mean" of the real tokens.
      activation: the activation of that layer: "tanh" (BERT, RoBERTa), "relu" (DistilBERT) or "gelu"
        (ModernBERT, DeBERTa).
      normed: whether that layer has no bias and a norm after its activation (ModernBERT), with the epsilon of
        the backbone's norms.
      separator: for `score_texts`, the token that replaces the first token of a passage behind a query
        (RoBERTa: </s>). None: that token ([CLS]) is removed. "own": the passage is unchanged, because it
        begins with no special token (T5). "unknown": not yet read from a tokenizer.
      adapters: LoRA in the encoder; None: none.
    """

    backbone: BackboneConfig
    pooling: Literal["cls", "mean"] = "cls"
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    normed: bool = False
    separator: Natural | Literal["unknown", "own"] | None = "unknown"
    adapters: Adapters | None = None

    @property
    def summary(self) -> str:
        return f"{self.backbone.summary}, scores pairs"

    def make(self, *, rngs: nnx.Rngs) -> "CrossEncoderModel":
        return CrossEncoderModel(self, rngs=rngs)


class CrossEncoderModel(layers.Summarised):
    """An encoder, a dense layer over its pooled vector, and a linear map to one logit (both in float32)."""

    def __init__(self, config: CrossEncoderConfig, *, rngs: nnx.Rngs):
        width, how = config.backbone.embed_dim, {"dtype": "float32", "rngs": rngs}
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)
        self.pooler = layers.Linear(
            width, width, axes=("embed", "affinity"), use_bias=not config.normed, **how
        )
        epsilon = getattr(config.backbone, "layer_norm_epsilon", _EPSILON)
        norm = layers.LayerNorm(width, epsilon=epsilon, dtype="float32", use_bias=False)
        self.norm = norm if config.normed else None
        self.classifier = layers.Linear(width, 1, axes=("embed", None), **how)
        attach(self, config.adapters, rngs=rngs)

    @checked_shapes
    def score(
        self, ids: Int[Array, "B L"], token_types: Int[Array, "B L"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, " B"]:
        """Scores pairs: returns float32 [B] logits; higher is more relevant.

        Tokens of query and passage begin with [CLS]; 0 is padding, on the right. `token_types` is 0 for
        tokens of the query and 1 for those of the passage; encoders with fewer than two types ignore it.
        """
        types = {"token_types": token_types} if self.config.backbone.num_token_types > 1 else {}
        inside, after = layers.split_key(key, 2)
        hidden = self.encoder(ids, **types, key=inside)
        first = constrain(pool(hidden, ids != 0, how=self.config.pooling), ("batch", "activation_embed"))
        activated = _ACTIVATIONS[self.config.activation](self.pooler(first))
        if self.norm is not None:
            activated = self.norm(activated[:, None])[:, 0]
        rate = getattr(self.config.backbone, "dropout_rate", 0.0)
        pooled = layers.dropout(activated, rate, after)
        return constrain(self.classifier(pooled)[:, 0], ("batch",))

    @checked_shapes
    def score_texts(
        self,
        query_ids: Int[Array, "B Lq"],
        passage_ids: Int[Array, "B Lp"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, " B"]:
        """Scores pairs of separately tokenised texts [B, Lq] and [B, Lp].

        For pairs that need no truncation, the joined sequence equals the tokenizer's.

        Raises:
          ValueError: the separator of the configuration is unknown.
        """
        if self.config.separator == "unknown":
            raise ValueError("the separator of two texts is unknown: set CrossEncoderConfig.separator")
        ids, types = join(query_ids, passage_ids, separator=self.config.separator)
        return self.score(ids, types, key=key)


@checked_shapes
def join(
    query_ids: Int[Array, "B Lq"],
    passage_ids: Int[Array, "B Lp"],
    *,
    separator: int | Literal["own"] | None,
) -> tuple[Int[Array, "B L"], Int[Array, "B L"]]:
    """Puts each passage behind its query, in place of the query's padding; 0 is padding, on the right.

    `separator` replaces the first token of a passage. None removes that token, and "own" keeps it. Returns
    ids and token types [B, L], where L is Lq + Lp, or one less without a separator.
    """
    if separator is None:
        passage_ids = passage_ids[:, 1:]
    elif separator != "own":
        passage_ids = passage_ids.at[:, 0].set(separator)
    length = query_ids.shape[1] + passage_ids.shape[1]
    ends = (query_ids != 0).sum(1, keepdims=True, dtype=jnp.int32)
    places = jnp.arange(length, dtype=jnp.int32)[None]
    behind = places >= ends

    def at(ids: jax.Array, places: jax.Array) -> jax.Array:
        # Positions outside a text read the added column of padding.
        padded = jnp.pad(ids, ((0, 0), (0, 1)))
        inside = (places >= 0) & (places < ids.shape[1])
        return jnp.take_along_axis(padded, jnp.where(inside, places, ids.shape[1]), axis=1)

    ids = jnp.where(
        behind, at(passage_ids, places - ends), at(query_ids, jnp.broadcast_to(places, behind.shape))
    )
    return ids, jnp.where(behind & (ids != 0), 1, 0)
